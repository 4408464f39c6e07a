"""A pool daemon with an SSD behind its memory, seen by its clients."""

import asyncio
import contextlib
import errno
import random
import threading
from collections import Counter

import aiohttp
import pytest

import ssd_folder
from kimi_connect.client import ArenaClient
from kimi_connect.wire import Outcome
from kimi_runtime import clock
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp import daemon as daemons
from kimi_runtime.umbp import helper
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.funnel import Lost, Where
from kimi_runtime.umbp.promotion import Landing
from kimi_runtime.umbp.tiers.ssd import open_ssd_tier
from pool_daemon import (
    CALL_KEY,
    DaemonProcess,
    blocks_of,
    keys_of,
    metrics,
    pool_spec,
    targets,
)
from ssd_folder import FailingDisk

SOON_S = 60.0


class HeldDisk(FailingDisk):
    """A disk whose reads (or writes) wait until they are let go."""

    def __init__(self, folder, held="read"):
        super().__init__(folder)
        self.held = held
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def check(self, call):
        if call == self.held and not self.go_on.is_set():
            self.waiting.set()
            assert self.go_on.wait(SOON_S)
        super().check(call)


def spec_of(folder, **changes):
    """A pool of 1 MiB with an SSD that takes a few MiB; a block takes 10,000 bytes."""
    ssd = {"folder": folder / "ssd", "capacity": "8MiB", "segment": "1MiB"}
    ssd |= changes.pop("ssd", {})
    return pool_spec(folder, ssd=SsdSpec(**ssd), **changes)


@contextlib.asynccontextmanager
async def serving(folder, disk=None, monkeypatch=None, **changes):
    """A daemon and a client of it; every account is balanced at the end."""
    if disk is not None:
        monkeypatch.setattr(
            daemons, "open_ssd_tier", lambda spec, feed: open_ssd_tier(spec, feed=feed, disk=disk)
        )
    async with running(spec_of(folder, **changes)) as daemon:
        client = await open_pool(daemon.spec.socket, CALL_KEY)
        try:
            yield daemon, client
        finally:
            await client.aclose()
            balanced(daemon)


def balanced(daemon):
    second, pool = daemon.clients.second, daemon.clients.pool
    pool.check_integrity()
    second.tier.log.check_integrity()
    writer = second.writer
    assert writer.offered == writer.kept + writer.dropped.total() + writer.queued
    held = {block.key for block in pool.blocks()} | set(second.tier.keys())
    assert set(daemon.clients.feed._held) == held


async def until(state):
    async with asyncio.timeout(SOON_S):
        while not state():
            await asyncio.sleep(0.001)


async def written(daemon, keys):
    """Wait until all of `keys` are on SSD."""
    await until(lambda: daemon.clients.second.tier.held(keys) == len(keys))
    await until(lambda: not daemon.clients.second.writer.queued)


async def on_ssd_alone(daemon, client, keys):
    """Put blocks, use them once more, and push them out of memory."""
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == len(keys)
    client.used(keys)
    await written(daemon, keys)
    daemon.tier.evict(len(keys))
    assert daemon.clients.pool.held(keys) == 0


