from contextlib import aclosing
from itertools import count
from urllib.parse import parse_qsl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kimi_runtime.errors import ProtocolError
from kimi_runtime.spec.umbp import FeedBatch, FeedEvent, FeedHello, FeedSnapshotPage
from kimi_runtime.umbp.feed import (
    Changes,
    FeedFollower,
    FeedLog,
    FollowState,
    decode_line,
    encode_line,
    feed_path,
)
from kimi_runtime.umbp.serve_feed import Pulse, feed_lines, follow_from

KEYS = [bytes([number]) * 16 for number in range(8)]
SUBSETS = st.lists(st.sampled_from(KEYS), max_size=4)
EXACT, DEGRADED = FollowState.EXACT, FollowState.DEGRADED


def log_of(*keys, epoch=1, keep_events=65_536):
    log = FeedLog("w", epoch=epoch, tier="hbm", block_tokens=64, keep_events=keep_events)
    log.add(keys)
    return log


def opening(log, follower, page_keys=2):
    """What an owner sends first on a new connection, and where its batches go on."""
    epoch, after = follower.resume_point()
    if log.resumes(epoch, after):
        return [log.hello()], after
    pages = list(log.snapshot(page_keys))
    return [log.hello(), *pages], pages[-1].seq


def follow(log, follower, limit=3):
    """One undisturbed connection up to the owner's present; whether nothing was missed."""
    lines, cursor = opening(log, follower)
    whole = all(follower.apply(line) for line in lines)
    while whole and cursor < log.seq:
        batch = log.batch_after(cursor, limit)
        cursor += len(batch.events)
        whole = follower.apply(batch)
    return whole


CHANGES = st.lists(st.tuples(st.sampled_from(("add", "remove")), st.sampled_from(KEYS)), max_size=3)
FAULTS = st.lists(
    st.tuples(st.sampled_from(("lose", "repeat", "swap", "late")), st.integers(0, 99)), max_size=3
)


class DisturbedFeed(RuleBasedStateMachine):
    """An owner that changes and restarts; connections that lose, repeat, swap and cut lines."""

    def __init__(self):
        super().__init__()
        self.epochs = count(1)
        self.follower = FeedFollower()
        self.history = {}  # (epoch, seq) -> what the owner held
        self.archive = []  # every line ever sent
        self.told = 0  # what the newest hello on this connection said there is
        self.connected = False
        self.start_owner()

    def start_owner(self):
        self.log = log_of(epoch=next(self.epochs), keep_events=5)
        self.history[self.log.epoch, 0] = frozenset()

    def change(self, changes):
        for op, key in changes:  # key by key, as the log numbers them
            getattr(self.log, op)([key])
            self.note()

    def note(self):
        held = frozenset(key for key in KEYS if key in self.log)
        self.history[self.log.epoch, self.log.seq] = held

    @rule(changes=CHANGES)
    def change_unheard(self, changes):
        self.change(changes)

    @rule()
    def clear(self):
        self.log.clear()
        self.note()

    @rule()
    def restart(self):
        self.start_owner()

    @rule(rounds=st.lists(CHANGES, max_size=5), faults=FAULTS, limit=st.integers(1, 3))
    def disturbed_connection(self, rounds, faults, limit):
        lines, cursor = opening(self.log, self.follower)
        for changes in rounds:
            self.change(changes)
            batch = self.log.batch_after(cursor, limit)
            if batch is None:
                break  # fell out of the log: the owner ends the stream
            cursor += len(batch.events)
            lines.append(batch)
        self.archive += lines
        for fault, number in faults:
            self.disturb(lines, fault, number)
        self.connected = True
        for line in lines:
            if not self.take(line):
                break
        self.follower.disconnected()
        self.connected = False

    def disturb(self, lines, fault, number):
        at = number % len(lines) if lines else 0
        if fault == "late":
            lines.insert(at, self.archive[number % len(self.archive)])
        elif fault == "lose":
            del lines[at : at + 1]
        elif fault == "repeat":
            lines[at:at] = lines[at : at + 1]
        else:
            lines[at : at + 2] = reversed(lines[at : at + 2])

    @precondition(lambda self: self.archive)
    @rule(number=st.integers(0, 99))
    def hear_a_line_of_a_closed_connection(self, number):
        line = self.archive[number % len(self.archive)]
        if line.kind != "hello":
            assert not self.follower.apply(line)

    @rule()
    def settle(self):
        """Within two undisturbed connections the copy is exact and equal."""
        if not follow(self.log, self.follower):
            self.follower.disconnected()
            assert follow(self.log, self.follower)
        assert self.follower.state is EXACT
        assert self.follower.keys == {key for key in KEYS if key in self.log}
        self.follower.disconnected()

    def take(self, line):
        line = decode_line(encode_line(line))
        whole = self.follower.apply(line)
        self.told = line.seq if line.kind == "hello" else self.told
        self.exact_is_never_claimed_in_vain()
        return whole

    @invariant()
    def exact_is_never_claimed_in_vain(self):
        follower = self.follower
        if follower.state is EXACT:
            assert self.connected
            assert follower.seq >= self.told
            assert frozenset(follower.keys) == self.history[follower.epoch, follower.seq]

    def teardown(self):
        self.settle()


