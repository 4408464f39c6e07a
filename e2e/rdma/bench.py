"""RDMA reads and writes of KV blocks against `ib_read_bw` and `ib_write_bw`, on the same device.

Run in the machine by `python e2e/rdma/vm.py --bench`. Each figure takes turns with what it is
compared to; the ratio is the median over the rounds. Under software emulation the figures say what
our code costs beside the same device's own limit, and nothing about a network.
"""

import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.transfer.network import NetworkSettings, RdmaSettings
from kimi_runtime.transfer.verbs import VerbsTransport

CALL_KEY = b"k" * 32
ADDRESS = "10.77.0.1"
BLOCK, BLOCKS = 1 << 20, 8
SMALL, SMALL_READS = 4 << 10, 100
ROUNDS, ITERATIONS = 5, 40
DEADLINE_S = 60.0
BANDWIDTH = re.compile(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)", re.MULTILINE)


def settings(pairs: int) -> NetworkSettings:
    """Of both ends."""
    return NetworkSettings((CALL_KEY,), rdma=RdmaSettings(queue_pairs=pairs))


async def own(pairs: int) -> None:
    """The other process: a region that may be read and written, until its input ends."""
    transport = VerbsTransport("owner", settings(pairs))
    memory = private_memory(BLOCK * BLOCKS)
    print(transport.register(memory, writable=True).model_dump_json(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.aclose()


def perftest(command: str, pairs: int) -> float:
    """Bytes a second between two processes over the device, as perftest counts them."""
    common = [command, "-d", "rxe0", "-s", str(BLOCK), "-n", str(ITERATIONS), "-q", str(pairs)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(common, stdout=quiet, stderr=quiet) as server:
        time.sleep(2.0)
        done = subprocess.run([*common, ADDRESS], capture_output=True, text=True, check=False)
        server.wait(30)
    found = BANDWIDTH.findall(done.stdout)
    if not found:
        sys.exit(f"{command} printed no bandwidth:\n{done.stdout}\n{done.stderr}")
    return float(found[-1]) * 2**20


async def rate(work: Callable[[], Awaitable[object]]) -> float:
    """Bytes a second over as many blocks as perftest moves."""
    start_s, turns = time.perf_counter(), ITERATIONS // BLOCKS
    for _ in range(turns):
        await work()
    return turns * BLOCK * BLOCKS / (time.perf_counter() - start_s)


async def measure(pairs: int) -> Sequence[tuple[str, float, float]]:
    """Rows of (what, ours, share of perftest's)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, "own", str(pairs)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        ref = RegionRef.model_validate_json(owner.stdout.readline())
        transport = VerbsTransport("reader", settings(pairs))
        memory = private_memory(BLOCK * BLOCKS)
        transport.register(memory)  # pinned once, as an engine's memory is
        session = await transport.open(ref, deadline_s=DEADLINE_S)
        spans = [Span(n * BLOCK, n * BLOCK, BLOCK) for n in range(BLOCKS)]
        rows = []
        for name, move, tool in (
            ("read", session.read, "ib_read_bw"),
            ("write", session.write, "ib_write_bw"),
        ):
            await move(spans, memory.view, deadline_s=DEADLINE_S)
            ours, shares = [], []
            for _ in range(ROUNDS):
                limit = perftest(tool, pairs)
                own_rate = await rate(partial(move, spans, memory.view, deadline_s=DEADLINE_S))
                ours.append(own_rate)
                shares.append(own_rate / limit)
            rows.append((name, statistics.median(ours), statistics.median(shares)))
        start_s = time.perf_counter()
        for _ in range(SMALL_READS):
            await session.read([Span(0, 0, SMALL)], memory.view, deadline_s=DEADLINE_S)
        rows.append(("small", (time.perf_counter() - start_s) / SMALL_READS, 0.0))
        await transport.aclose()
        owner.stdin.close()
        owner.wait(30)
    return rows


def main() -> None:
    """Print one table."""
    if sys.argv[1:2] == ["own"]:
        asyncio.run(own(int(sys.argv[2])))
        return
    print(f"{BLOCKS} blocks of 1 MiB a batch, soft RoCE")
    print("| queue pairs | read MB/s | of ib_read_bw | write MB/s | of ib_write_bw | 4 KiB read |")
    print("| --- | --- | --- | --- | --- | --- |")
    for pairs in (1, 4):
        read, write, small = asyncio.run(measure(pairs))
        print(
            f"| {pairs} | {read[1] / 1e6:.0f} | {read[2]:.2f} | {write[1] / 1e6:.0f} | "
            f"{write[2]:.2f} | {1e3 * small[1]:.1f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    main()