async def test_a_prompt_that_came_once_is_not_written_and_one_that_came_again_is(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        once, again, found = keys_of(3), keys_of(3, 10), keys_of(3, 20)
        for keys in (once, again, found):
            await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
        await client.load(again, targets(3), deadline_s=SOON_S)
        client.used(found)
        await written(daemon, again)
        await written(daemon, found)
        tier = daemon.clients.second.tier
        assert tier.held(once) == 0
        assert set(tier.keys()) == {*again, *found}


async def test_what_is_on_ssd_alone_is_held_loaded_and_back_in_memory(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        keys = keys_of(5)
        await on_ssd_alone(daemon, client, keys)
        assert await client.held(keys_of(6)) == 5
        into = targets(5)
        assert await client.load(keys, into, deadline_s=SOON_S) == (5, Outcome.HIT)
        assert into == blocks_of(keys)
        assert daemon.clients.pool.held(keys) == 5
        await client.held(keys)
        assert daemon.clients.pool.funnel.hits == {Where.SSD: 5}
        assert daemon.clients.second.promoter.landings == {Landing.LANDED: 5}


async def test_a_run_may_lie_in_both_tiers_and_ends_where_neither_has_it(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        keys = keys_of(6)
        await on_ssd_alone(daemon, client, keys)
        pool = daemon.clients.pool
        some = [keys[0], keys[3]]
        await client.store(some, blocks_of(some), deadline_s=SOON_S)
        daemon.clients.second.tier.forget([keys[0], keys[3]])
        asked = [*keys, *keys_of(2, 90)]
        assert await client.held(asked) == 6
        into = targets(8)
        assert await client.load(asked, into, deadline_s=SOON_S) == (6, Outcome.MISS)
        assert into[:6] == blocks_of(keys)
        assert pool.held(keys) == 6


async def test_the_blocking_client_gets_it_too(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        keys = keys_of(3)
        await on_ssd_alone(daemon, client, keys)
        other, into = ArenaClient(daemon.spec.socket, CALL_KEY), targets(3)
        loaded = await asyncio.to_thread(other.load, keys, into, deadline_s=SOON_S)
        assert (loaded, into) == ((3, Outcome.HIT), blocks_of(keys))
        await asyncio.to_thread(other.used, keys)
        await asyncio.to_thread(other.close)


async def test_a_prompt_longer_than_the_memory_comes_in_pieces(tmp_path):
    async with serving(tmp_path, dram_bytes="256KiB") as (daemon, client):
        keys = keys_of(60)
        for start in range(0, 60, 10):
            part = keys[start : start + 10]
            await client.store(part, blocks_of(part), deadline_s=SOON_S)
            client.used(part)
            await written(daemon, part)
        assert daemon.clients.pool.live_blocks < 30
        into = targets(60)
        assert await client.load(keys, into, deadline_s=SOON_S) == (60, Outcome.HIT)
        assert into == blocks_of(keys)


async def test_blocks_that_are_scattered_over_the_arena_go_both_ways(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        pool = daemon.clients.pool
        filler = keys_of(pool.total_pages, 1000)  # a page each; every other one is given back
        await client.store(filler, blocks_of(filler, 4096), deadline_s=SOON_S)
        for key in filler[::2]:
            pool.drop(key, pool.block(key).generation)
        keys = keys_of(3)
        await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
        assert all(len(pool.block(key).extents) == 3 for key in keys)
        client.used(keys)
        await written(daemon, keys)
        for key in keys:
            pool.drop(key, pool.block(key).generation)
        into = targets(3)
        assert await client.load(keys, into, deadline_s=SOON_S) == (3, Outcome.HIT)
        assert into == blocks_of(keys)
        assert all(len(pool.block(key).extents) == 3 for key in keys)


async def test_a_restarted_daemon_is_warm_from_ssd(tmp_path):
    keys = keys_of(8)
    async with serving(tmp_path) as (daemon, client):
        await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
        client.used(keys[:6])
        await written(daemon, keys[:6])
        first = daemon.clients.feed.epoch
    async with serving(tmp_path) as (daemon, client):
        assert daemon.clients.feed.epoch > first
        assert [key in daemon.clients.feed for key in keys] == [True] * 6 + [False] * 2
        into = targets(8)
        assert await client.load(keys, into, deadline_s=SOON_S) == (6, Outcome.MISS)
        assert into[:6] == blocks_of(keys[:6])


async def test_a_killed_daemon_is_warm_from_ssd_and_its_client_goes_on(tmp_path):
    spec, keys = spec_of(tmp_path), keys_of(20)
    process = DaemonProcess(spec)
    client = await open_pool(spec.socket, CALL_KEY)
    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
    client.used(keys)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{process.port}") as http:
        async with asyncio.timeout(SOON_S):
            while (await metrics(http))[("kimistack_umbp_ssd_blocks",)] < 20:
                await asyncio.sleep(0.01)
    await asyncio.to_thread(process.kill)
    async with running(spec) as daemon:
        into, loaded = targets(20), (0, Outcome.UNAVAILABLE)
        async with asyncio.timeout(SOON_S):
            while loaded[1] is Outcome.UNAVAILABLE:  # until the client has connected again
                loaded = await client.load(keys, into, deadline_s=SOON_S)
                await asyncio.sleep(0.01)
        assert (loaded, into) == ((20, Outcome.HIT), blocks_of(keys))
        await client.aclose()
        balanced(daemon)


async def test_many_who_want_a_block_share_one_read(tmp_path, monkeypatch):
    disk = HeldDisk(tmp_path / "ssd")
    async with serving(tmp_path, disk, monkeypatch) as (daemon, client):
        keys = keys_of(4)
        await on_ssd_alone(daemon, client, keys)
        disk.go_on.clear()
        before = daemon.clients.second.tier.stats().hits
        async with asyncio.TaskGroup() as tasks:
            loads = [
                tasks.create_task(client.load(keys[:n], targets(n), deadline_s=SOON_S))
                for n in (4, 4, 3, 1)
            ]
            await until(lambda: daemon.clients.second._waiting == 4)
            disk.go_on.set()
        assert [load.result() for load in loads] == [(n, Outcome.HIT) for n in (4, 4, 3, 1)]
        assert daemon.clients.second.tier.stats().hits - before == 4


async def test_a_disk_that_does_not_answer_costs_a_late_miss_and_what_is_in_memory_is_served(
    tmp_path, monkeypatch
):
    disk = HeldDisk(tmp_path / "ssd")
    monkeypatch.setattr(helper, "MAX_WAIT_S", 0.05)
    async with serving(tmp_path, disk, monkeypatch) as (daemon, client):
        keys = keys_of(3)
        await on_ssd_alone(daemon, client, keys)
        await client.store(keys[:1], blocks_of(keys[:1]), deadline_s=SOON_S)
        disk.go_on.clear()
        into = targets(3)
        assert await client.load(keys, into, deadline_s=SOON_S) == (1, Outcome.LATE)
        assert into == [*blocks_of(keys[:1]), *targets(2)]
        assert await client.load(keys[:1], into[:1], deadline_s=SOON_S) == (1, Outcome.HIT)
        assert daemon.clients.pool.reservations(quarantined=False) == 2  # still being read into
        assert daemon.clients.pool.funnel.lost == {Lost.LATE: 2}
        disk.go_on.set()
        await until(lambda: daemon.clients.pool.held(keys) == 3)
        assert await client.load(keys, into, deadline_s=SOON_S) == (3, Outcome.HIT)


async def test_a_client_that_hangs_up_while_it_waits_leaves_nothing(tmp_path, monkeypatch):
    disk = HeldDisk(tmp_path / "ssd")
    async with serving(tmp_path, disk, monkeypatch) as (daemon, client):
        keys = keys_of(3)
        await on_ssd_alone(daemon, client, keys)
        disk.go_on.clear()
        other = await open_pool(daemon.spec.socket, CALL_KEY)
        loading = asyncio.gather(other.load(keys, targets(3), deadline_s=SOON_S))
        await asyncio.to_thread(disk.waiting.wait, SOON_S)
        await other.aclose()
        assert await loading == [(0, Outcome.UNAVAILABLE)]
        await until(lambda: len(daemon.clients) == 1)
        disk.go_on.set()
        await until(lambda: daemon.clients.pool.held(keys) == 3)
        await until(lambda: daemon.clients.pool.open_pins == 0)


async def test_damage_on_ssd_is_corrupt_counted_and_never_served(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        keys = keys_of(4)
        await on_ssd_alone(daemon, client, keys)
        ssd_folder.damage(daemon.clients.second.tier.log, keys[2])
        into = targets(4)
        assert await client.load(keys, into, deadline_s=SOON_S) == (2, Outcome.CORRUPT)
        assert into[:2] == blocks_of(keys[:2])
        assert daemon.clients.pool.funnel.lost == {Lost.CORRUPT: 2}
        assert daemon.clients.second.promoter.landings[Landing.CORRUPT] == 2
        assert await client.held(keys) == 2
        assert keys[2] not in daemon.clients.feed


async def test_a_disk_that_fails_is_a_miss_and_the_daemon_stays_ready(tmp_path, monkeypatch):
    disk = HeldDisk(tmp_path / "ssd")
    async with serving(tmp_path, disk, monkeypatch) as (daemon, client):
        keys = keys_of(4)
        await on_ssd_alone(daemon, client, keys)
        disk.failing = {"read": errno.EIO}
        for key in keys[:3]:
            loaded = await client.load([key], targets(1), deadline_s=SOON_S)
            assert loaded == (0, Outcome.MISS)
        assert await client.held(keys[3:]) == 0
        assert len(daemon.clients.feed) == 0
        new = keys_of(2, 50)
        await client.store(new, blocks_of(new), deadline_s=SOON_S)
        assert await client.load(new, targets(2), deadline_s=SOON_S) == (2, Outcome.HIT)
        await until(lambda: daemon.clients.second.writer.dropped["io_error"] == 2)
        async with aiohttp.ClientSession(daemon.url) as http:
            async with http.get("/readyz") as response:
                assert (await response.json())["ssd"]["access"] == "none"
            assert (await metrics(http))["kimistack_umbp_ssd_access", "none"] == 1


async def test_memory_full_of_pins_is_a_miss_and_no_wait(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        keys, pool = keys_of(2), daemon.clients.pool
        await on_ssd_alone(daemon, client, keys)
        filler = keys_of(pool.total_pages, 1000)
        for start in range(0, len(filler), 128):
            part = filler[start : start + 128]
            await client.store(part, blocks_of(part, 4096), deadline_s=SOON_S)
        pool.pin(filler, reader=999, now_s=1e12)
        assert await client.load(keys, targets(2), deadline_s=SOON_S) == (0, Outcome.MISS)
        assert daemon.clients.second.promoter.landings[Landing.NO_ROOM] == 2
        pool.reader_gone(999)
        assert await client.load(keys, targets(2), deadline_s=SOON_S) == (2, Outcome.HIT)


async def test_a_full_ssd_lets_its_coldest_go_and_warms_what_memory_serves(tmp_path):
    small = {"capacity": "4MiB", "segment": "1MiB"}
    async with serving(tmp_path, ssd=small) as (daemon, client):
        tier, hot = daemon.clients.second.tier, keys_of(5)
        await client.store(hot, blocks_of(hot), deadline_s=SOON_S)
        for start in range(100, 600, 20):
            part = keys_of(20, start)
            await client.store(part, blocks_of(part), deadline_s=SOON_S)
            await client.load(part, targets(20), deadline_s=SOON_S)
            client.used(hot)
            await client.held(hot)  # answered after what the daemon was told
            await until(lambda: not daemon.clients.second.writer.queued)
        assert tier.stats().evicted > 0
        assert tier.held(hot) == 5
        assert tier.held(keys_of(20, 580)) > 0


async def test_a_damaged_block_in_memory_is_not_written_and_is_dropped(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        keys, pool = keys_of(3), daemon.clients.pool
        await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
        block = pool.block(keys[1])
        next(daemon.tier.arena.parts(block.extents, block.size))[7] ^= 1
        client.used(keys)
        await until(lambda: daemon.clients.second.writer.dropped["corrupt"] == 1)
        await written(daemon, [keys[0], keys[2]])
        assert pool.block(keys[1]) is None
        assert keys[1] not in daemon.clients.feed


async def test_what_was_evicted_before_its_turn_is_dropped_and_counted(tmp_path, monkeypatch):
    disk = HeldDisk(tmp_path / "ssd", held="write")
    async with serving(tmp_path, disk, monkeypatch) as (daemon, client):
        keys, writer = keys_of(41), daemon.clients.second.writer
        await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
        disk.go_on.clear()
        client.used(keys)
        await asyncio.to_thread(disk.waiting.wait, SOON_S)
        assert daemon.clients.pool.evictable_pages == 9 * 3  # a batch of 32 is pinned
        daemon.tier.evict(41)
        disk.go_on.set()
        await until(lambda: not writer.queued)
        assert (writer.dropped["evicted"], writer.kept) == (9, 32)
        assert daemon.clients.second.tier.held(keys) == 32


async def test_a_write_rate_slows_writes_and_loses_nothing(tmp_path):
    async with serving(tmp_path, ssd_write_rate="2MB/s") as (daemon, client):
        keys, start_s = keys_of(64), clock.now_s()
        await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
        client.used(keys)
        await written(daemon, keys)
        assert clock.now_s() - start_s >= 0.16  # 320 kB before the second batch


async def test_clearing_memory_leaves_what_the_ssd_holds(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        kept, gone = keys_of(2), keys_of(2, 10)
        await client.store([*kept, *gone], blocks_of([*kept, *gone]), deadline_s=SOON_S)
        client.used(kept)
        await written(daemon, kept)
        daemon.clients.pool.clear()
        assert await client.held(kept) == 2
        assert [key in daemon.clients.feed for key in (*kept, *gone)] == [True, True, False, False]


async def test_requests_beyond_what_may_wait_are_answered_from_memory_at_once(
    tmp_path, monkeypatch
):
    disk = HeldDisk(tmp_path / "ssd")
    monkeypatch.setattr(helper, "MAX_WAITING", 1)
    async with serving(tmp_path, disk, monkeypatch) as (daemon, client):
        keys = keys_of(2)
        await on_ssd_alone(daemon, client, keys)
        disk.go_on.clear()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(client.load(keys, targets(2), deadline_s=SOON_S))
            await asyncio.to_thread(disk.waiting.wait, SOON_S)
            assert await client.load(keys, targets(2), deadline_s=SOON_S) == (0, Outcome.MISS)
            disk.go_on.set()
        assert (first.result(), daemon.clients.second.busy) == ((2, Outcome.HIT), 1)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_a_block_is_its_key_s_bytes_or_a_miss(tmp_path, seed):
    """Clients at work on a memory of 25 blocks and an SSD of some 250, while both are disturbed."""
    rng = random.Random(seed)
    ssd = {"capacity": "3MiB", "segment": "1MiB"}
    async with serving(tmp_path, dram_bytes="300KiB", ssd=ssd) as (daemon, _):
        second, pool = daemon.clients.second, daemon.clients.pool
        chains = [keys_of(12, 100 * n) for n in range(10)]
        outcomes = Counter()

        async def work(rng):
            own = await open_pool(daemon.spec.socket, CALL_KEY)
            done = 0
            while done < 300 or not second.promoter.landings[Landing.LANDED]:
                done += 1
                keys = rng.choice(chains)[: rng.randrange(1, 13)]
                if rng.random() < 0.4:
                    await own.store(keys, blocks_of(keys), deadline_s=SOON_S)
                elif rng.random() < 0.3:
                    own.used(keys)
                else:
                    into = targets(len(keys))
                    count, outcome = await own.load(keys, into, deadline_s=SOON_S)
                    assert into[:count] == blocks_of(keys[:count])
                    outcomes[outcome] += 1
            await own.aclose()

        async def disturb():
            while True:
                await asyncio.sleep(0.005)
                kind = rng.random()
                held = second.tier.keys()
                if kind < 0.1 and held:
                    with contextlib.suppress(KeyError, FileNotFoundError):  # compacted just now
                        ssd_folder.damage(second.tier.log, rng.choice(held))
                elif kind < 0.5:
                    second.tier.evict(rng.randrange(5))
                elif kind < 0.9:
                    daemon.tier.evict(rng.randrange(25))
                elif kind > 0.98:
                    pool.clear()

        async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
            disturbing = tasks.create_task(disturb())
            async with asyncio.TaskGroup() as workers:
                for n in range(4):
                    workers.create_task(work(random.Random(100 * seed + n)))
            disturbing.cancel()
        await until(lambda: not second.writer.queued and not second.promoter.under_way)
        await until(lambda: pool.open_pins == 0)
        assert pool.reservations(quarantined=False) == pool.reservations(quarantined=True) == 0
        assert outcomes[Outcome.HIT] > 0


async def test_readiness_and_metrics_tell_of_the_ssd(tmp_path):
    async with serving(tmp_path) as (daemon, client):
        keys = keys_of(4)
        await on_ssd_alone(daemon, client, keys)
        await client.load(keys, targets(4), deadline_s=SOON_S)
        async with aiohttp.ClientSession(daemon.url) as http:
            async with http.get("/readyz") as response:
                told = await response.json()
            seen = await metrics(http)
        assert told["phases"] == {"arena": "bound", "log": "recovered", "peers": "none"}
        assert (told["ssd"]["access"], told["ssd"]["blocks"]) == ("full", 4)
        assert seen[("kimistack_umbp_ssd_blocks",)] == 4
        assert seen["kimistack_umbp_ssd_access", "full"] == 1
        assert seen["kimistack_umbp_ssd_promoted_blocks_total", "landed"] == 4
        assert seen[("kimistack_umbp_ssd_put_blocks_total",)] == 4
        assert seen[("kimistack_umbp_ssd_kept_blocks_total",)] == 4
        assert seen["kimistack_umbp_ssd_dropped_blocks_total", "queue_full"] == 0


async def test_readiness_names_the_phase_of_a_start(tmp_path, monkeypatch):
    spec, opening, go_on = spec_of(tmp_path), asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def slow(spec, feed):
        opening.set()
        await go_on.wait()
        async with open_ssd_tier(spec, feed=feed) as tier:
            yield tier

    monkeypatch.setattr(daemons, "open_ssd_tier", slow)
    ports = []
    listen = daemons.listen

    async def listened(*given):
        ports.append(await listen(*given))
        return ports[0]

    monkeypatch.setattr(daemons, "listen", listened)
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(daemons.serve(spec))
        await opening.wait()
        url = f"http://127.0.0.1:{ports[0]}/readyz"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            assert response.status == 503
            assert "being recovered" in (await response.json())["error"]["message"]
        go_on.set()
        await until(spec.socket.exists)
        serving.cancel()


async def test_an_ssd_folder_in_use_is_an_error_that_says_so(tmp_path):
    async with serving(tmp_path) as (daemon, _):
        other = spec_of(
            tmp_path, socket=tmp_path / "other.sock", arena=tmp_path / "other", name="other"
        )
        with pytest.raises(ConfigError, match="in use"):
            await daemons.serve(other)
        assert not other.socket.exists()
        assert daemon.clients.second.tier.keys() == []
