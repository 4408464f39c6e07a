"""What other routers got wrong in public; README.md lists where each is kept out."""

from collections import Counter
from contextlib import ExitStack

from kimi_runtime.router.siblings import Siblings
from kimi_runtime.spec.worker import Role
from router_core import BLOCK, Core, info_of, keys_of

PROMPT = keys_of(400)
ASK = {"prompt_tokens": 20_000}


def pair_core(decodes):
    """One prefill worker and several that decode."""
    core = Core("p", *(f"d{n}" for n in range(decodes)))
    for name, peer in core.peers.items():
        role = Role.PREFILL if name == "p" else Role.DECODE
        peer.info = peer.member.info = info_of(name, role=role)
    return core


def test_one_prefill_worker_feeds_all_decode_workers():
    core, chosen = pair_core(5), Counter()
    for number in range(300):
        decision = core.decide(session=b"s%d" % number, starts_session=True, **ASK)
        name = decision.plan.decode
        chosen[name] += 1
        core.ledger.start(name, f"{number}", new_tokens=0)
        if number >= 20:
            core.ledger.finish(name, f"{number - 20}")
    assert len(chosen) == 5
    assert max(chosen.values()) < 2 * min(chosen.values())


def test_another_replica_sends_a_session_to_who_has_it():
    one, other = Core("a", "b", "c"), Core("a", "b", "c")
    for number in range(20):
        session, keys = b"s%d" % number, keys_of(300, 1000 * number)
        owner = one.worker(keys, session=session, starts_session=True)
        for core in (one, other):  # both follow the owner's feed
            core[owner].log.add(keys)
            core[owner].connect()
        assert other.worker(keys, session=session) == owner  # that never served it


def test_a_burst_of_subagents_shares_the_first_one_s_prefix():
    core, fronts = Core(*(f"w{n}" for n in range(8))), ((400 * BLOCK, PROMPT[-1]),)
    siblings: Siblings = core.insight.siblings
    holders = set()
    with ExitStack() as running:
        for number in range(6):
            asked, views = core.look(PROMPT, session=b"child %d" % number, starts_session=True)
            own = {view.name: view.cached_tokens for view in views}
            core.insight.promised(fronts, own, now_s=0.0)
            for view in views:
                view.cached_tokens = own[view.name]
            decision = core.decisions.decide("r", asked, views, fronts=fronts, now_s=0.0)
            running.enter_context(core.carry_out(f"{number}", decision))
            holders.add(decision.plan.decode)
            assert siblings.promised(PROMPT[-1], now_s=0.0)
    assert len(holders) <= 2


def test_a_miss_never_goes_to_the_overloaded_worker():
    core = Core("small", "b", "c")  # it holds least, and is chosen for that elsewhere
    for name in "bc":
        core[name].log.add(keys_of(2000, 5000))
        core[name].connect()
    core["small"].report(waiting=30, queued_tokens=900_000, running=40)
    chosen = Counter(core.worker(keys_of(300, 50_000 + n), session=b"%d" % n) for n in range(40))
    assert chosen["small"] == 0


def test_one_hot_worker_takes_affinity_from_nobody_else():
    core = Core("hot", "a", "b")
    core["a"].log.add(PROMPT)
    core["a"].connect()
    assert core.worker(PROMPT) == "a"
    core["hot"].report(waiting=200, running=60, queued_tokens=5_000_000)
    assert core.worker(PROMPT) == "a"


def test_sessions_whose_names_look_alike_are_two():
    core = Core(*(f"w{n}" for n in range(8)))
    names = [b"session-1", b"session-12", b"session-123", b"", b"session-", b"Session-1"]
    chosen = {name: core.worker(session=name, **ASK) for name in names}
    assert len(set(chosen.values())) > 1
    assert chosen == {name: core.worker(session=name, **ASK) for name in names}


def test_a_saturated_owner_is_left():
    core = Core("owner", "b", "c")
    core["owner"].log.add(PROMPT)
    core["owner"].connect()
    assert core.worker(PROMPT, owners=("owner",)) == "owner"
    core["owner"].report(waiting=40, running=60, queued_tokens=4_000_000, free_blocks=0)
    assert core.worker(PROMPT, owners=("owner",)) != "owner"


def test_sessions_without_overlap_spread_over_equal_workers():
    core = Core("a", "b")
    for name, start in (("a", 1000), ("b", 9000)):
        core[name].log.add(keys_of(4000, start))
        core[name].connect()
    chosen = Counter(
        core.worker(keys_of(200, 100_000 + 1000 * n), session=b"s%d" % n) for n in range(200)
    )
    assert 60 < chosen["a"] < 140
