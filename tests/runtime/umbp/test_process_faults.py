"""Real processes, killed or out of something: no wrong byte, no hang, and they recover."""

import asyncio
import contextlib
import json
import random
import resource
import subprocess
import time
from pathlib import Path

import aiohttp
import pytest

from kimi_connect.wire import Outcome
from kimi_operator.local.machine import free_ports
from kimi_runtime.umbp.client import open_pool
from pool_daemon import (
    CALL_KEY,
    DaemonProcess,
    blocks_of,
    keys_of,
    metrics,
    pool_spec,
    start_python,
    targets,
)
from pool_peers import SOON_S, owner_of, peer, peer_spec

DEADLINE_S = 0.5
BUSY_S = 8.0
"""What a call may take beyond its deadline where others use the machine; a hang is longer."""

ENGINE = """
import asyncio, json, random, sys, time
from pathlib import Path
from kimi_runtime.umbp.client import open_pool
from pool_daemon import CALL_KEY, blocks_of, keys_of, targets

async def main(socket, seed, deadline_s):
    dice, client = random.Random(seed), await open_pool(Path(socket), CALL_KEY)
    told = dict(calls=0, hits=0, slowest_s=0.0)
    print("begins", flush=True)
    asked_to_stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    while not asked_to_stop.done():
        keys = keys_of(dice.randrange(1, 9), 10 * dice.randrange(12))
        start_s = time.monotonic()
        if dice.random() < 0.5:
            await client.store(keys, blocks_of(keys), deadline_s=deadline_s)
        else:
            into = targets(len(keys))
            got = await client.load(keys, into, deadline_s=deadline_s)
            assert into[:got.blocks] == blocks_of(keys[:got.blocks])
            told["hits"] += got.blocks
        told["slowest_s"] = max(told["slowest_s"], time.monotonic() - start_s)
        told["calls"] += 1
        await asyncio.sleep(0.01)
    await client.aclose()
    print(json.dumps(told), flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
"""


@contextlib.asynccontextmanager
async def daemon_process(spec):
    """A daemon in a process of its own."""
    process = await asyncio.to_thread(DaemonProcess, spec)
    try:
        yield process
    finally:
        process.kill()


def limit_files(process, more):
    """Let it open so many files more."""
    limit = len(list(Path(f"/proc/{process.pid}/fd").iterdir())) + more
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, 4096))


async def comes_true(state):
    """Ask until the answer is yes; it is within SOON_S."""
    async with asyncio.timeout(SOON_S):
        while not await state():
            await asyncio.sleep(0.02)


async def stores(client, keys):
    return await client.store(keys, blocks_of(keys), deadline_s=DEADLINE_S) == len(keys)


async def loads(client, keys):
    into = targets(len(keys))
    got = await client.load(keys, into, deadline_s=DEADLINE_S)
    assert into[: got.blocks] == blocks_of(keys[: got.blocks])
    return got.blocks == len(keys)


async def metric(port, *name):
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        return (await metrics(http))[name]


async def test_whoever_is_killed_at_whatever_moment_no_byte_is_wrong_and_all_goes_on(tmp_path):
    dice = random.Random(11)
    ports = dict(zip("ab", free_ports("127.0.0.1", 2), strict=True))
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    ssd = {"folder": tmp_path / "ssd", "capacity": "16MiB", "segment": "1MiB"}
    specs = {
        "a": peer_spec(tmp_path, "a", [("b", urls["b"])], port=ports["a"], ssd=ssd),
        "b": peer_spec(tmp_path, "b", [("a", urls["a"])], port=ports["b"]),
    }
    running = {}

    async def start(name):
        if name in specs:
            running[name] = await asyncio.to_thread(DaemonProcess, specs[name])
            return
        args = (str(specs[name[-1]].socket), str(dice.randrange(99)), str(DEADLINE_S))
        running[name] = await asyncio.to_thread(start_python, ENGINE, *args)
        assert await asyncio.to_thread(running[name].stdout.readline) == b"begins\n"

    try:
        for name in ("a", "b", "engine at a", "engine at b"):
            await start(name)
        for victim in ("a", "engine at a", "b", "a", "engine at b", "b"):
            await asyncio.sleep(dice.uniform(0.02, 0.3))  # the moment
            await asyncio.to_thread(end, running[victim])
            await start(victim)
        for name in ("engine at a", "engine at b"):
            output, _ = await asyncio.to_thread(running[name].communicate, b"\n", SOON_S)
            told = json.loads(output)
            assert told["calls"] > 0
            assert told["slowest_s"] < DEADLINE_S + BUSY_S
        clients = [await open_pool(spec.socket, CALL_KEY) for spec in specs.values()]
        for n, client in enumerate(clients):
            keys = keys_of(5, 1000 * (n + 1))
            await comes_true(lambda client=client, keys=keys: stores(client, keys))
            for one in clients:  # at the other node, too
                await comes_true(lambda one=one, keys=keys: loads(one, keys))
        for client in clients:
            await client.aclose()
        for port in ports.values():
            for gone in (("pins",), ("reservations", "open"), ("reservations", "quarantined")):
                name = (f"kimistack_umbp_{gone[0]}", *gone[1:])
                await comes_true(lambda port=port, name=name: none_left(port, *name))
    finally:
        for process in running.values():
            end(process)


