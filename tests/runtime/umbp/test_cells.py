"""The pool's account in the arena: read by others meanwhile, and after any crash."""

import os
import signal
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.arena import Shape, create_arena, reopen_arena
from kimi_connect.blocks import PIECE_BYTES, SHARED_PIECE_BYTES, copy_in, copy_local, copy_out
from kimi_connect.directory import CELL_BYTES, PROBE, Cells
from kimi_connect.wire import Extent, Grant, Granted, GroupTag, PinnedBlock, Priority
from kimi_runtime.umbp.cells import CellJournal
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.journal import Kept
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.records import Block, Reservation
from kimi_runtime.umbp.tags import block_tags, leaves
from kimi_runtime.umbp.tenants import Account, Terms

PAGE = 512
OWN = b"this daemon's own"
SHAPE = Shape(PAGE, 40, Cells(slots=24, spares=40))
WRITER = b"a writer of ours"


def key(n):
    return n.to_bytes(16, "little")


def content(n, size):
    return memoryview((bytes([n]) + key(n) * (size // 16 + 1))[:size])


def no_stop():
    return False


def new_pool(arena, journal, kept=Kept()):  # noqa: B008  (frozen)
    feed = FeedLog("pool", epoch=1, tier="dram")
    pool = Pool(arena.pages, PAGE, feed, 30.0, 10.0, journal=journal)
    pool.adopt(kept, 0.0)
    return pool


def make(folder, **changes):
    shape = SHAPE._replace(**changes)
    arena = create_arena(
        str(folder / "arena"), page_bytes=PAGE, pages=shape.pages, epoch=1, cells=shape.cells
    )
    journal = CellJournal(arena, own_writer=OWN)
    return arena, journal, new_pool(arena, journal)


def put(pool, arena, n, size=700, groups=(), tenant="default", now_s=0.0):
    (granted,) = pool.reserve([(key(n), size)], writer=WRITER, now_s=now_s, tenant=tenant)
    if granted.grant is not Grant.RESERVED:
        return
    blocks = [content(n, size)]
    written = copy_in(arena, [key(n)], [granted], blocks, groups, leaves, no_stop)
    pool.commit(written, writer=WRITER, now_s=now_s)


def again(folder):
    """What the next daemon finds."""
    arena = reopen_arena(str(folder / "arena"), SHAPE)
    journal = CellJournal(arena, own_writer=OWN)
    return arena, journal, journal.recover()


def assert_intact(arena, kept):
    """Every block that is listed has its key's bytes."""
    for block in kept.blocks:
        back = memoryview(bytearray(block.size))
        pinned = PinnedBlock(block.generation, block.size, block.tags, block.extents)
        assert copy_out(arena, [block.key], [pinned], [back], leaves, no_stop).good == 1
        assert back == content(block.key[0], block.size)


def test_blocks_and_reservations_come_back_as_they_were(tmp_path):
    arena, _, pool = make(tmp_path)
    put(pool, arena, 1)
    put(pool, arena, 2, size=4000, groups=(500,) * 8, tenant="somebody")
    put(pool, arena, 3)
    pool.drop(key(3), pool.block(key(3)).generation)
    (granted,) = pool.reserve([(key(4), 1000)], writer=WRITER, now_s=0.0)
    pool.reserve([(key(5), 10)], writer=OWN, now_s=0.0)
    after, _, kept = again(tmp_path)
    assert {block.key for block in kept.blocks} == {key(1), key(2)}
    (two,) = [block for block in kept.blocks if block.key == key(2)]
    assert (two.tags, two.tenant) == (pool.block(key(2)).tags, "somebody")
    (old,) = kept.reservations
    assert (old.generation, old.writer, old.extents) == (
        granted.generation,
        WRITER,
        granted.extents,
    )
    assert kept.number >= pool.number
    assert_intact(after, kept)


class DyingJournal(CellJournal):
    """Ends its process at a store, after the first part of what was to be stored."""

    def __init__(self, arena, store, part):
        super().__init__(arena, own_writer=OWN)
        self.stores, self._last, self._part = 0, store, part

    def _store(self, at, data):
        if self.stores == self._last:
            super()._store(at, data[: int(len(data) * self._part)])
            os.kill(os.getpid(), signal.SIGKILL)
        self.stores += 1
        super()._store(at, data)


def life(arena, journal, told):
    """A daemon's day. `told` hears of what was put (+), may go (~), is gone (-), is written (w)."""
    pool = new_pool(arena, journal)
    for n in range(1, 7):
        size = 200 + 600 * n
        put(pool, arena, n, size=size, groups=(size // 8,) * 8 if n % 2 else ())
        told(b"+", n)
    told(b"~", 1)
    assert pool.evict(1) == [key(1)]
    told(b"-", 1)
    told(b"~", 3)
    pool.drop(key(3), pool.block(key(3)).generation)
    told(b"-", 3)
    put(pool, arena, 7, size=4000)  # in several places, some of them others' before
    told(b"+", 7)
    (granted,) = pool.reserve([(key(8), 900)], writer=WRITER, now_s=0.0)
    told(b"w", granted.generation)
    next(arena.parts(granted.extents, 900))[:300] = bytes(300)
    (other,) = pool.reserve([(key(9), 900)], writer=WRITER, now_s=0.0)
    pool.abort([other.generation], writer=WRITER)
    for n in range(256):
        told(b"~", n)
    for n in range(10, 16):
        put(pool, arena, n, size=3000, now_s=1.0)
    pool.clear(pool.number - 2)
    assert pool.counters.evicted > 3


def killed_at(folder, store, part):
    """What clients were told before the end. The daemon makes its arena: a fork has no other's."""
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            arena, _, _ = make(folder)
            journal = DyingJournal(arena, store, part)
            life(arena, journal, lambda what, n: os.write(tell, what + struct.pack("<I", n)))
            status = 0
        finally:
            os._exit(status)
    os.close(tell)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or not status
    with os.fdopen(told, "rb") as pipe:
        data = pipe.read()
    return [
        (data[at : at + 1], *struct.unpack_from("<I", data, at + 1))
        for at in range(0, len(data), 5)
    ]


def test_whatever_store_a_daemon_is_killed_at_the_next_finds_only_whole_blocks(tmp_path):
    arena, _, _ = make(tmp_path)
    counting = DyingJournal(arena, -1, 0.0)
    life(arena, counting, lambda what, n: None)
    arena.close()
    assert counting.stores > 100
    for store in range(counting.stores + 1):
        told = killed_at(tmp_path, store, (0.0, 0.5, 0.97)[store % 3])
        arena, journal, kept = again(tmp_path)
        assert_intact(arena, kept)
        held = {block.key[0] for block in kept.blocks}
        those = {kind: {n for what, n in told if what == kind} for kind in (b"+", b"~", b"-", b"w")}
        assert those[b"+"] - those[b"~"] <= held
        assert not those[b"-"] & held
        assert those[b"w"] <= {old.generation for old in kept.reservations}
        pool = new_pool(arena, journal, kept)
        pool.check_integrity()
        pool.writer_gone(WRITER)
        put(pool, arena, 20)
        assert {block.key[0] for block in again(tmp_path)[2].blocks} == {
            block.key[0] for block in pool.blocks()
        }
        pool.check_integrity()
        arena.close()


def test_an_unfinished_put_is_kept_out_until_its_writer_can_t_write(tmp_path):
    arena, _, pool = make(tmp_path)
    (granted,) = pool.reserve([(key(1), 9 * PAGE)], writer=WRITER, now_s=0.0)
    after, journal, kept = again(tmp_path)
    pool = new_pool(after, journal, kept)
    assert pool.free_pages == SHAPE.pages - 9
    assert pool.writers() == {WRITER}
    assert not after.held_by(WRITER)
    arena.hold(WRITER)
    assert after.held_by(WRITER)
    arena.close()
    assert not after.held_by(WRITER)
    pool.writer_gone(WRITER)
    assert pool.free_pages == SHAPE.pages
    assert again(tmp_path)[2].reservations == ()
    assert again(tmp_path)[2].number >= granted.generation


def test_readers_that_ask_nobody_get_their_key_s_bytes_or_nothing(tmp_path):
    arena, _, pool = make(tmp_path)
    ended, wrong, right = threading.Event(), [], [0]

    def read():
        into = memoryview(bytearray(3000))
        n = 0
        while not ended.is_set():
            n = n % 12 + 1
            into[:] = bytes(3000)
            if copy_local(arena, [key(n)], [into], leaves, no_stop):
                right[0] += 1
                if into != content(n, 3000):
                    wrong.append(n)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for round_ in range(600):
            put(pool, arena, round_ % 12 + 1, size=3000, now_s=float(round_))
    finally:
        ended.set()
        for reader in readers:
            reader.join()
    assert (wrong, right[0] > 0) == ([], True)
    assert pool.counters.evicted > 100


def test_what_does_not_fit_the_directory_is_served_by_the_daemon_alone(tmp_path):
    arena, journal, pool = make(tmp_path, cells=Cells(slots=1, spares=3))
    for n in range(20):
        put(pool, arena, n, size=PAGE)
    assert pool.live_blocks == 20
    assert journal.unlisted == 20 - PROBE
    assert sum(arena.directory.find(key(n)) is not None for n in range(20)) == PROBE
    grants = pool.reserve([(key(n), PAGE) for n in range(30, 35)], writer=WRITER, now_s=0.0)
    assert [granted.grant for granted in grants] == [Grant.RESERVED] * 3 + [Grant.FULL] * 2
    pool.check_integrity()


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_garbage_in_the_directory_breaks_its_readers_or_is_taken_over_wrongly(
    tmp_path_factory, data
):
    arena, _, pool = make(tmp_path_factory.mktemp("arena"))
    for n in range(1, 6):
        put(pool, arena, n)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(arena.table) - 8))
        arena.table[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    into = memoryview(bytearray(700))
    for n in range(1, 6):
        if copy_local(arena, [key(n)], [into], leaves, no_stop):
            assert into == content(n, 700)
    journal = CellJournal(arena, own_writer=OWN)
    kept = journal.recover()
    for block in kept.blocks:
        assert all(first + count <= SHAPE.pages for first, count in block.extents)
    arena.close()


tags = st.lists(st.builds(GroupTag, st.integers(0, 99), st.binary(min_size=16, max_size=16)))
extents = st.lists(st.builds(Extent, st.integers(0, 2**40), st.integers(1, 99)), max_size=9)


@settings(max_examples=50, deadline=None)
@given(tags=tags.map(tuple), extents=extents.map(tuple), name=st.text(max_size=80))
def test_an_entry_says_what_was_written_however_long_it_is(tmp_path_factory, tags, extents, name):
    arena, journal, _ = make(tmp_path_factory.mktemp("arena"))
    account = Account(name, Terms())
    block = Block(key(7), 9, 70, 1, extents, tags, account, Priority.HIGH)
    journal.published(block)
    listed = arena.directory.find(key(7))
    entry = arena.directory.read(listed.at)
    assert listed.block == entry.block == PinnedBlock(9, 70, tags, extents)
    assert (entry.tenant, entry.priority) == (name if len(name.encode()) < 256 else "", 2)
    reservation = Reservation(key(8), 10, 70, extents, WRITER, 1.0, account, Priority.LOW)
    assert journal.reserved(reservation)
    journal.removed(block)
    journal.ended(10)
    assert arena.directory.find(key(7)) is None
    assert not arena.directory.unchanged(entry)
    assert all(not any(arena.table[at + 8 : at + 48]) for at in range(0, 24 * CELL_BYTES, 128))
    assert len(journal._free_spares) == SHAPE.cells.spares
    arena.close()


@settings(max_examples=50, deadline=None)
@given(
    groups=st.lists(st.integers(1, 700_000), min_size=1, max_size=4),
    order=st.permutations(range(8)),
    seed=st.integers(0, 255),
    piece_bytes=st.sampled_from([PIECE_BYTES, SHARED_PIECE_BYTES]),
)
def test_tags_made_while_copying_are_those_of_the_whole_block(
    tmp_path_factory, groups, order, seed, piece_bytes
):
    """However the block is cut into groups, and wherever its pages lie."""
    size, page = sum(groups), 4096
    path = str(tmp_path_factory.mktemp("arena") / "arena")
    arena = create_arena(path, page_bytes=page, pages=8 * 90, epoch=1)
    pages = -(-size // page)
    extents = tuple(
        Extent(90 * place, min(90, pages - 90 * number))
        for number, place in enumerate(order)
        if pages > 90 * number
    )
    source = content(seed, size)
    granted = Granted(Grant.RESERVED, 1, extents)
    ((_, tags),) = copy_in(arena, [key(1)], [granted], [source], groups, leaves, no_stop)
    assert tuple(tag.tag for tag in tags) == block_tags(key(1), groups, source)
    back = memoryview(bytearray(size))
    pinned = [PinnedBlock(1, size, tags, extents)]
    assert copy_out(arena, [key(1)], pinned, [back], leaves, no_stop, piece_bytes).good == 1
    assert back == source
    next(arena.parts(extents[-1:], 1))[0] ^= 1
    assert copy_out(arena, [key(1)], pinned, [back], leaves, no_stop) == (0, 0)
    arena.close()


def test_entries_that_contradict_each_other_are_not_taken_over(tmp_path):
    arena, journal, pool = make(tmp_path)
    put(pool, arena, 1)
    block = pool.block(key(1))
    journal.published(Block(key(2), 99, 700, 2, block.extents, block.tags, block.account))
    with pytest.raises(ValueError, match="overlap"):
        new_pool(*again(tmp_path))
