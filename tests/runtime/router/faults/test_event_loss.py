"""Feed events that never arrive cost a miss or a detour, never a request."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.umbp.feed import FollowState
from router_core import Core, keys_of

PROMPT = keys_of(400)


def test_a_lost_add_is_a_prefix_that_nobody_is_known_to_hold_until_the_next_connection():
    core = Core("a", "b")
    core["a"].log.add(PROMPT)
    core["a"].batch(0)  # lost
    core["a"].log.add(keys_of(1, 1000))
    assert not core["a"].hear(core["a"].batch(len(PROMPT)))
    _, views = core.look(PROMPT)
    assert {view.cached_tokens for view in views} == {0}
    assert core.decide(PROMPT).plan.decode in ("a", "b")
    core["a"].connect()
    assert core.worker(PROMPT) == "a"


def test_a_lost_removal_is_noticed_by_the_hits_that_do_not_come_true():
    core = Core("a", "b")
    core["a"].log.add(PROMPT)
    core["a"].connect()
    assert core.worker(PROMPT) == "a"
    core["a"].log.remove(PROMPT)  # and nobody hears of it
    held = len(PROMPT) * 64
    for _ in range(200):
        core.planner.models.hits.observe("a", "hbm", predicted=held, found=0)
    assert core.planner.models.hits.alarms() == {
        ("a", "hbm"): core.planner.models.hits.ratio("a", "hbm")
    }
    core["a"].report(queued_tokens=20_000, waiting=1)
    assert core.worker(PROMPT) == "b"


def test_without_any_event_sessions_still_go_to_their_owner():
    core = Core("a", "b", "c")
    assert core.feeds.held("a") == 0
    for name in "abc":
        core.feeds._index.disconnected(name)
        assert core.feeds.held(name) is None
    assert core.worker(PROMPT, owners=("c",)) == "c"


@settings(max_examples=50, deadline=None)
@given(lost=st.sets(st.integers(0, 9)), removed=st.sets(st.integers(0, 399), max_size=20))
def test_whatever_is_lost_a_decision_is_made_and_the_copy_never_claims_what_it_missed(
    lost, removed
):
    core = Core("a", "b")
    peer, after = core["a"], 0
    for number in range(10):
        peer.log.add(PROMPT[40 * number : 40 * number + 40])
        peer.log.remove([PROMPT[one] for one in removed if one // 40 == number])
        line = peer.batch(after)
        after = peer.log.seq
        if number not in lost:
            peer.hear(line)
        state = core.feeds._index.state("a")
        if state is FollowState.EXACT and number not in lost:
            assert core.feeds.held("a") == len(peer.log)
        assert core.decide(PROMPT).plan.decode in ("a", "b")
    peer.connect()
    assert core.feeds.held("a") == len(peer.log)
