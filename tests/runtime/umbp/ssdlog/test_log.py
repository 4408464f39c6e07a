"""The log's promises one by one: space, tombstones, faults, readers beside compaction, O_DIRECT."""

import dataclasses
import errno
import os
import random
import shutil
import threading
import time

import pytest

import ssd_folder
from kimi_connect.wire import GroupTag
from kimi_runtime.umbp import tags
from kimi_runtime.umbp.ssdlog.append import NewBlock
from kimi_runtime.umbp.ssdlog.disk import Stopped, aligned_buffer, never
from kimi_runtime.umbp.ssdlog.health import Access, Refusal
from kimi_runtime.umbp.ssdlog.log import SsdLog
from kimi_runtime.umbp.ssdlog.volume import Corrupt
from ssd_folder import FailingDisk, block, body, entry_of, key, small_spec

SEGMENT = 4096


@pytest.fixture
def opened(tmp_path):
    logs = []

    def open_log(disk=None, **changes):
        folder = changes.pop("folder", tmp_path)
        logs.append(SsdLog.open(small_spec(folder, **changes), disk))
        return logs[-1]

    yield open_log
    for log in logs:
        log.check_integrity()
        log.close()


def read(log, *numbers, size=200):
    """The leading blocks that are read, each checked against its key."""
    targets = [memoryview(bytearray(size)) for _ in numbers]
    got = log.get([key(n) for n in numbers], targets)
    for n, target, _ in zip(numbers, targets, got.tags, strict=False):
        assert target == body(n, size)
    return got


def put(log, *numbers, size=200):
    return log.put([block(n, size) for n in numbers])


def test_tags_come_back_as_they_were_put(opened):
    log = opened()
    data = memoryview(body(1, 900))
    groups = (400, 500)
    made = tags.block_tags(key(1), groups, data)
    given = tuple(map(GroupTag, groups, made))
    assert log.put([NewBlock(key(1), data, given)]).kept == 1
    assert read(log, 1, size=900).tags == [given]


def test_bytes_that_do_not_match_the_tags_they_come_with_are_not_written(opened):
    log = opened()
    wrong = NewBlock(key(2), memoryview(body(2, 200)), (GroupTag(200, bytes(16)),))
    written = log.put([block(1), wrong, block(3)])
    assert written.kept == 1
    assert written.refusal is Refusal.CORRUPT
    assert log.held([key(2)]) == 0
    assert len(read(log, 1).tags) == 1


def test_a_key_twice_in_a_batch_is_written_once(opened):
    log = opened()
    written = put(log, 1, 1, 2)
    assert (written.kept, written.put, written.already) == (3, 2, 1)


def test_a_block_larger_than_a_segment_is_refused_with_its_reason(opened):
    log = opened()
    assert put(log, 1, size=SEGMENT).refusal is Refusal.TOO_LARGE
    assert log.stats().refused == {Refusal.TOO_LARGE: 1}


def test_churn_within_a_bounded_disk_compacts_and_loses_nothing(opened, tmp_path):
    log, chosen = opened(capacity=8 * SEGMENT, fill=0.6), random.Random(1)
    live = list(range(36))
    assert put(log, *live).kept == 36
    for n in range(36, 400):
        (gone,) = log.forget([key(live.pop(chosen.randrange(len(live))))])
        assert put(log, n).kept == 1
        live.append(n)
        assert ssd_folder.bytes_on_disk(tmp_path) <= 8 * SEGMENT
        assert log.held([gone]) == 0
    stats = log.stats()
    assert stats.compactions > 20
    assert stats.moved_bytes < 2 * stats.written_bytes / 3  # at 60 % full: at most 1.5 copies
    assert sorted(log.keys()) == sorted(map(key, live))
    assert all(len(read(log, n).tags) == 1 for n in live)


