"""Sessions between their turns: what is learned of their pauses, and what pools are told."""

import pytest

from kimi_runtime.router.estimate.gaps import TOOL_PRIOR, Gaps
from kimi_runtime.router.pauses import Arrival, Pauses
from kimi_runtime.router.reuse import gap_reuse
from kimi_runtime.umbp.retention import ReuseView, SessionView

KEYS = tuple(n.to_bytes(16, "big") for n in range(8))


def named(session):
    return session.rjust(16, b"\0")


class Told(list):
    def __call__(self, pool, hint):
        self.append((pool, hint))

    @property
    def kinds(self):
        return [hint.kind for _, hint in self]


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def gaps():
    return Gaps()


@pytest.fixture
def pauses(told, gaps):
    return Pauses(gaps, told, named)


def came(name=b"a", **fields):
    return Arrival(name, "t", "client", **fields)


def test_pools_hear_of_a_session_once_it_has_blocks_there_and_until_it_ends(pauses, told):
    pauses.began(came(), now_s=0.0)
    assert told == []
    pauses.ended(b"a", tools=["bash"], keys={"pool": KEYS[:2]}, now_s=1.0)
    pauses.began(came(), now_s=2.0)
    pauses.over(b"a", now_s=3.0)
    assert told.kinds == ["paused", "active", "ended"]
    (pool, paused), *_ = told
    assert (pool, paused.session, paused.tenant) == ("pool", named(b"a").hex(), "t")
    assert paused.keys == tuple(key.hex() for key in KEYS[:2])
    assert paused.expected == pytest.approx(TOOL_PRIOR.quantile(0.5), abs=1e-3)
    assert len(pauses) == 0


def test_a_pause_is_expected_to_take_what_the_tool_took_before(pauses, told, gaps):
    for _ in range(60):
        gaps.observe("t", "tests", 40.0, ended=True)
        gaps.observe("t", "ls", 0.2, ended=True)
    pauses.began(came(), now_s=0.0)
    quick = pauses.ended(b"a", tools=["ls"], keys={}, now_s=1.0)
    pauses.began(came(), now_s=1.1)
    slow = pauses.ended(b"a", tools=["ls", "tests"], keys={}, now_s=2.0)
    assert slow.quantile(0.5) > 10 * quick.quantile(0.5)
    pauses.began(came(), now_s=3.0)
    person = pauses.ended(b"a", tools=[], keys={}, now_s=4.0)
    assert person.quantile(0.5) > 30


def test_pauses_that_end_and_those_that_never_do_teach_the_hazard(pauses, gaps):
    before = gaps.curve("t", "bash").survival(30.0)
    for n in range(20):
        pauses.began(came(b"%d" % n), now_s=0.0)
        pauses.ended(b"%d" % n, tools=["bash"], keys={}, now_s=0.0)
        if n % 2:
            pauses.began(came(b"%d" % n), now_s=0.5)
            pauses.over(b"%d" % n, now_s=600.0)  # a turn that runs is no pause
    assert gaps.curve("t", "bash").survival(30.0) < before
    assert pauses.expire(now_s=3599.0) == []
    assert len(pauses.expire(now_s=3600.0)) == 10
    assert gaps.curve("t", "bash").survival(30.0) > before


def test_a_history_that_shrank_gives_its_blocks_up(pauses, told):
    pauses.began(came(), now_s=0.0)
    pauses.ended(b"a", tools=[], keys={"pool": KEYS}, now_s=1.0)
    pauses.began(came(given_up={"pool": KEYS[3:]}), now_s=2.0)
    assert told.kinds == ["paused", "compacted", "active"]
    assert told[1][1].keys == tuple(key.hex() for key in KEYS[3:])


def test_a_subagent_is_told_as_a_fork_of_what_it_shares(pauses, told):
    pauses.began(came(), now_s=0.0)
    pauses.ended(b"a", tools=["task"], keys={"pool": KEYS}, now_s=1.0)
    child = came(b"child", parent=b"a", shared={"pool": KEYS[:5], "empty": ()})
    pauses.began(child, now_s=2.0)
    _, fork = told[1]
    assert (fork.kind, fork.session, fork.child) == (
        "forked",
        named(b"a").hex(),
        named(b"child").hex(),
    )
    assert len(fork.keys) == 5
    pauses.failed(b"child", now_s=3.0)
    assert told.kinds == ["paused", "forked", "active", "ended"]


def test_a_session_with_two_turns_pauses_when_both_are_over(pauses, told):
    pauses.began(came(), now_s=0.0)
    pauses.began(came(), now_s=0.0)
    assert pauses.ended(b"a", tools=[], keys={"pool": KEYS}, now_s=1.0) is None
    assert pauses.ended(b"a", tools=[], keys={"pool": KEYS}, now_s=2.0) is not None
    assert told.kinds == ["active", "paused"]


def test_a_turn_without_an_answer_leaves_its_session_waiting(pauses, told):
    pauses.began(came(), now_s=0.0)
    pauses.ended(b"a", tools=["bash"], keys={"pool": KEYS}, now_s=1.0)
    pauses.began(came(), now_s=2.0)
    pauses.failed(b"a", now_s=3.0)
    assert told.kinds == ["paused", "active", "paused"]
    assert len(pauses) == 1


def test_clients_find_their_sessions_by_their_own_word_and_no_other_s(pauses):
    pauses.began(came(), now_s=0.0)
    pauses.began(Arrival(b"b", "u", "client"), now_s=0.0)
    assert pauses.of_client("t", "client") == [b"a"]
    pauses.over(b"a", now_s=1.0)
    assert pauses.of_client("t", "client") == []


def test_the_longest_untouched_session_is_forgotten_first(told, gaps):
    pauses = Pauses(gaps, told, named, max_sessions=2)
    for name in (b"a", b"b", b"c"):
        pauses.began(came(name), now_s=0.0)
    assert len(pauses) == 2
    assert pauses.of_client("t", "client") == [b"b", b"c"]


def test_a_block_is_likelier_wanted_while_its_session_is_expected_back():
    def chance(since_s, expected_s=None, *, paused=True, idle_s=60.0):
        sessions = (SessionView(since_s, expected_s, paused),)
        return gap_reuse(ReuseView(idle_s, 1, sessions))

    nobody = gap_reuse(ReuseView(60.0, 1))
    assert 0 < nobody < chance(0.0, 20.0) <= 1
    assert chance(3.0, 20.0) > chance(1800.0, 20.0) > nobody  # long overdue
    assert chance(30.0, 600.0) > chance(30.0, 5000.0)  # it will be back after the horizon
    assert chance(300.0, paused=False) > chance(300.0)  # a turn that runs is followed by another
    views = [SessionView(s, e, p) for s in (0, 1, 1e9) for e in (None, 0, 1e6) for p in (0, 1)]
    assert all(0 <= gap_reuse(ReuseView(-5.0, 99, (view,))) <= 1 for view in views)
