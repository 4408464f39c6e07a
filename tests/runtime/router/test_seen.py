"""What decisions see of workers is made anew only where something has changed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.router.estimate.outputs import Length
from kimi_runtime.router.insight import Facts
from router_core import TOTAL, Core, info_of, keys_of

LENGTH = Length(5.0, 1.0, 4096)

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("report"),
            st.sampled_from("ab"),
            st.fixed_dictionaries(
                {
                    "waiting": st.integers(0, 2),
                    "running": st.integers(0, 9),
                    "free_blocks": st.sampled_from([0, 5, 300, TOTAL]),
                    "short_blocks": st.sampled_from([None, 0, 3]),
                    "draining": st.booleans(),
                }
            ),
        ),
        st.tuples(st.just("send"), st.sampled_from("ab"), st.integers(1, 9_000)),
        st.tuples(st.just("hold"), st.sampled_from("ab"), st.integers(1, 40)),
        st.tuples(st.just("evict"), st.sampled_from("ab"), st.integers(1, 40)),
        st.tuples(st.just("miss"), st.sampled_from("ab"), st.integers(1, 40)),
        st.tuples(
            st.sampled_from(["lose", "sample", "end", "leave", "come back"]),
            st.sampled_from("ab"),
            st.none(),
        ),
        st.tuples(st.just("restart"), st.sampled_from("ab"), st.booleans()),
        st.tuples(st.just("wait"), st.just("a"), st.sampled_from([0.1, 0.5, 3.0])),
    ),
    min_size=6,
    max_size=16,
)


def happen(core, what, name, more, now_s):
    peer = core[name]
    match what:
        case "report":
            peer.report(now_s=now_s, **more)
        case "send":
            core.insight.answers.begin(name, f"{now_s}", prompt_tokens=more, length=LENGTH)
            core.ledger.start(name, f"{now_s}", new_tokens=more)
        case "sample":  # somebody's first id, say: no load changes by that
            for request in core.insight.answers._workers.get(name, ()):
                core.insight.answers.sampled(name, request, 100)
        case "end":
            for request in list(core.insight.answers._workers.get(name, ())):
                core.insight.answers.end(name, request)
        case "restart":
            sizes = {"total_blocks": TOTAL // 2, "max_context_tokens": 131_072}
            fields = {"epoch": peer.info.epoch + 1, "engine": "another", **sizes}
            peer.info = peer.member.info = info_of(name, **fields)
            if more:
                core.insight.gone(name)
                peer.report(now_s=now_s)
        case "leave":
            core.fleet.leave(name, now_s=now_s)
        case "come back":
            core.fleet.come_back(name)
        case "hold":
            peer.log.add(keys_of(more))
            peer.connect()
        case "evict":
            peer.log.remove(keys_of(more))
            core.insight.evicted(name, keys_of(more), now_s=now_s)
            peer.connect()
        case "miss":
            core.insight.space.computed(name, keys_of(more), seconds=1.0, now_s=now_s)
        case "lose":
            peer.member.ready = not peer.member.ready


@settings(max_examples=100, deadline=None)
@given(steps)
def test_what_is_kept_is_what_would_be_made(drawn):
    core, now_s = Core("a", "b"), 0.0
    for what, name, more in drawn:
        now_s += more if what == "wait" else 0.01
        happen(core, what, name, more, now_s)
        for count in (20, 2, 20):
            _, kept = core.look(keys_of(count), now_s=now_s)
            roster = core.fleet.roster
            core.insight._resting.clear()
            core.fleet._roster = None
            for peer in core.peers.values():
                peer.member.sight.view = None
            _, made = core.look(keys_of(count), now_s=now_s)
            assert kept == made
            assert roster == core.fleet.roster


def test_a_view_is_of_the_request_that_is_asked_for():
    core = Core("a")
    load, facts = core.ledger.loads("a", now_s=0.0)["a"], Facts()
    for asked in ((0, 0, None), (64, 0, None), (64, 128, None), (64, 128, (64,)), (64, 128, ())):
        view = core["a"].member.sight.of(load, facts, *asked, True, False)
        assert (view.cached_tokens, view.pool_tokens, view.checkpoints) == asked


def test_a_worker_of_which_nothing_has_changed_is_seen_as_the_same_object():
    core = Core("a", "b")
    core["a"].report(now_s=0.0)
    core["b"].report(now_s=0.0)
    _, before = core.look(keys_of(3), now_s=0.1)
    core["b"].report(now_s=0.2)
    _, after = core.look(keys_of(3), now_s=0.2)
    assert after[0] is before[0]
    assert after[1] is not before[1]
