"""Sessions admitted against KV space."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kimi_runtime.router.session_queue import AGEING_S, Outcome, SessionQueue, Turn
from kimi_runtime.router.view import RequestClass

BACKGROUND = RequestClass.BACKGROUND


def turn(name, tokens=100, tenant="t", **fields):
    return Turn(name.encode(), tenant, tokens, **fields)


def names(turns):
    return [one.session.decode() for one in turns]


def full(capacity=1000, **limits):
    queue = SessionQueue(capacity, **limits)
    queue.arrive(turn("first", capacity), now_s=0.0)
    return queue


def test_a_session_starts_when_it_fits_and_waits_when_it_does_not():
    queue = SessionQueue(1000)
    assert queue.arrive(turn("a", 600), now_s=0.0).outcome is Outcome.ADMITTED
    assert queue.arrive(turn("b", 600), now_s=0.0).outcome is Outcome.WAITING
    assert queue.ready(now_s=1.0) == []
    queue.end(b"a", now_s=2.0)
    assert names(queue.ready(now_s=2.0)) == ["b"]
    assert queue.used_tokens == 600


def test_a_turn_of_a_running_session_only_needs_what_it_grew_by():
    queue = SessionQueue(1000)
    queue.arrive(turn("a", 600), now_s=0.0)
    queue.arrive(turn("b", 300), now_s=0.0)
    assert queue.arrive(turn("a", 690), now_s=1.0).outcome is Outcome.ADMITTED
    assert queue.used_tokens == 990
    assert queue.arrive(turn("a", 500), now_s=2.0).outcome is Outcome.ADMITTED
    assert queue.used_tokens == 990  # nothing is given back before the end


def test_running_sessions_go_before_new_ones_however_long_those_waited():
    queue = SessionQueue(1000)
    queue.arrive(turn("a", 500), now_s=0.0)
    queue.arrive(turn("b", 500), now_s=0.0)
    queue.arrive(turn("new", 100), now_s=1.0)
    queue.arrive(turn("a", 560), now_s=500.0)
    queue.end(b"b", now_s=501.0)
    assert names(queue.ready(now_s=501.0)) == ["a", "new"]


def test_interactive_starts_go_first_until_the_others_have_waited_long():
    queue = full()
    queue.arrive(turn("batch", 1000, urgency=BACKGROUND), now_s=0.0)
    queue.arrive(turn("chat", 1000), now_s=1.0)
    queue.end(b"first", now_s=2.0)
    assert names(queue.ready(now_s=2.0)) == ["chat"]
    queue.arrive(turn("chat 2", 1000), now_s=2 * AGEING_S + 3)
    queue.end(b"chat", now_s=2 * AGEING_S + 4)
    assert names(queue.ready(now_s=2 * AGEING_S + 4)) == ["batch"]


def test_tenants_share_by_weight_however_many_sessions_they_bring():
    queue = full(capacity=1000)
    for number in range(60):
        queue.arrive(turn(f"greedy {number}", tenant="greedy"), now_s=0.0)
    for number in range(20):
        queue.arrive(turn(f"modest {number}", tenant="modest"), now_s=0.0)
        queue.arrive(turn(f"double {number}", tenant="double", weight=2.0), now_s=0.0)
    queue.end(b"first", now_s=1.0)
    served, given = Counter(), queue.ready(now_s=1.0)
    while sum(served.values()) < 40:
        served.update(one.tenant for one in given)
        for one in given:
            queue.end(one.session, now_s=2.0)
        given = queue.ready(now_s=2.0)
    assert served["double"] == pytest.approx(20, abs=2)
    assert served["greedy"] == pytest.approx(10, abs=2)
    assert served["modest"] == pytest.approx(10, abs=2)


def test_a_large_session_is_not_passed_for_ever():
    queue = full(capacity=1000)
    queue.arrive(turn("large", 900), now_s=0.0)
    queue.end(b"first", now_s=1.0)
    queue.arrive(turn("small", 200), now_s=1.0)
    assert names(queue.ready(now_s=1.0)) == ["large"]


def test_a_full_queue_refuses_starts_and_makes_room_for_turns():
    queue = full(max_waiting=2)
    queue.arrive(turn("one"), now_s=1.0)
    queue.arrive(turn("two"), now_s=2.0)
    refused = queue.arrive(turn("three"), now_s=3.0)
    assert refused.outcome is Outcome.REFUSED
    assert refused.retry_after_s >= 1
    queue.arrive(turn("other", 0), now_s=3.0)
    queue._held[b"other"] = 1
    queue.used_tokens += 1
    answer = queue.arrive(turn("other", 50), now_s=4.0)
    assert answer.outcome is Outcome.WAITING
    assert answer.shed == turn("two")


def test_what_can_never_fit_is_refused_but_a_session_that_grew_alone_goes_on():
    queue = SessionQueue(1000)
    assert queue.arrive(turn("huge", 1001), now_s=0.0).outcome is Outcome.REFUSED
    queue.arrive(turn("a", 900), now_s=0.0)
    assert queue.arrive(turn("a", 1200), now_s=1.0).outcome is Outcome.ADMITTED


def test_retry_after_is_computed_from_how_fast_space_becomes_free():
    queue = SessionQueue(1000)
    for number in range(10):
        queue.arrive(turn(f"s{number}"), now_s=0.0)
    assert queue.retry_after_s(100) == 60.0  # nobody knows yet
    for number in range(5):
        queue.end(f"s{number}".encode(), now_s=10.0 * (number + 1))
    assert queue.retry_after_s(100) == 1.0
    assert queue.retry_after_s(700) == pytest.approx(20.0)  # 200 too many, 10 a second


def test_who_leaves_the_queue_holds_nobody_back():
    queue = full()
    queue.arrive(turn("gone", 1000), now_s=0.0)
    queue.arrive(turn("next", 10), now_s=0.0)
    queue.give_up(b"gone")
    queue.end(b"first", now_s=1.0)
    assert names(queue.ready(now_s=1.0)) == ["next"]


class Sessions(RuleBasedStateMachine):
    """Any order of arrivals, ends and departures."""

    sessions = st.integers(0, 12).map(lambda n: b"%d" % n)

    def __init__(self):
        super().__init__()
        self.queue = SessionQueue(1000, max_waiting=6)
        self.running = {}
        self.now_s = 0.0

    @rule(
        session=sessions,
        tokens=st.integers(1, 1100),
        urgency=st.sampled_from(RequestClass),
        later_s=st.floats(0, 20),
    )
    def arrive(self, session, tokens, urgency, later_s):
        self.now_s += later_s
        tenant = f"t{session[0] % 3}"
        was_running = session in self.running
        asked = Turn(session, tenant, tokens, urgency)
        answer = self.queue.arrive(asked, now_s=self.now_s)
        if was_running and answer.outcome is Outcome.REFUSED:
            raise AssertionError("a running session was refused")
        if answer.shed is not None:
            assert answer.shed.session not in self.running
        if answer.outcome is Outcome.ADMITTED:
            self.running[session] = max(tokens, self.running.get(session, 0))
        if answer.outcome is not Outcome.ADMITTED:
            assert answer.retry_after_s >= 1

    @rule(later_s=st.floats(0, 20))
    def admit(self, later_s):
        self.now_s += later_s
        for one in self.queue.ready(now_s=self.now_s):
            self.running[one.session] = max(one.tokens, self.running.get(one.session, 0))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        session = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[session]
        self.queue.end(session, now_s=self.now_s)

    @rule(session=sessions)
    def give_up(self, session):
        self.queue.give_up(session)

    @invariant()
    def the_books_are_right(self):
        assert self.queue.used_tokens == sum(self.running.values())
        assert all(self.queue.holds(s) == tokens for s, tokens in self.running.items())
        assert self.queue.used_tokens <= 1000 or len(self.running) == 1
        assert self.queue.waiting <= 6 + len(self.running)

    def teardown(self):
        """Once everybody ends, everybody who waits is served: nobody is stuck."""
        for _ in range(100):
            for session in list(self.running):
                self.end_all(session)
            if not self.queue.waiting:
                return
            for one in self.queue.ready(now_s=self.now_s):
                self.running[one.session] = one.tokens
        assert not self.queue.waiting

    def end_all(self, session):
        waits = self.queue._waiting.get(session)
        self.queue.end(session, now_s=self.now_s)
        del self.running[session]
        if waits is not None and waits.turn.tokens <= 1000:
            self.queue.arrive(waits.turn, now_s=self.now_s)
            if self.queue.holds(session):
                self.running[session] = waits.turn.tokens


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_a_paused_session_makes_room_for_turns_and_for_starts_once_it_is_late():
    queue = full(capacity=1000)
    queue.pause(b"first", tokens=900, until_s=10.0)
    assert queue.arrive(turn("start", 400), now_s=5.0).outcome is Outcome.WAITING
    assert queue.next_s(now_s=5.0) == 10.0
    assert queue.ready(now_s=9.0) == []
    back = turn("other", 400, continues=True)
    assert queue.arrive(back, now_s=9.0).outcome is Outcome.ADMITTED
    assert queue.holds(b"first") == 0
    assert names(queue.ready(now_s=10.0)) == ["start"]


def test_who_is_expected_last_makes_room_first_and_only_as_many_as_are_needed():
    queue = SessionQueue(1000)
    for name, until_s in (("soon", 20.0), ("later", 90.0), ("late", 5.0)):
        queue.arrive(turn(name, 300), now_s=0.0)
        queue.pause(name.encode(), tokens=300, until_s=until_s)
    queue.arrive(turn("a", 350, continues=True), now_s=10.0)
    assert [queue.holds(name) for name in (b"soon", b"later", b"late")] == [300, 300, 0]
    queue.arrive(turn("b", 300, continues=True), now_s=10.0)
    assert [queue.holds(name) for name in (b"soon", b"later")] == [300, 0]


def test_a_turn_whose_room_was_given_up_goes_before_starts_and_is_never_refused():
    queue = full(max_waiting=1)
    queue.arrive(turn("start", 100), now_s=0.0)
    answer = queue.arrive(turn("back", 2000, continues=True), now_s=1.0)
    assert (answer.outcome, answer.shed) == (Outcome.WAITING, turn("start", 100))
    queue.pause(b"first", tokens=1000, until_s=99.0)
    assert names(queue.ready(now_s=1.0)) == ["back"]


class Turns(RuleBasedStateMachine):
    """Turns that run, pause and come back, while the memory for them changes."""

    sessions = st.integers(0, 9).map(lambda n: b"%d" % n)

    def __init__(self):
        super().__init__()
        self.queue = SessionQueue(1000, max_waiting=8)
        self.running, self.known, self.waiting = set(), {}, {}
        self.now_s = 0.0

    @rule(session=sessions, more=st.integers(1, 400), later_s=st.floats(0, 20))
    def arrive(self, session, more, later_s):
        self.now_s += later_s
        if session in self.running or session in self.waiting:
            return
        tokens = self.known.get(session, 0) + more
        asked = Turn(session, "t", tokens, continues=session in self.known)
        if not asked.continues:
            tokens = min(tokens, self.queue.capacity_tokens)
        was_over = self.queue.used_tokens > self.queue.capacity_tokens
        answer = self.queue.arrive(asked, now_s=self.now_s)
        if answer.shed is not None:
            assert answer.shed.session not in self.known
            del self.waiting[answer.shed.session]
        if answer.outcome is Outcome.WAITING:
            self.waiting[session] = asked
        if answer.outcome is Outcome.REFUSED:
            assert not asked.continues
        if answer.outcome is Outcome.ADMITTED:
            self.admitted(asked, was_over)

    def admitted(self, asked, was_over=False):
        self.running.add(asked.session)
        grew_alone = len(self.running) == 1 and not self.queue.paused
        over = self.queue.used_tokens > self.queue.capacity_tokens
        assert not over or was_over or grew_alone, "more was let in than there is room for"

    @rule(later_s=st.floats(0, 20))
    def look(self, later_s):
        self.now_s += later_s
        was_over = self.queue.used_tokens > self.queue.capacity_tokens
        for one in self.queue.ready(now_s=self.now_s):
            del self.waiting[one.session]
            self.admitted(one, was_over)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), pause_s=st.floats(0, 60), wrote=st.integers(0, 50))
    def pause(self, data, pause_s, wrote):
        session = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(session)
        self.known[session] = self.queue.holds(session) + wrote
        until_s = self.now_s + pause_s
        self.queue.pause(session, tokens=self.known[session], until_s=until_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        session = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(session)
        self.known.pop(session, None)
        self.queue.end(session, now_s=self.now_s)

    @rule(capacity=st.integers(1, 2000))
    def memory_changes(self, capacity):
        self.queue.capacity_tokens = capacity

    @invariant()
    def what_runs_is_never_given_up(self):
        assert all(self.queue.holds(session) for session in self.running)
        assert self.queue.waiting == len(self.waiting)
        assert self.queue.used_tokens == sum(self.queue._held.values())

    def teardown(self):
        """Turns that run end sometime, and then somebody who waits goes on: nobody is stuck."""
        for _ in range(30):
            for session in self.running:
                tokens = self.queue.holds(session)
                self.queue.pause(session, tokens=tokens, until_s=self.now_s + 30)
            self.running.clear()
            if not self.waiting:
                return
            before = len(self.waiting)
            turns_wait = any(one.continues for one in self.waiting.values())
            if not turns_wait:
                self.now_s += 61  # starts wait until paused sessions, of 60 s at most, are late
            self.look(0.0)
            assert len(self.waiting) < before


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
