"""The SSD tier beside an event loop: back-pressure, the feed, upkeep, restarts."""

import asyncio
import errno
import threading

import pytest

import ssd_folder
from kimi_runtime.errors import ConfigError
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.ssdlog.health import Access, Refusal
from kimi_runtime.umbp.tiers.ssd import open_ssd_tier
from ssd_folder import FailingDisk, block, body, key, small_spec


def keys(*numbers):
    return [key(n) for n in numbers]


def data(*numbers, size=200):
    return memoryview(b"".join(body(n, size) for n in numbers))


class HeldDisk(FailingDisk):
    """A disk whose writes wait until they are let go."""

    def __init__(self, folder):
        super().__init__(folder)
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def check(self, call):
        if call == "write" and not self.go_on.is_set():
            self.waiting.set()
            assert self.go_on.wait(30)
        super().check(call)


async def test_a_restart_is_warm(tmp_path):
    async with open_ssd_tier(small_spec(tmp_path)) as tier:
        assert await tier.store(keys(1, 2, 3), data(1, 2, 3)) == 3
        assert tier.evict(1) == keys(3)
    async with open_ssd_tier(small_spec(tmp_path)) as tier:
        assert tier.keys() == keys(2, 1)
        assert tier.sizes(keys(1, 2, 3)) == [200, 200]
        into = memoryview(bytearray(600))
        assert await tier.load(keys(1, 2, 3), into) == 2
        assert into[:400] == data(1, 2)


async def test_writes_beyond_the_limit_are_dropped_at_once_and_reads_go_on(tmp_path):
    disk = HeldDisk(tmp_path)
    spec = small_spec(tmp_path, max_pending=1000)
    async with (
        open_ssd_tier(spec, disk=disk) as tier,
        asyncio.timeout(30),
        asyncio.TaskGroup() as g,
    ):
        await tier.store(keys(1, 2), data(1, 2))
        disk.go_on.clear()
        writing = g.create_task(tier.store(keys(3, 4), data(3, 4)))
        await asyncio.to_thread(disk.waiting.wait, 30)
        written = await tier.put([block(1), *(block(n) for n in range(5, 9))])
        assert (written.kept, written.refusal) == (1, Refusal.BUSY)
        assert await tier.load(keys(1, 2), memoryview(bytearray(400))) == 2
        assert tier.held(keys(3)) == 0
        assert tier.pending_bytes == 400
        disk.go_on.set()
        assert await writing == 2
        assert tier.stats().refused == {Refusal.BUSY: 4}
        tier.log.check_integrity()


async def test_the_feed_says_what_is_held(tmp_path):
    feed = FeedLog("ssd", epoch=1, tier="ssd")
    async with open_ssd_tier(small_spec(tmp_path), feed=feed) as tier:
        await tier.store(keys(1, 2, 3), data(1, 2, 3))
        ssd_folder.damage(tier.log, key(2))
        await tier.load(keys(1, 2, 3), memoryview(bytearray(600)))
        tier.forget(keys(3))
        assert [key(n) in feed for n in (1, 2, 3)] == [True, False, False]
    again = FeedLog("ssd", epoch=2, tier="ssd")
    async with open_ssd_tier(small_spec(tmp_path), feed=again):
        assert [key(n) in again for n in (1, 2, 3)] == [True, False, False]


async def test_a_disk_that_is_gone_is_told_and_serves_nothing(tmp_path):
    feed, disk = FeedLog("ssd", epoch=1, tier="ssd"), FailingDisk(tmp_path)
    async with open_ssd_tier(small_spec(tmp_path), feed=feed, disk=disk) as tier:
        await tier.store(keys(1, 2, 3, 4), data(1, 2, 3, 4))
        disk.failing = {"read": errno.EIO}
        for n in (1, 2, 3):
            assert await tier.load(keys(n), memoryview(bytearray(200))) == 0
        assert tier.stats().access is Access.NONE
        assert (tier.held(keys(4)), len(feed)) == (0, 0)
        assert await tier.store(keys(9), data(9)) == 0


async def test_evictions_reach_the_disk_by_themselves(tmp_path):
    async with open_ssd_tier(small_spec(tmp_path)) as tier:
        await tier.store(keys(1, 2), data(1, 2))
        tier.evict(1)
        async with asyncio.timeout(30):
            while tier.stats().pending_graves:
                await asyncio.sleep(0.001)
        assert await tier.flush()


async def test_a_cancelled_opening_leaves_the_folder_free(tmp_path):
    opening = asyncio.ensure_future(open_ssd_tier(small_spec(tmp_path)).__aenter__())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with open_ssd_tier(small_spec(tmp_path)) as tier:
        with pytest.raises(ConfigError, match="in use"):
            await open_ssd_tier(small_spec(tmp_path)).__aenter__()
        assert tier.keys() == []
