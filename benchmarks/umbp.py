"""What the pool costs on this host: put and get against memcpy, and microseconds a call.

    PYTHONPATH=runtime python benchmarks/umbp.py [--blocks 64] [--block-bytes 1MiB] [--folder DIR]

The daemon runs in a process of its own, as it does in production; the arena should be on tmpfs.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from kimi_connect.client import ArenaClient
from kimi_connect.wire import Outcome
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp import tags
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.units import format_bytes, parse_bytes

ROUNDS = 5
CALLS = 2000

SERVE = """
import asyncio, sys
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.daemon import serve
asyncio.run(serve(UmbpSpec.model_validate_json(sys.argv[1])))
"""


@contextlib.asynccontextmanager
async def daemon(spec: UmbpSpec) -> AsyncIterator[None]:
    """A daemon process that listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVE,
        spec.model_dump_json(),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        async with asyncio.timeout(60):
            while not spec.socket.exists():  # noqa: ASYNC110  (another process makes it)
                await asyncio.sleep(0.01)
        yield
    finally:
        process.terminate()
        await process.wait()


async def best_s(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds of the best round."""
    times = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        await work()
        times.append(time.perf_counter() - start_s)
    return min(times)


async def measure(folder: Path, count: int, size: int) -> list[tuple[str, str, str]]:
    """The table's rows."""
    call_key = secrets.token_hex(32).encode()
    (folder / "key").write_bytes(call_key)
    (folder / "key").chmod(0o600)
    spec = UmbpSpec(
        name="bench",
        port=0,
        socket=folder / "umbp.sock",
        arena=folder / "arena",
        dram_bytes=2 * count * size,
        page_bytes=4096,
        call_key=folder / "key",
    )
    keys = [secrets.token_bytes(16) for _ in range(count)]
    blocks = [memoryview(os.urandom(size)) for _ in range(count)]
    into = [memoryview(bytearray(size)) for _ in range(count)]
    total = count * size

    async def copy() -> None:
        for target, source in zip(into, blocks, strict=True):
            target[:] = source

    async def copy_and_tag() -> None:
        for key, target, source in zip(keys, into, blocks, strict=True):
            target[:] = source
            tags.tag(key, 0, target)

    memcpy_s = await best_s(copy)

    def row(name: str, seconds: float) -> tuple[str, str, str]:
        return name, f"{total / seconds / 1e9:.2f} GB/s", f"{memcpy_s / seconds:.0%} of memcpy"

    rows = [row("memcpy, one core", memcpy_s)]
    rows.append(row("memcpy and tag, one core", await best_s(copy_and_tag)))
    async with daemon(spec):
        client = await open_pool(spec.socket, call_key)
        blocking = ArenaClient(spec.socket, call_key, leaves=tags.leaves)

        async def put() -> None:
            fresh = [secrets.token_bytes(16) for _ in range(count)]
            assert await client.store(fresh, blocks, deadline_s=60) == count

        async def get() -> None:
            assert await client.load(keys, into, deadline_s=60) == (count, Outcome.HIT)

        async def get_blocking() -> None:
            assert blocking.load(keys, into, deadline_s=60) == (count, Outcome.HIT)

        rows.append(row("put (reserve, write, tag, commit)", await best_s(put)))
        await client.store(keys, blocks, deadline_s=60)
        rows.append(row("get (pin, copy, verify, unpin)", await best_s(get)))
        rows.append(row("get, blocking client", await best_s(get_blocking)))
        assert into == blocks

        async def calls() -> None:
            for _ in range(CALLS):
                await client.held(keys[:1])

        async def calls_blocking() -> None:
            for _ in range(CALLS):
                blocking.held(keys[:1])

        small = [memoryview(bytearray(4096))]
        await client.store([b"small block key!"], small, deadline_s=60)

        async def small_gets() -> None:
            for _ in range(CALLS):
                await client.load([b"small block key!"], small, deadline_s=60)

        for name, work in (
            ("held, one key", calls),
            ("held, one key, blocking client", calls_blocking),
            ("get of one 4 KiB block", small_gets),
        ):
            rows.append((name, f"{await best_s(work) / CALLS * 1e6:.0f} µs a call", ""))
        blocking.close()
        await client.aclose()
    return rows


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-bytes", type=parse_bytes, default=parse_bytes("1MiB"))
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = asyncio.run(measure(Path(folder), options.blocks, options.block_bytes))
    print(f"{options.blocks} blocks of {format_bytes(options.block_bytes)}, best of {ROUNDS}")
    for name, rate, ratio in rows:
        print(f"{name:<36}{rate:>16}  {ratio}")


if __name__ == "__main__":
    main()
