"""How fast an engine gets blocks that only another node's pool has, on this host's loopback.

    PYTHONPATH=runtime python benchmarks/umbp_peers.py [--rounds 5]

Two daemons as processes of their own; an engine on the second loads a run of 128 MiB from the
first: lent, copied by tcp, checked, committed, copied out and checked again. Then the same run
again, which the second has by now: the ratio is what the way through the network costs, with both
ends on the same cores. `one block` is a single block's latency.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kimi_connect.wire import Outcome
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.client import PoolClient, open_pool
from kimi_runtime.units import format_bytes

CALL_KEY = b"benchmark" * 4
RUN_BYTES = 128 << 20
BLOCK_BYTES = (64 << 10, 1 << 20)
DEADLINE_S = 60.0

SERVE = """
import asyncio, sys
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.daemon import running
async def main():
    async with running(UmbpSpec.model_validate_json(sys.argv[1])) as daemon:
        print(daemon.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


def start(
    folder: Path, name: str, peers: list[dict[str, str]]
) -> tuple[subprocess.Popen[str], str]:
    """A daemon called `name`, and its URL."""
    spec = UmbpSpec.model_validate(
        {
            "name": name,
            "port": 0,
            "socket": folder / f"{name}.sock",
            "arena": Path("/dev/shm") / f"{folder.name}-{name}",
            "dram_bytes": 4 * RUN_BYTES,
            "call_key": folder / "key",
            "peers": peers,
            "lends": True,
        }
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(spec.model_dump(mode="json"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


async def one_round(
    owner: PoolClient, reader: PoolClient, size: int, first: int
) -> tuple[float, float, float]:
    """Seconds of a run from the peer, of the same run from memory, of one block from the peer."""
    count = RUN_BYTES // size
    keys = [(first + n).to_bytes(16, "big") for n in range(count + 1)]
    data = memoryview(bytes(range(256)) * (size // 256))
    assert await owner.store(keys, [data] * len(keys), deadline_s=DEADLINE_S) == len(keys)
    while await reader.held(keys[:-1]) < count or await reader.held(keys[-1:]) < 1:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    into = [memoryview(bytearray(size)) for _ in range(count)]
    took = []
    for some in (keys[:-1], keys[:-1], keys[-1:]):
        start_s = time.perf_counter()
        got = await reader.load(some, into[: len(some)], deadline_s=DEADLINE_S)
        took.append(time.perf_counter() - start_s)
        assert got == (len(some), Outcome.HIT), got
    assert all(view == data for view in into)
    return took[0], took[1], took[2]


async def measure(folder: Path, rounds: int) -> None:
    """Print the table."""
    (folder / "key").write_bytes(CALL_KEY)
    (folder / "key").chmod(0o600)
    first, url = start(folder, "a", [])
    second, _ = start(folder, "b", [{"name": "a", "url": url}])
    try:
        owner = await open_pool(folder / "a.sock", CALL_KEY)
        reader = await open_pool(folder / "b.sock", CALL_KEY)
        print(
            f"{'block':>8} {'from the peer':>14} {'from memory':>12} {'ratio':>6} {'one block':>10}"
        )
        for case, size in enumerate(BLOCK_BYTES):
            took = [
                await one_round(owner, reader, size, 1 + (case * rounds + n) * 1_000_000)
                for n in range(rounds)
            ]
            peer_s, memory_s, one_s = (statistics.median(t) for t in zip(*took, strict=True))
            ratio = statistics.median(m / p for p, m, _ in took)
            rate = f"{RUN_BYTES / peer_s / 1e9:.2f} GB/s"
            local = f"{RUN_BYTES / memory_s / 1e9:.2f} GB/s"
            one = f"{1e3 * one_s:.1f} ms"
            print(f"{format_bytes(size):>8} {rate:>14} {local:>12} {ratio:>6.2f} {one:>10}")
        print(f"summary: 1 MiB blocks from a peer {rate}, {ratio:.2f} of memory's, one in {one}")
        await owner.aclose()
        await reader.aclose()
    finally:
        for process in (second, first):
            process.communicate()


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), rounds))
        for lock in Path("/dev/shm").glob(f"{Path(folder).name}-*.lock"):
            lock.unlink()


if __name__ == "__main__":
    main()
