"""The disk that a segment takes ahead of its records, and gives back."""

import shutil

import pytest

from kimi_connect.wire import GroupTag
from kimi_runtime.umbp.ssdlog.append import NewBlock
from kimi_runtime.umbp.ssdlog.health import Refusal
from kimi_runtime.umbp.ssdlog.log import SsdLog
from ssd_folder import block, body, key, small_spec

SEGMENT = 4096


@pytest.fixture
def opened():
    logs = []

    def open_log(folder):
        logs.append(SsdLog.open(small_spec(folder)))
        return logs[-1]

    yield open_log
    for log in logs:
        log.check_integrity()
        log.close()


def test_a_segment_takes_its_space_when_it_begins_and_gives_the_rest_back(opened, tmp_path):
    log = opened(tmp_path)
    log.put([block(1), block(2)])
    (path,) = tmp_path.glob("*.seg")
    assert (path.stat().st_size, path.stat().st_blocks * 512) == (SEGMENT, SEGMENT)
    log.close()
    assert path.stat().st_size < SEGMENT


def test_a_write_that_failed_leaves_the_space_reserved_and_nothing_of_itself(opened, tmp_path):
    log = opened(tmp_path)
    log.put([block(1)])
    (path,) = tmp_path.glob("*.seg")
    before = path.read_bytes()
    wrong = NewBlock(key(3), memoryview(body(3, 200)), (GroupTag(200, bytes(16)),))
    assert log.put([wrong]).refusal is Refusal.CORRUPT
    assert log.put([block(2, 300)]).kept == 1
    assert log.forget([key(2)])
    asked = iter([False, True])
    assert log.put([block(4), block(5)], lambda: next(asked, True)).refusal is Refusal.CANCELLED
    assert path.read_bytes()[: len(before.rstrip(b"\0"))] == before.rstrip(b"\0")
    assert path.stat().st_size == SEGMENT


def test_what_was_reserved_and_not_written_is_no_damage_after_a_crash(opened, tmp_path):
    folder, crashed = tmp_path / "log", tmp_path / "crashed"
    log = opened(folder)
    log.put([block(n) for n in range(5)])
    shutil.copytree(folder, crashed)
    again = opened(crashed)
    found = again.found
    assert (found.sealed, found.torn_records, found.damaged_bytes) == (0, 0, 0)
    targets = [memoryview(bytearray(200)) for _ in range(5)]
    assert len(again.get([key(n) for n in range(5)], targets).tags) == 5
    assert targets == [body(n, 200) for n in range(5)]