def test_what_was_evicted_stays_away_after_compactions_and_starts(opened):
    log = opened(capacity=6 * SEGMENT, fill=0.5)
    dead = set()
    for start in range(0, 200, 4):
        put(log, *range(start, start + 4))
        dead |= set(log.evict(3))
        if start % 20 == 0:
            log.close()
            log = opened(capacity=6 * SEGMENT, fill=0.5)
        assert not dead & set(log.keys())
    assert log.stats().segments <= 6


def test_a_compaction_takes_graves_along_before_it_counts(opened, tmp_path):
    folder, crashed = tmp_path / "log", tmp_path / "crashed"
    log = opened(folder=folder)
    put(log, *range(10))
    log.forget([key(0)])
    log.flush()
    put(log, 10, 11, 12)
    grave = log._volume.ledger._graves[key(0)][1]
    assert grave.number != entry_of(log, key(1)).segment
    log.forget([key(11)])
    log.flush()
    log._space.tail.roll()
    assert log._space.compact(grave, never)
    shutil.copytree(folder, crashed)
    again = opened(folder=crashed)
    assert sorted(again.keys()) == [key(n) for n in (*range(1, 11), 12)]


def test_graves_that_no_dead_copy_needs_any_more_are_let_go(opened):
    log = opened(capacity=6 * SEGMENT)
    for start in range(0, 600, 12):
        put(log, *range(start, start + 12))
        log.evict(12)
        log.maintain()
    ledger = log._volume.ledger
    assert len(ledger._graves) + len(ledger.pending) < 60


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
def test_a_full_disk_makes_the_log_read_only_until_there_is_space(opened, tmp_path, number):
    disk = FailingDisk(tmp_path)
    log = opened(disk)
    put(log, 1, 2)
    disk.failing = {"write": number, "create": number}
    written = put(log, 3)
    assert (written.kept, written.refusal) == (0, Refusal.NO_SPACE)
    assert log.access is Access.READ_ONLY
    assert os.strerror(number) in log.stats().reason
    assert put(log, 1, 2, 4).kept == 0  # nothing is tried while the disk is full
    assert len(read(log, 1, 2).tags) == 2
    disk.failing = {}
    log.maintain()
    assert log.access is Access.FULL
    assert put(log, 3, 4).kept == 2
    assert len(read(log, 1, 2, 3, 4).tags) == 4
    stats = log.stats()
    assert (stats.refused[Refusal.NO_SPACE], stats.write_failures) == (4, 1)


@pytest.mark.parametrize("failing", [{"write"}, {"write", "truncate"}, {"sync"}])
def test_a_disk_that_can_not_write_is_read_only_for_good(opened, tmp_path, failing):
    disk = FailingDisk(tmp_path)
    log = opened(disk, durability="strict")
    put(log, 1, 2)
    disk.failing = dict.fromkeys(failing, errno.EIO)
    assert put(log, 3).refusal is Refusal.IO_ERROR
    disk.failing = {}
    log.maintain()
    assert log.access is Access.READ_ONLY
    assert put(log, 3).refusal is Refusal.IO_ERROR
    assert len(read(log, 1, 2).tags) == 2
    assert not log.flush()
    log.check_integrity()
    log.close()
    again = opened()
    assert again.held([key(1), key(2)]) == 2


def test_a_block_that_can_not_be_read_is_dropped_and_the_rest_stays(opened, tmp_path):
    disk = FailingDisk(tmp_path)
    log = opened(disk)
    put(log, 1, 2, 3)
    disk.failing = {"read": errno.EIO}
    got = read(log, 1)
    assert (got.tags, got.failure.errno) == ([], errno.EIO)
    disk.failing = {}
    assert log.held([key(1)]) == 0
    assert log.take_lost() == [key(1)]
    assert len(read(log, 2, 3).tags) == 2
    assert log.access is Access.FULL
    assert log.stats().unreadable == 1


