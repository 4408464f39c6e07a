"""The log against a dictionary: puts, evictions, compaction, restarts, cuts and damage."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ssd_folder
from kimi_runtime.umbp.ssdlog.health import Refusal
from kimi_runtime.umbp.ssdlog.log import SsdLog

SIZES = [1, 40, 64, 200, 900, 1500]


class LogAgainstDict(RuleBasedStateMachine):
    """`live` is what must be held, `buried` what was dead when the log was last flushed."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ssdlog-"))
        self.log = None

    @initialize(
        fill=st.sampled_from([0.5, 0.85, 1.0]),
        segments=st.integers(3, 8),
        verify=st.sampled_from(["unsealed", "all"]),
        durability=st.sampled_from(["none", "strict"]),
    )
    def start(self, fill, segments, verify, durability):
        self.spec = ssd_folder.small_spec(
            self.folder,
            capacity=segments * 4096,
            fill=fill,
            verify_at_start=verify,
            durability=durability,
        )
        self.log = SsdLog.open(self.spec)
        self.live = {}
        self.buried = set()

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6), size=st.sampled_from(SIZES))
    def put(self, numbers, size):
        blocks = [ssd_folder.block(n, self.live.get(n, size)) for n in numbers]
        written = self.log.put(blocks)
        assert (written.kept == len(blocks)) == (written.refusal is None)
        assert written.refusal in (None, Refusal.FULL)
        for n, block in zip(numbers[: written.kept], blocks, strict=False):
            self.live[n] = block.body.nbytes
            self.buried.discard(n)

    @rule(count=st.integers(0, 8))
    def evict(self, count):
        evicted = self.log.evict(count)
        assert len(evicted) == min(count, len(self.live))
        for key in evicted:
            del self.live[int.from_bytes(key, "big")]

    @rule(n=st.integers(0, 30))
    def forget(self, n):
        gone = self.log.forget([ssd_folder.key(n)])
        assert bool(gone) == (self.live.pop(n, None) is not None)

    @rule(n=st.integers(0, 30))
    def damage(self, n):
        if n in self.live:
            ssd_folder.damage(self.log, ssd_folder.key(n))
            size = self.live.pop(n)
            into = memoryview(bytearray(size))
            assert not self.log.get([ssd_folder.key(n)], [into]).tags
            assert not self.log.held([ssd_folder.key(n)])

    @rule()
    def maintain(self):
        self.log.maintain()

    @rule()
    def restart(self):
        order = self.log.keys()
        self.log.close()
        self.log = SsdLog.open(self.spec)
        assert sorted(self.log.keys()) == sorted(order)

    @rule()
    def flush(self):
        if self.log.flush():
            self.buried = set(range(31)) - self.live.keys()

    @rule()
    def crash(self):
        copy = Path(tempfile.mkdtemp(prefix="ssdlog-"))
        shutil.copytree(self.folder, copy, dirs_exist_ok=True)
        self.log.close()
        shutil.rmtree(self.folder)
        copy.rename(self.folder)
        self.log = SsdLog.open(self.spec)
        keys = self.log.keys()
        back = {int.from_bytes(k, "big") for k in keys} - self.live.keys()
        assert not back & self.buried  # only what was forgotten since the last flush may be
        self.log.forget([ssd_folder.key(n) for n in sorted(back)])

    @invariant()
    def holds_exactly_what_it_should(self):
        if self.log is None:
            return
        self.log.check_integrity()
        keys = self.log.keys()
        assert sorted(keys) == [ssd_folder.key(n) for n in sorted(self.live)]
        assert ssd_folder.bytes_on_disk(self.folder) <= self.spec.capacity
        for n, size in self.live.items():
            into = memoryview(bytearray(size))
            assert len(self.log.get([ssd_folder.key(n)], [into]).tags) == 1
            assert into == ssd_folder.body(n, size)

    def teardown(self):
        if self.log is not None:
            self.log.close()
        shutil.rmtree(self.folder)


TestLogAgainstDict = LogAgainstDict.TestCase
TestLogAgainstDict.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