DisturbedFeed.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestDisturbedFeed = DisturbedFeed.TestCase


def test_a_follower_from_the_start_needs_only_batches():
    log, follower = log_of(KEYS[0]), FeedFollower()
    assert follow(log, follower)
    log.add(KEYS[1:3])
    log.remove(KEYS[:1])
    batch = log.batch_after(follower.seq)
    assert [event.op for event in batch.events] == ["add", "add", "remove"]
    assert follower.apply(batch)
    assert (follower.state, follower.keys) == (EXACT, {KEYS[1], KEYS[2]})


def test_adding_or_removing_twice_is_no_change():
    log = log_of(KEYS[0], KEYS[0])
    log.remove([KEYS[1]])
    assert (log.seq, len(log)) == (1, 1)
    assert KEYS[0] in log
    assert KEYS[1] not in log


def test_a_heartbeat_reveals_a_lost_batch():
    log, follower = log_of(), FeedFollower()
    follow(log, follower)
    log.add(KEYS[:1])  # this batch is lost
    heartbeat = log.batch_after(log.seq)
    assert heartbeat.events == ()
    assert not follower.apply(heartbeat)
    assert follower.state is DEGRADED
    assert follower.resume_point() == (1, 0)  # what is known stays known: no snapshot needed
    assert follow(log, follower)
    assert (follower.state, follower.keys) == (EXACT, {KEYS[0]})


def test_a_returning_follower_goes_on_where_it_broke_off():
    log, follower = log_of(*KEYS[:4]), FeedFollower()
    follow(log, follower)
    follower.disconnected()
    assert (follower.state, follower.keys) == (DEGRADED, set(KEYS[:4]))
    log.add(KEYS[4:5])
    lines, cursor = opening(log, follower)
    assert [line.kind for line in lines] == ["hello"]
    assert follower.apply(lines[0])
    assert follower.state is DEGRADED  # the hello says there is more
    assert follower.apply(log.batch_after(cursor))
    assert (follower.state, follower.keys) == (EXACT, set(KEYS[:5]))


def test_a_follower_that_missed_nothing_is_exact_at_the_hello():
    log, follower = log_of(*KEYS[:2]), FeedFollower()
    follow(log, follower)
    follower.disconnected()
    assert follower.apply(log.hello())
    assert follower.state is EXACT


def test_nothing_is_believed_before_a_hello():
    log, follower = log_of(KEYS[0]), FeedFollower()
    follow(log, follower)
    follower.disconnected()
    log.remove(KEYS[:1])
    assert not follower.apply(FeedBatch(epoch=1, first_seq=1, events=()))
    assert not follower.apply(next(log.snapshot()))
    assert follower.state is DEGRADED
    assert follower.resume_point() == (1, 1)