def test_a_disk_that_is_gone_holds_nothing(opened, tmp_path):
    disk = FailingDisk(tmp_path)
    log = opened(disk)
    put(log, 1, 2, 3, 4)
    disk.failing = {"read": errno.EIO}
    for n in (1, 2, 3):
        read(log, n)
    assert log.access is Access.NONE
    assert (log.held([key(4)]), log.keys(), read(log, 4).tags) == (0, [], [])
    assert put(log, 9).refusal is Refusal.IO_ERROR


def test_a_corrupt_block_is_reported_and_dropped(opened):
    log = opened()
    put(log, 1, 2, 3)
    ssd_folder.damage(log, key(2))
    got = read(log, 1, 2, 3)
    assert len(got.tags) == 1
    assert isinstance(got.failure, Corrupt)
    assert log.held([key(1), key(2)]) == 1
    assert len(read(log, 3).tags) == 1
    assert put(log, 2).kept == 1
    assert len(read(log, 1, 2, 3).tags) == 3


def test_compaction_drops_what_it_finds_corrupt(opened):
    log, chosen = opened(capacity=4 * SEGMENT, fill=0.9), random.Random(2)
    live = list(range(20))
    put(log, *live)
    ssd_folder.damage(log, key(live.pop(0)))
    dropped = set()
    for n in range(20, 60):
        log.forget([key(live.pop(chosen.randrange(len(live))))])
        put(log, n)
        live.append(n)
        dropped |= set(log.take_lost())
    assert log.stats().compactions
    assert dropped == {key(0)}
    assert log.stats().corrupt == 1
    assert sorted(log.keys()) == sorted(map(key, live))


def test_a_compaction_that_fails_changes_nothing(opened, tmp_path):
    disk = FailingDisk(tmp_path)
    log = opened(disk, capacity=4 * SEGMENT, fill=1.0)
    numbers = list(range(24))
    kept = put(log, *numbers).kept
    log.forget([key(n) for n in range(1, kept, 3)])
    log.flush()
    before = log.keys()
    disk.failing = {"write": errno.ENOSPC}
    assert put(log, 50).refusal is Refusal.NO_SPACE
    log.check_integrity()
    assert log.keys() == before
    assert all(len(read(log, int.from_bytes(k, "big")).tags) == 1 for k in before)
    disk.failing = {}
    log.maintain()
    assert put(log, 50, 51).kept == 2
    log.check_integrity()


def test_a_stopped_write_leaves_no_trace(opened, tmp_path):
    log = opened(io_threads=1)
    put(log, 1)
    size = ssd_folder.bytes_on_disk(tmp_path)
    asked = iter([False, True])
    written = log.put([block(2), block(3)], lambda: next(asked, True))
    assert (written.kept, written.refusal) == (0, Refusal.CANCELLED)
    assert ssd_folder.bytes_on_disk(tmp_path) == size
    got = log.get([key(1)], [memoryview(bytearray(200))], lambda: True)
    assert isinstance(got.failure, Stopped)
    assert len(read(log, 1).tags) == 1


def test_a_reader_keeps_its_segment_while_compaction_lets_it_go(opened, tmp_path):
    disk = FailingDisk(tmp_path)
    log = opened(disk, capacity=4 * SEGMENT, fill=0.9)
    put(log, *range(10))
    first = tmp_path / f"{entry_of(log, key(0)).segment:08}.seg"
    reading, go_on = threading.Event(), threading.Event()

    def hold():
        if threading.current_thread() is reader:
            reading.set()
            assert go_on.wait(30)

    results = []
    reader = threading.Thread(target=lambda: results.append(read(log, 0)))
    disk.reading = hold
    reader.start()
    assert reading.wait(30)
    log.forget([key(n) for n in range(10)])
    refusals = {put(log, n).refusal for n in range(20, 60) if log.evict(1) or True}
    assert first.exists()
    assert refusals <= {None, Refusal.BUSY, Refusal.FULL}
    go_on.set()
    reader.join(30)
    assert len(results[0].tags) == 1
    log.maintain()
    assert not first.exists()
    assert put(log, 99).kept == 1
    assert ssd_folder.bytes_on_disk(tmp_path) <= 4 * SEGMENT


