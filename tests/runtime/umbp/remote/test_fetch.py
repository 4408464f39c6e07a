"""A daemon that lacks a block and one that has it, over real sockets."""

import asyncio
import random
from collections import Counter

import aiohttp
import pytest

from kimi_connect.wire import Outcome
from kimi_runtime import clock
from kimi_runtime.spec.router import PoolEndpoint
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.transfer.chaos import Fault
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.feed import FollowState
from kimi_runtime.umbp.remote import fetch
from kimi_runtime.umbp.remote.fetch import Fate
from kimi_runtime.umbp.state import Phase
from pool_daemon import CALL_KEY, DaemonProcess, blocks_of, keys_of, metrics, targets
from pool_peers import SOON_S, Faults, knows, owner_of, peer, peer_spec, until


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


async def stored(daemon, client, keys, known_by, *, already=0):
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == len(keys)
    await knows(known_by, daemon.spec.name, len(keys) + already)


def fates(daemon, name="a"):
    return +owner_of(daemon, name).blocks


async def test_an_engine_gets_a_block_that_only_another_node_has(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys = keys_of(5)
        await stored(a, at_a, keys, b)
        assert await at_b.held(keys_of(6)) == 5
        into = targets(6)
        assert await at_b.load(keys_of(6), into, deadline_s=SOON_S) == (5, Outcome.MISS)
        assert into[:5] == blocks_of(keys)
        assert fates(b) == {Fate.FETCHED: 5}
        assert b.clients.pool.held(keys) == 5
        lender = a.clients.remote.lender
        await until(lambda: lender.ends["given_back"] == 1)
        assert (lender.loans, a.clients.pool.open_pins) == (0, 0)


async def test_however_many_engines_want_a_block_it_is_fetched_once(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys = keys_of(8)
        await stored(a, at_a, keys, b)
        into = [targets(8) for _ in range(10)]
        async with asyncio.TaskGroup() as tasks:
            loads = [tasks.create_task(at_b.load(keys, one, deadline_s=SOON_S)) for one in into]
        assert {task.result() for task in loads} == {(8, Outcome.HIT)}
        assert all(one == blocks_of(keys) for one in into)
        assert fates(b) == {Fate.FETCHED: 8}
        assert a.clients.remote.lender.lent_blocks == 8


async def test_a_run_longer_than_a_piece_comes_in_several(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys, into = keys_of(40), targets(40)
        await stored(a, at_a, keys, b)
        assert await at_b.load(keys, into, deadline_s=SOON_S) == (40, Outcome.HIT)
        assert into == blocks_of(keys)
        assert fates(b) == {Fate.FETCHED: 40}
        assert a.clients.remote.lender.ends.total() > 1


async def test_pages_of_other_sizes_on_both_sides_and_scattered_ones_do(tmp_path):
    async with (
        peer(tmp_path, "a", page_bytes=512) as (a, at_a),
        peer(tmp_path, "b", [("a", a.url)], page_bytes=2048) as (b, at_b),
    ):
        for daemon, client in ((a, at_a), (b, at_b)):  # holes of a few pages
            size = daemon.spec.page_bytes
            others = keys_of(daemon.clients.pool.total_pages, 10_000)
            await client.store(others, blocks_of(others, size), deadline_s=SOON_S)
            pool = daemon.clients.pool
            for block in pool.blocks():
                if block.extents[0].first % 4:
                    pool.drop(block.key, block.generation)
        keys, into = keys_of(4), targets(4)
        assert await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S) == 4
        await until(lambda: b.clients.remote.fetcher.run(keys) == 4)
        assert await at_b.load(keys, into, deadline_s=SOON_S) == (4, Outcome.HIT)
        assert into == blocks_of(keys)
        assert len(b.clients.pool.block(keys[0]).extents) > 1


async def test_a_run_may_lie_in_memory_at_a_peer_and_in_memory_again(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys, into = keys_of(9), targets(9)
        await stored(a, at_a, keys[3:6], b)
        await at_b.store(keys[:3], blocks_of(keys[:3]), deadline_s=SOON_S)
        await at_b.store(keys[6:], blocks_of(keys[6:]), deadline_s=SOON_S)
        assert await at_b.held(keys) == 9
        assert await at_b.load(keys, into, deadline_s=SOON_S) == (9, Outcome.HIT)
        assert into == blocks_of(keys)
        assert fates(b) == {Fate.FETCHED: 3}


async def test_what_the_owner_has_on_ssd_alone_comes_too(tmp_path):
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="8MiB", segment="1MiB")
    async with (
        peer(tmp_path, "a", ssd=ssd) as (a, at_a),
        peer(tmp_path, "b", [("a", a.url)]) as (b, at_b),
    ):
        keys, into = keys_of(3), targets(3)
        await stored(a, at_a, keys, b)
        at_a.used(keys)
        await until(lambda: a.clients.second.tier.held(keys) == 3)
        await until(lambda: not a.clients.second.writer.queued)
        a.tier.evict(3)
        assert await at_b.load(keys, into, deadline_s=SOON_S) == (3, Outcome.HIT)
        assert into == blocks_of(keys)


async def test_what_is_fetched_once_is_first_to_go_and_not_written_to_ssd(tmp_path):
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="8MiB", segment="1MiB")
    async with (
        peer(tmp_path, "a") as (a, at_a),
        peer(tmp_path, "b", [("a", a.url)], ssd=ssd) as (b, at_b),
    ):
        own, keys = keys_of(2, 50), keys_of(2)
        await at_b.store(own, blocks_of(own), deadline_s=SOON_S)
        await at_b.load(own, targets(2), deadline_s=SOON_S)
        await stored(a, at_a, keys, b)
        await at_b.load(keys, targets(2), deadline_s=SOON_S)
        await until(lambda: not b.clients.second.writer.queued)
        assert b.clients.second.tier.held(keys) == 0
        assert set(b.tier.evict(2)) == set(keys)
        await at_b.load(keys, targets(2), deadline_s=SOON_S)
        await at_b.load(keys, targets(2), deadline_s=SOON_S)  # now it is wanted again
        await until(lambda: b.clients.second.tier.held(keys) == 2)


async def test_a_bit_that_flips_on_the_way_is_found_and_the_owner_keeps_its_block(tmp_path, faults):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        (key,) = keys_of(1)
        await stored(a, at_a, [key], b)
        faults.fault = Fault.CORRUPT
        assert await at_b.load([key], targets(1), deadline_s=SOON_S) == (0, Outcome.CORRUPT)
        assert fates(b) == {Fate.CORRUPT: 1}
        assert b.clients.pool.held([key]) == 0
        await until(lambda: a.clients.remote.lender.ends["given_back"] == 1)
        assert a.clients.pool.held([key]) == 1
        faults.fault = None
        into = targets(1)
        assert await at_b.load([key], into, deadline_s=SOON_S) == (1, Outcome.HIT)
        assert into == blocks_of([key])


async def test_one_bad_block_costs_only_itself_and_what_follows(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys, into = keys_of(5), targets(5)
        await stored(a, at_a, keys, b)
        bad = a.clients.pool.block(keys[2])
        next(a.clients.arena.parts(bad.extents, bad.size))[77] ^= 1
        assert await at_b.load(keys, into, deadline_s=SOON_S) == (2, Outcome.CORRUPT)
        assert into[:2] == blocks_of(keys[:2])
        assert fates(b) == {Fate.FETCHED: 4, Fate.CORRUPT: 1}
        # its owner has looked, and does not offer it again
        await until(lambda: a.clients.remote.lender.damaged == 1)
        assert a.clients.pool.block(keys[2]) is None
        await knows(b, "a", 4)


async def test_what_is_evicted_and_overwritten_while_it_is_read_is_never_taken(tmp_path, faults):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys = keys_of(3)
        await stored(a, at_a, keys, b)

        def steal():
            a.clients.remote.lender.close()
            parts = [a.clients.arena.parts(a.clients.pool.block(k).extents, 10_000) for k in keys]
            a.tier.evict(3)
            for part in (view for views in parts for view in views):
                part[:] = bytes(reversed(part))

        faults.before = steal
        assert await at_b.load(keys, targets(3), deadline_s=SOON_S) == (0, Outcome.CORRUPT)
        assert b.clients.pool.live_blocks == 0


async def test_a_block_its_owner_has_no_more_is_a_miss(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys = keys_of(3)
        await stored(a, at_a, keys[:2], b)
        b.clients.remote.owners.index._followers["a"].keys.hold([keys[2]])
        assert await at_b.load(keys, targets(3), deadline_s=SOON_S) == (2, Outcome.MISS)
        assert fates(b) == {Fate.FETCHED: 2, Fate.ABSENT: 1}
        assert owner_of(b, "a").health.quarantines == 0


@pytest.mark.parametrize("where", ["before the answer", "before the copy"])
async def test_an_owner_killed_in_the_middle_is_a_miss_within_the_deadline(tmp_path, faults, where):
    process = DaemonProcess(peer_spec(tmp_path, "a"))
    killed = False
    try:
        async with peer(tmp_path, "b", [("a", f"http://127.0.0.1:{process.port}")]) as (b, at_b):
            keys = keys_of(4)
            at_a = await open_pool(tmp_path / "a" / "umbp.sock", CALL_KEY)
            await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
            await at_a.aclose()
            await knows(b, "a", 4)
            if where == "before the copy":
                faults.before = process.kill
                killed = True
                load = at_b.load(keys, targets(4), deadline_s=SOON_S)
                assert await load == (0, Outcome.MISS)
            else:
                process.freeze()
                async with asyncio.TaskGroup() as tasks:
                    load = tasks.create_task(at_b.load(keys, targets(4), deadline_s=SOON_S))
                    await until(lambda: owner_of(b, "a").fetching)
                    await asyncio.to_thread(process.kill)
                    killed = True
                assert load.result() == (0, Outcome.MISS)
            assert fates(b) == {Fate.UNREACHABLE: 4}
            await until(lambda: b.clients.remote.owners.run(keys) == 0)
    finally:
        if not killed:
            process.kill()


async def test_an_owner_that_never_answers_costs_its_reader_s_time_and_is_left_alone(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fetch, "MAX_FETCH_S", 0.3)
    process = DaemonProcess(peer_spec(tmp_path, "a"))
    try:
        async with peer(tmp_path, "b", [("a", f"http://127.0.0.1:{process.port}")]) as (b, at_b):
            keys = keys_of(2)
            at_a = await open_pool(tmp_path / "a" / "umbp.sock", CALL_KEY)
            await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
            await at_a.aclose()
            await knows(b, "a", 2)
            process.freeze()
            for key in keys:
                start_s = clock.now_s()
                assert await at_b.load([key], targets(1), deadline_s=0.2) == (0, Outcome.LATE)
                assert clock.now_s() - start_s < 0.2 + 2.0  # of a machine that is busy otherwise
                await until(lambda: not b.clients.remote.fetcher.under_way)
            assert fates(b) == {Fate.LATE: 2}
            assert await at_b.load(keys, targets(2), deadline_s=SOON_S) == (0, Outcome.MISS)
            assert fates(b) == {Fate.LATE: 2}
            process.thaw()

            async def back():
                into = targets(2)
                result = await at_b.load(keys, into, deadline_s=SOON_S)
                return result == (2, Outcome.HIT) and into == blocks_of(keys)

            async with asyncio.timeout(SOON_S):  # its quarantine ends by itself
                while not await back():
                    await asyncio.sleep(0.02)
            assert owner_of(b, "a").health.quarantines >= 1
    finally:
        process.kill()


async def test_a_restarted_owner_is_asked_only_for_what_its_new_epoch_told(tmp_path):
    spec = peer_spec(tmp_path, "a")
    process = DaemonProcess(spec)
    url = f"http://127.0.0.1:{process.port}"
    try:
        async with peer(tmp_path, "b", [("a", url)]) as (b, at_b):
            keys = keys_of(4)
            at_a = await open_pool(spec.socket, CALL_KEY)
            await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
            await knows(b, "a", 4)
            assert await at_b.load(keys[:1], targets(1), deadline_s=SOON_S) == (1, Outcome.HIT)
            first = b.clients.remote.owners.index.resume_point("a")[0]
            process.kill()
            spec.arena.unlink()  # what it held is gone with it
            process = DaemonProcess(spec.model_copy(update={"port": process.port}))
            index = b.clients.remote.owners.index
            await until(lambda: index.resume_point("a")[0] != first)
            await knows(b, "a", 0)
            assert await at_b.load(keys[1:], targets(3), deadline_s=SOON_S) == (0, Outcome.MISS)
            await at_a.store(keys[1:], blocks_of(keys[1:]), deadline_s=SOON_S)
            await at_a.aclose()
            await knows(b, "a", 3)
            into = targets(3)
            assert await at_b.load(keys[1:], into, deadline_s=SOON_S) == (3, Outcome.HIT)
            assert into == blocks_of(keys[1:])
    finally:
        process.kill()


async def test_an_owner_of_another_epoch_than_its_feed_said_gives_nothing_and_is_doubted(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys = keys_of(2)
        await stored(a, at_a, keys, b)
        owners = b.clients.remote.owners
        owners.index._followers["a"].epoch -= 1
        assert await at_b.load(keys, targets(2), deadline_s=SOON_S) == (0, Outcome.MISS)
        assert fates(b) == {Fate.MOVED: 2}
        assert owners.state(owner_of(b, "a")) is FollowState.DEGRADED
        await knows(b, "a", 2)  # from its feed, begun anew
        assert await at_b.load(keys, targets(2), deadline_s=SOON_S) == (2, Outcome.HIT)


async def test_two_daemons_that_each_take_the_other_for_an_owner_ask_once_each(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        a.clients.remote.owners.update([PoolEndpoint(name="b", url=b.url)])
        (key,) = keys_of(1)
        await knows(a, "b", 0)
        await knows(b, "a", 0)
        for daemon, other in ((a, "b"), (b, "a")):
            daemon.clients.remote.owners.index._followers[other].keys.hold([key])
        for client in (at_a, at_b):
            assert await client.load([key], targets(1), deadline_s=SOON_S) == (0, Outcome.MISS)
        assert (fates(a, "b"), fates(b)) == ({Fate.ABSENT: 1}, {Fate.ABSENT: 1})
        assert not a.clients.remote.fetcher.under_way
        assert not b.clients.remote.fetcher.under_way


async def test_a_memory_full_of_pins_takes_nothing_and_says_so(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys, own = keys_of(1), keys_of(b.clients.pool.total_pages, 500)
        await stored(a, at_a, keys, b)
        kept = await at_b.store(own, blocks_of(own, 4096), deadline_s=SOON_S)
        pinned = b.clients.pool.pin(own[:kept], reader=99, now_s=clock.now_s())
        assert await at_b.load(keys, targets(1), deadline_s=SOON_S) == (0, Outcome.MISS)
        assert fates(b) == {Fate.NO_ROOM: 1}
        assert owner_of(b, "a").health.quarantines == 0
        b.clients.pool.unpin(pinned.number, (), reader=99, now_s=clock.now_s())
        assert await at_b.load(keys, targets(1), deadline_s=SOON_S) == (1, Outcome.HIT)


async def test_a_stall_is_late_and_frees_what_was_reserved(tmp_path, faults, monkeypatch):
    monkeypatch.setattr(fetch, "MAX_FETCH_S", 0.2)
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys = keys_of(3)
        await stored(a, at_a, keys, b)
        free = b.clients.pool.free_pages
        faults.fault = Fault.STALL
        assert await at_b.load(keys, targets(3), deadline_s=SOON_S) == (0, Outcome.LATE)
        assert fates(b) == {Fate.LATE: 3}
        assert b.clients.pool.free_pages == free
        await until(lambda: not a.clients.remote.lender.loans)


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_between_them_a_block_is_its_key_s_bytes_or_a_miss(
    tmp_path, faults, monkeypatch, seed
):
    """Engines of two nodes at work on chains of both, while memory and links are disturbed."""
    monkeypatch.setattr(fetch, "MAX_FETCH_S", 0.3)
    rng = random.Random(seed)
    small = {"dram_bytes": "400KiB"}
    async with (
        peer(tmp_path, "a", **small) as (a, at_a),
        peer(tmp_path, "b", [("a", a.url)], **small) as (b, at_b),
    ):
        a.clients.remote.owners.update([PoolEndpoint(name="b", url=b.url)])
        chains, outcomes = [keys_of(10, 100 * n) for n in range(6)], Counter()
        kinds = [*Fault, *[None] * 14]
        faults.fault = lambda dice: rng.choice(kinds)

        def fetched():
            return fates(a, "b")[Fate.FETCHED] and fates(b)[Fate.FETCHED]

        async def work(client, rng):
            done = 0
            while done < 150 or not fetched():
                done += 1
                keys = rng.choice(chains)[: rng.randrange(1, 11)]
                if rng.random() < 0.3:
                    await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
                    continue
                into = targets(len(keys))
                count, outcome = await client.load(keys, into, deadline_s=1.0)
                assert into[:count] == blocks_of(keys[:count])
                outcomes[outcome] += 1

        async def disturb():
            while True:
                await asyncio.sleep(0.005)
                daemon = rng.choice([a, b])
                if rng.random() < 0.5:
                    daemon.tier.evict(rng.randrange(12))
                elif rng.random() < 0.1 and (blocks := daemon.clients.pool.blocks()):
                    bad = rng.choice(blocks)
                    next(daemon.clients.arena.parts(bad.extents, bad.size))[9] ^= 4

        async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as tasks:
            disturbing = tasks.create_task(disturb())
            async with asyncio.TaskGroup() as workers:
                for n, client in enumerate([at_a, at_b, at_a, at_b]):
                    workers.create_task(work(client, random.Random(10 * seed + n)))
            disturbing.cancel()
        assert outcomes[Outcome.HIT] > 0
        for daemon in (a, b):
            await until(lambda d=daemon: not d.clients.remote.fetcher.under_way)
        for daemon in (a, b):
            await until(lambda d=daemon: not d.clients.remote.lender.loans)
            await until(lambda d=daemon: not d.clients.pool.open_pins)


async def test_metrics_and_readiness_tell_of_the_peers(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a), peer(tmp_path, "b", [("a", a.url)]) as (b, at_b):
        keys = keys_of(2)
        await stored(a, at_a, keys, b)
        await at_b.load(keys, targets(2), deadline_s=SOON_S)
        await until(lambda: a.clients.remote.lender.ends["given_back"] == 1)
        await until(lambda: b.state.phase is Phase.READY)
        async with aiohttp.ClientSession(b.url) as http:
            async with http.get("/readyz") as response:
                assert (await response.json())["peers"] == {"a": "exact"}
            seen = await metrics(http)
        assert seen["kimistack_umbp_peer_blocks_total", "fetched", "a"] == 2
        assert seen["kimistack_umbp_peer_blocks_total", "corrupt", "a"] == 0
        assert seen["kimistack_umbp_peer_bytes_total", "a"] == 20_000
        assert seen["kimistack_umbp_peer_seconds_total", "a"] > 0
        assert seen["kimistack_umbp_peer_quarantined", "a"] == 0
        assert seen["kimistack_umbp_peer_feed_exact", "a"] == 1
        async with aiohttp.ClientSession(a.url) as http:
            seen = await metrics(http)
        assert seen[("kimistack_umbp_peer_lent_blocks_total",)] == 2
        assert seen["kimistack_umbp_peer_ended_loans_total", "given_back"] == 1