def test_what_fell_out_of_the_log_comes_as_a_snapshot():
    log, follower = log_of(keep_events=2), FeedFollower()
    follow(log, follower)
    log.add(KEYS[:3])
    assert log.batch_after(0) is None
    assert not log.resumes(*follower.resume_point())
    assert log.resumes(1, 1)
    assert follow(log, follower)
    assert (follower.state, follower.keys, follower.seq) == (EXACT, set(KEYS[:3]), 3)


def test_a_position_the_owner_never_had_is_not_resumed():
    log = log_of(KEYS[0])
    assert not log.resumes(1, 2)
    assert not log.resumes(2, 1)
    assert not log.resumes(None, 0)
    assert log.batch_after(2) is None


def test_a_restarted_owner_holds_nothing_of_before():
    follower = FeedFollower()
    follow(log_of(*KEYS[:2], epoch=1), follower)
    restarted = log_of(KEYS[5], epoch=2)
    assert follower.apply(restarted.hello())
    assert (follower.state, follower.keys) == (DEGRADED, set())
    assert follow(restarted, follower)
    assert follower.keys == {KEYS[5]}


def test_another_owner_with_the_same_epoch_and_number_is_not_mistaken():
    follower = FeedFollower()
    follow(log_of(KEYS[0]), follower)
    other = FeedLog("another", epoch=1, tier="dram")
    other.add(KEYS[1:2])
    follower.disconnected()
    assert follower.apply(other.hello())
    assert (follower.state, follower.keys) == (DEGRADED, set())


def test_an_owner_that_knows_less_than_its_follower_is_followed_anew():
    follower = FeedFollower()
    follow(log_of(*KEYS[:3]), follower)
    follower.disconnected()
    forgetful = log_of(KEYS[7])  # the same epoch, against the rules
    assert not forgetful.resumes(*follower.resume_point())
    assert follow(forgetful, follower)
    assert (follower.state, follower.keys) == (EXACT, {KEYS[7]})


