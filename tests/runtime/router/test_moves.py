"""Sessions that move with their KV, and bursts that stay together."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kimi_runtime.router.estimate.gaps import HUMAN_PRIOR, TOOL_PRIOR
from kimi_runtime.router.estimate.heat import PrefixHeat
from kimi_runtime.router.moves import Move, Offer, Owner, Owners, Step, may_start, worth_moving
from kimi_runtime.router.siblings import Siblings

GOOD = Offer(
    turns_left=20.0,
    saved_s_per_turn=0.5,
    copy_s=0.1,
    link_delay_s=0.1,
    risk_s=1.0,
    load_here_s=6.0,
    load_there_s=0.5,
    session_load_s=0.5,
)


def changed(**fields):
    return dataclasses.replace(GOOD, **fields)


def test_a_move_must_pay_and_fit_into_the_gap_and_even_out_the_load():
    assert worth_moving(GOOD, HUMAN_PRIOR, since_s=0.0)
    assert not worth_moving(changed(turns_left=1.0), HUMAN_PRIOR, since_s=0.0)
    assert not worth_moving(changed(saved_s_per_turn=-0.1), HUMAN_PRIOR, since_s=0.0)
    assert not worth_moving(changed(risk_s=50.0), HUMAN_PRIOR, since_s=0.0)
    assert not worth_moving(changed(load_there_s=5.5), HUMAN_PRIOR, since_s=0.0)
    assert not worth_moving(changed(copy_s=float("inf")), HUMAN_PRIOR, since_s=0.0)


def test_a_tool_that_is_about_to_return_is_not_raced():
    assert not worth_moving(GOOD, TOOL_PRIOR, since_s=0.3)
    assert worth_moving(GOOD, TOOL_PRIOR, since_s=15.0)


def test_a_draining_worker_is_left_at_any_price_that_time_allows():
    bad = changed(saved_s_per_turn=-1.0, load_there_s=9.0)
    assert worth_moving(bad, HUMAN_PRIOR, since_s=0.0, draining=True)
    assert not worth_moving(bad, TOOL_PRIOR, since_s=0.3, draining=True)


def test_one_move_out_of_and_into_a_worker_at_a_time():
    move = Move(b"s", Owner("a", 1), "b", now_s=0.0, deadline_s=1.0)
    assert not may_start([move], "a", "c")
    assert not may_start([move], "c", "b")
    assert may_start([move], "b", "a")
    move.abort("over")
    assert may_start([move], "a", "b")


def test_a_turn_that_arrives_is_served_where_it_is_soonest():
    owners = Owners()
    for there_s, here_s, waits in ((0.1, 0.5, True), (0.5, 0.1, False)):
        move = Move(b"s", owners.claim(b"s", "a"), "b", now_s=0.0, deadline_s=9.0)
        move.finished(Step.PREPARE, now_s=0.1)
        assert move.asked(there_s=there_s, here_s=here_s, now_s=0.2) is waits
        assert move.drop_copy is not waits


def test_owners_are_bounded_and_forget_dead_workers():
    owners = Owners(max_sessions=3)
    for number in range(10):
        owners.claim(b"%d" % number, "a" if number % 2 else "b")
    assert owners.of(b"0") is None
    owners.lose("a")
    assert [owners.of(b"%d" % n) is None for n in (7, 8, 9)] == [True, False, True]


class Moving(RuleBasedStateMachine):
    """Steps, failures, turns and time in any order: one owner, and no KV lost before the swap."""

    @initialize(deadline_s=st.floats(0.5, 20.0))
    def begin(self, deadline_s):
        self.owners = Owners()
        self.first = self.owners.claim(b"s", "a")
        self.move = Move(b"s", self.first, "b", now_s=0.0, deadline_s=deadline_s)
        self.now_s, self.swapped, self.served_elsewhere = 0.0, False, False

    @rule(step=st.sampled_from(Step), later_s=st.floats(0, 3.0))
    def report(self, step, later_s):
        self.now_s += later_s
        self.move.finished(step, now_s=self.now_s)

    @rule()
    def swap(self):
        if self.move.swap(self.owners, now_s=self.now_s):
            assert not self.swapped
            assert not self.served_elsewhere
            self.swapped = True

    @rule(worker=st.sampled_from(["a", "c"]))
    def serve_elsewhere(self, worker):
        if not self.swapped and worker != "a":
            self.owners.claim(b"s", worker)
            self.served_elsewhere = True

    @rule(there_s=st.floats(0, 2), here_s=st.floats(0, 2))
    def ask(self, there_s, here_s):
        waits = self.move.asked(there_s=there_s, here_s=here_s, now_s=self.now_s)
        assert not (waits and self.move.step is Step.ABORTED)

    @rule()
    def fail(self):
        self.move.abort("it failed")

    @rule(later_s=st.floats(0, 30.0))
    def tick(self, later_s):
        self.now_s += later_s
        self.move.tick(self.now_s)
        late = self.now_s > self.move.deadline_s
        assert not late or self.move.over or self.move.step is Step.RELEASE

    @invariant()
    def there_is_one_owner_and_it_changes_only_by_the_swap(self):
        owner = self.owners.of(b"s").worker
        assert (owner == "b") == self.swapped
        released = self.move.step in (Step.RELEASE, Step.DONE)
        assert released == self.swapped
        assert not (self.move.drop_copy and self.swapped)


TestMoving = Moving.TestCase
TestMoving.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_siblings_see_the_prefix_where_the_first_of_them_went():
    siblings = Siblings()
    assert siblings.promised(b"parent", now_s=0.0) == {}
    siblings.placed(b"parent", "a", tokens=20_000, work_s=0.3, now_s=0.0)
    assert siblings.promised(b"parent", now_s=0.1) == {"a": 20_000}
    assert siblings.promised(b"other", now_s=0.1) == {}


def test_a_large_burst_spreads_over_a_few_copies():
    siblings = Siblings(bound_s=1.0)
    for _ in range(4):
        siblings.placed(b"p", "a", tokens=20_000, work_s=0.3, now_s=0.0)
    assert siblings.promised(b"p", now_s=0.1) == {}
    siblings.placed(b"p", "b", tokens=20_000, work_s=0.3, now_s=0.1)
    assert siblings.promised(b"p", now_s=0.2) == {"b": 20_000}


def test_promises_end_with_their_window_or_with_their_bringer():
    siblings = Siblings(window_s=2.0)
    siblings.placed(b"p", "a", tokens=10, work_s=0.1, now_s=0.0)
    siblings.failed(b"p", "a")
    assert siblings.promised(b"p", now_s=0.1) == {}
    siblings.placed(b"p", "b", tokens=10, work_s=0.1, now_s=0.2)
    assert siblings.promised(b"p", now_s=3.0) == {}
    assert len(siblings) == 0


def test_promises_are_bounded():
    siblings = Siblings(max_parents=4)
    for number in range(50):
        siblings.placed(b"%d" % number, "a", tokens=1, work_s=0.1, now_s=0.0)
    assert len(siblings) == 4


def test_hot_prefixes_are_counted_and_cool_down():
    heat = PrefixHeat(max_keys=3)
    for second in range(600):
        heat.observe([b"hot"], now_s=float(second))
        if second % 10 == 0:
            heat.observe([b"cool"], now_s=float(second))
    assert heat.per_s(b"hot", now_s=600.0) == pytest.approx(1.0, rel=0.05)
    assert heat.per_s(b"cool", now_s=600.0) == pytest.approx(0.1, rel=0.15)
    assert [key for key, _ in heat.hottest(1, now_s=600.0)] == [b"hot"]
    assert heat.per_s(b"hot", now_s=1200.0) < 0.001
    heat.observe([b"1", b"2", b"3"], now_s=1200.0)
    assert len(heat) == 3