def end(process):
    """Kill it, and wait for that."""
    process.kill()
    if isinstance(process, subprocess.Popen) and not process.stdout.closed:
        process.communicate()


async def none_left(port, *name):
    return await metric(port, *name) == 0


async def test_a_full_disk_costs_what_the_ssd_would_have_kept_and_is_used_again_when_it_has_room(
    tmp_path,
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk of 3 MiB is a file system of its own, which only root mounts")
    try:
        (disk / "somebody else's").write_bytes(bytes(2 << 20))
        ssd = {"folder": disk / "log", "capacity": "16MiB", "segment": "512KiB"}
        spec = pool_spec(tmp_path, ssd=ssd, ssd_after_uses=1)
        async with daemon_process(spec) as process:
            client = await open_pool(spec.socket, CALL_KEY)
            for n in range(4):  # 160 blocks; less than 100 would fit on the disk
                keys = keys_of(40, 40 * n)
                assert await stores(client, keys)
                assert await loads(client, keys)
                client.used(keys)
            full = ("kimistack_umbp_ssd_dropped_blocks_total", "no_space")
            await comes_true(lambda: some(process.port, *full))
            (disk / "somebody else's").unlink()
            kept = await metric(process.port, "kimistack_umbp_ssd_kept_blocks_total")

            async def written_again():
                more = keys_of(8, random.randrange(10**6, 10**9))
                assert await stores(client, more)
                client.used(more)
                now = await metric(process.port, "kimistack_umbp_ssd_kept_blocks_total")
                return now > kept

            await comes_true(written_again)
            await client.aclose()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


async def some(port, *name):
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        return (await metrics(http)).get(name, 0) > 0


HOLDER = """
import asyncio, sys
from pathlib import Path
from kimi_runtime.umbp.client import open_pool
from pool_daemon import CALL_KEY, keys_of

async def main(socket, count):
    client = await open_pool(Path(socket), CALL_KEY)
    lent = await client.lend(keys_of(count), deadline_s=20.0)
    print(len(lent.parts), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def test_a_memory_full_of_what_is_being_read_takes_nothing_until_the_reader_is_gone(tmp_path):
    spec = pool_spec(tmp_path, dram_bytes="256KiB")
    async with daemon_process(spec):
        client = await open_pool(spec.socket, CALL_KEY)
        keys = keys_of(100)
        held = await client.store(keys, blocks_of(keys), deadline_s=5.0)
        assert 0 < held < 100
        held = await client.held(keys)
        reader = await asyncio.to_thread(start_python, HOLDER, str(spec.socket), str(held))
        try:
            assert int(await asyncio.to_thread(reader.stdout.readline)) == held
            start_s = time.monotonic()
            assert not await stores(client, keys_of(1, 500))  # no room is made of what is pinned
            assert time.monotonic() - start_s < DEADLINE_S + BUSY_S
            assert await loads(client, keys[:held])
        finally:
            reader.kill()
            await asyncio.to_thread(reader.communicate)
        await comes_true(lambda: stores(client, keys_of(1, 500)))
        await client.aclose()


async def test_a_daemon_without_file_descriptors_serves_who_is_there_and_later_who_waits(tmp_path):
    ssd = {"folder": tmp_path / "ssd", "capacity": "16MiB", "segment": "256KiB"}
    spec = pool_spec(tmp_path, ssd=ssd, ssd_after_uses=1)
    async with daemon_process(spec) as process:
        client = await open_pool(spec.socket, CALL_KEY)
        keys = keys_of(20)
        assert await stores(client, keys)
        limit_files(process, 4)
        crowd = [await open_pool(spec.socket, CALL_KEY, connect_s=0.3) for _ in range(8)]
        assert not all(one.available for one in crowd)
        for n in range(4):  # new segments can't be opened either
            more = keys_of(30, 100 * (n + 1))
            assert await stores(client, more)
            assert await loads(client, more)
        for one in crowd:
            await one.aclose()
        limit_files(process, 200)
        late = await open_pool(spec.socket, CALL_KEY)
        await comes_true(lambda: stores(late, keys_of(3, 900)))
        await comes_true(lambda: loads(late, keys_of(3, 900)))
        await late.aclose()
        await client.aclose()


async def test_a_peer_that_accepts_and_never_answers_costs_nothing_but_its_blocks(tmp_path):
    silent = set()

    async def accept(reader, writer):
        silent.add(writer)
        await reader.read()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with peer(tmp_path, "b", [("a", url)], peers_within=0.2) as (daemon, client):
            await comes_true(lambda: ready(daemon))
            assert daemon.state.unknown_peers == 1
            keys = keys_of(3)
            assert await client.load(keys, targets(3), deadline_s=5.0) == (0, Outcome.MISS)
            assert await stores(client, keys)
            assert await loads(client, keys)
            calls = owner_of(daemon, "a").calls
            calls._port = int(url.rpartition(":")[2])  # as if its feed had said so before
            daemon.clients.remote.owners.index._follow("a")
            report = await daemon.clients.remote.evacuate(deadline_s=0.5)
            assert report.kept == 0
            start_s = time.monotonic()
        assert silent
        assert time.monotonic() - start_s < BUSY_S  # it stops, too
    finally:
        server.close()
        for writer in silent:
            writer.close()


async def ready(daemon):
    return daemon.state.phase == "ready"