@pytest.mark.parametrize(("held", "pages"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_snapshot_comes_in_pages_and_the_last_says_so(held, pages):
    log = log_of(*KEYS[:held])
    snapshot = list(log.snapshot(page_keys=2))
    assert [page.last for page in snapshot] == [False] * (pages - 1) + [True]
    assert [page.page for page in snapshot] == list(range(pages))
    assert {key for page in snapshot for key in page.keys} == {key.hex() for key in KEYS[:held]}


def test_a_snapshot_is_of_one_moment():
    log = log_of(*KEYS[:3])
    pages = log.snapshot(page_keys=1)
    first = next(pages)
    log.clear()
    rest = list(pages)
    assert [len(page.keys) for page in (first, *rest)] == [1, 1, 1]
    assert {page.seq for page in (first, *rest)} == {3}


def test_half_a_snapshot_leaves_the_copy_degraded():
    log, follower = log_of(*KEYS[:3]), FeedFollower()
    lines, _ = opening(log, follower)
    for line in lines[:-1]:
        assert follower.apply(line)
    assert (follower.state, follower.keys) == (DEGRADED, set())


def test_pages_of_two_snapshots_are_not_mixed():
    log, follower = log_of(*KEYS[:3]), FeedFollower()
    hello, first, _ = opening(log, follower)[0]
    log.remove(KEYS[:1])
    second = list(log.snapshot(page_keys=2))[-1]
    assert follower.apply(hello)
    assert follower.apply(first)
    assert not follower.apply(second.model_copy(update={"page": 1}))
    assert follower.state is DEGRADED


def test_batches_are_cut_to_the_limit():
    log = log_of(*KEYS)
    sizes, cursor = [], 0
    while batch := log.batch_after(cursor, 3):
        if not batch.events:
            break
        sizes.append(len(batch.events))
        cursor += len(batch.events)
    assert sizes == [3, 3, 2]


def test_a_clear_forgets_everything_at_once():
    log, follower = log_of(*KEYS), FeedFollower()
    follow(log, follower)
    log.clear()
    assert follower.apply(log.batch_after(follower.seq))
    assert (follower.state, follower.keys, len(log)) == (EXACT, set(), 0)


LINES = [
    FeedHello(owner="w", epoch=1, seq=2, tier="dram", block_tokens=0),
    FeedSnapshotPage(epoch=1, seq=2, page=0, last=True, keys=(KEYS[1].hex(),)),
    FeedBatch(epoch=1, first_seq=1, events=(FeedEvent(op="clear"),)),
]


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("line", LINES)
def test_a_line_survives_its_encoding(line, summed):
    encoded = encode_line(line, summed=summed)
    assert encoded.endswith(b"\n")
    assert encoded.count(b"\n") == 1
    assert decode_line(encoded) == line


@pytest.mark.parametrize("line", LINES)
def test_no_bit_of_a_line_can_be_wrong_unnoticed_nor_its_end_be_lost(line):
    encoded = encode_line(line, summed=True)[:-1]
    for bit in range(8 * len(encoded)):
        wrong = bytearray(encoded)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="feed line does not parse"):
            decode_line(bytes(wrong))
    for end in range(len(encoded)):
        with pytest.raises(ProtocolError, match="feed line does not parse"):
            decode_line(encoded[:end])


async def first_line(query):
    pulse, log = Pulse(), log_of(*KEYS[:2])
    lines = feed_lines(log, pulse, follow_from(query), interval_s=0.0)
    async with aclosing(lines):
        return await anext(lines)


async def test_who_asks_for_no_checksums_gets_lines_as_earlier_versions_wrote_them():
    told = b'{"kind":"hello","owner":"%b","epoch":%d,"seq":2,"tier":"%b","block_tokens":%d}\n'
    log = log_of(*KEYS[:2])
    told %= log.owner.encode(), log.epoch, log.tier.encode(), log.block_tokens
    assert await first_line({}) == await first_line({"sum": "crc"}) == told
    assert decode_line(told) == log.hello()


async def test_who_asks_for_checksums_gets_them():
    path = feed_path(None, 0)
    query = dict(parse_qsl(path.partition("?")[2]))
    line = await first_line(query)
    assert line[17:] == await first_line({})
    assert decode_line(line) == log_of(*KEYS[:2]).hello()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"kind":"rumour"}',
        b'{"kind":"batch","epoch":1,"first_seq":0,"events":[]}',
        b'{"kind":"batch","epoch":1,"first_seq":1,"events":[{"op":"add","key":null}]}',
        b'{"kind":"snapshot","epoch":1,"seq":1,"page":0,"last":true,"keys":["zz"]}',
        b'{"kind":"hello","owner":"w","epoch":1,"seq":1,"tier":"hbm","block_tokens":1,"new":1}',
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_none_is_a_protocol_error(text):
    with pytest.raises(ProtocolError, match="feed line does not parse"):
        decode_line(text)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(("add", "remove", "clear")), SUBSETS), max_size=12),
    st.integers(1, 5),
)
def test_changes_say_what_their_wire_format_says(done, limit):
    log = log_of(keep_events=1000)
    near, far = FeedFollower(), FeedFollower()
    for follower in (near, far):
        follower.apply(log.hello())
    for op, keys in done:
        getattr(log, op)(*([keys] if op != "clear" else []))
    while near.seq < log.seq:
        changes = log.changes_after(near.seq, limit)
        batch = log.batch_after(near.seq, limit)
        assert Changes.of(decode_line(encode_line(batch))) == changes
        assert near.take(changes)
        assert far.apply(batch)
        assert set(near.keys) == set(far.keys)
    assert set(near.keys) == {key for key in KEYS if key in log}
    assert (near.state, near.seq) == (far.state, far.seq)