def test_readers_beside_writers_and_compaction_never_see_a_wrong_byte(opened, tmp_path):
    log = opened(capacity=8 * SEGMENT, fill=0.6, io_threads=3)
    ends_s, wrong, seen = time.monotonic() + 60, [], [0]

    def enough():
        worked = seen[0] > 200 and log.stats().compactions > 10
        return wrong or worked or time.monotonic() > ends_s

    def readers():
        n = 0
        while not enough():
            n = (n + 13) % 60
            numbers = range(n, n + 4)
            targets = [memoryview(bytearray(200)) for _ in numbers]
            got = log.get([key(m) for m in numbers], targets)
            seen[0] += len(got.tags)
            pairs = zip(numbers, targets, got.tags, strict=False)
            wrong.extend(m for m, target, _ in pairs if target != body(m, 200))
            wrong.extend([got.failure] if got.failure else [])

    threads = [threading.Thread(target=readers) for _ in range(2)]
    for thread in threads:
        thread.start()
    n, chosen = 0, random.Random(5)
    while not enough():
        n = (n + 7) % 60
        put(log, n, n + 1)
        if log.stats().blocks > 34:
            log.forget([key(chosen.randrange(60)) for _ in range(4)])
        if ssd_folder.bytes_on_disk(tmp_path) > 8 * SEGMENT:
            wrong.append("too much disk")
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert log.stats().compactions > 10


def test_all_of_it_works_past_the_page_cache(opened, tmp_path):
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as exc:
        pytest.skip(f"no O_DIRECT in {tmp_path}: {exc.strerror}")
    (tmp_path / "probe").unlink()
    shape = {"align": 4096, "segment": 64 * 4096, "capacity": 4 * 64 * 4096, "fill": 0.5}
    log = opened(direct=True, **shape)
    aligned = aligned_buffer(8192)
    aligned[:] = body(1, 8192)
    blocks = [NewBlock(key(1), aligned), *(block(n, 5000 + n) for n in range(2, 20))]
    assert log.put(blocks).kept == 19
    for n in range(2, 12):
        log.forget([key(n)])
        assert put(log, n + 100, size=9000).kept == 1
    into = aligned_buffer(8192)
    assert len(log.get([key(1)], [into]).tags) == 1
    assert into == body(1, 8192)
    log.close()
    for direct in (True, False):
        log = opened(direct=direct, verify_at_start="all", **shape)
        assert not log.stats().found.torn_records
        assert len(read(log, 1, size=8192).tags) == 1
        assert all(len(read(log, n, size=5000 + n).tags) == 1 for n in range(12, 20))
        assert all(len(read(log, n, size=9000).tags) == 1 for n in range(102, 112))
        log.close()


def test_a_clean_close_seals_so_that_the_next_start_reads_no_bodies(opened):
    log = opened()
    put(log, *range(30))
    log.close()
    again = opened()
    found = again.stats().found
    assert found.sealed == found.segments > 1


def test_nothing_works_after_close(opened):
    log = opened()
    put(log, 1)
    log.close()
    log.close()
    assert put(log, 2).refusal is Refusal.CLOSED
    assert (log.held([key(1)]), read(log, 1).tags, log.flush()) == (0, [], False)


def test_stats_add_up(opened):
    log = opened(capacity=3 * SEGMENT)
    put(log, *range(40))
    put(log, *range(5))
    log.evict(3)
    stats = log.stats()
    assert stats.offered == stats.put + stats.already + sum(stats.refused.values()) == 45
    assert stats.put == stats.blocks + stats.evicted
    assert stats.disk_bytes <= stats.capacity_bytes
    assert dataclasses.asdict(stats)["access"] == "full"
