"""How fast KV moves between two processes of this host, how long a small read takes, and how many
bytes a hand-off moves.

    PYTHONPATH=runtime python benchmarks/transfer.py [--rounds 5] [--streams 4] [--folder DIR]

A batch is what a hand-off reads at once: 8 MiB of blocks. Each figure is measured in turn with what
it is compared to, so that other load meets both; the ratio is the median over the rounds. shm: a
round's fastest batch against its fastest memcpy of as many blocks out of such a mapping. tcp: a
round's average over loopback, of batches one after another for as long as iperf3 sends on as many
streams. iperf3 sends one buffer of at most 1 MiB a stream again and again, and so needs about as
much memory as a batch; the last row needs more, which no cache holds. Our memory on both sides is
what an engine's is, `private_memory`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from kimi_connect.copying import copy_bytes
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer import TransportName, open_transport
from kimi_runtime.transfer.base import Session, Span
from kimi_runtime.transfer.memory import private_memory, shared_memory
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.units import format_bytes

CALL_KEY = b"benchmark" * 4
REGION_BYTES = 64 << 20
BATCH_BYTES = 8 << 20
BLOCK_BYTES = (64 << 10, 1 << 20, 4 << 20)
TCP_CASES = (*((BATCH_BYTES, size) for size in BLOCK_BYTES), (REGION_BYTES, 1 << 20))
TARGET_FROM_BYTES = 1 << 20
SHM_TARGET, TCP_TARGET = 0.9, 0.8
SMALL_BYTES = 4 << 10
SMALL_READS = 300
SLICE_S, IPERF_S = 0.3, 1.0
DEADLINE_S = 60.0

OWNER = """
import asyncio, sys
from pathlib import Path
from kimi_runtime.transfer import open_transport
from kimi_runtime.transfer.memory import private_memory, shared_memory
from kimi_runtime.transfer.network import NetworkSettings
async def main(name, path, size, key):
    transport = await open_transport(name, peer="owner", network=NetworkSettings((key,)))
    memory = shared_memory(Path(path), size) if name == "shm" else private_memory(size)
    memory.view[:] = bytes(range(256)) * (size // 256)
    print(transport.register(memory).model_dump_json(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.aclose()
asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].encode()))
"""


ECHO = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer = bytes(int(sys.argv[1]))
    while connection.recv(64):
        connection.sendall(answer)
"""
"""The least that a read over TCP can do: a question of 64 bytes, an answer, blocking calls."""


@contextlib.contextmanager
def owner(name: str, path: Path) -> Iterator[RegionRef]:
    """Another process with a region."""
    command = [sys.executable, "-c", OWNER, name, str(path), str(REGION_BYTES), CALL_KEY.decode()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield RegionRef.model_validate_json(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait()


@contextlib.asynccontextmanager
async def session(name: TransportName, folder: Path, streams: int) -> AsyncIterator[Session]:
    """A session to another process's region."""
    network = NetworkSettings((CALL_KEY,), streams=streams)
    with owner(name, folder / "region") as ref:
        reader = await open_transport(name, peer="reader", network=network)
        try:
            yield await reader.open(ref, deadline_s=DEADLINE_S)
        finally:
            await reader.aclose()


def blocks_of(size: int, region_bytes: int, first: int) -> list[Span]:
    """A batch that covers the region's beginning, its blocks in another order at the target."""
    count = region_bytes // size
    order = [(n * 7 + first) % count for n in range(count)]  # 7 and powers of two: a permutation
    return [Span(at * size, n * size, size) for n, at in enumerate(order)]


async def rates(
    work: Callable[[int], Awaitable[object]], size: int, slice_s: float = SLICE_S
) -> tuple[float, float]:
    """Bytes a second of `work`, each turn of which moves `size` bytes: on average, and at best."""
    turns, best_s, start_s = 0, float("inf"), time.perf_counter()
    while (spent_s := time.perf_counter() - start_s) < slice_s or not turns:
        turn_s = time.perf_counter()
        await work(turns)
        best_s = min(best_s, time.perf_counter() - turn_s)
        turns += 1
    return turns * size / spent_s, size / best_s


async def measure_shm(folder: Path, rounds: int) -> list[list[str]]:
    """Rows: batches of blocks against memcpy of them, one after another."""
    rows = []
    source = shared_memory(folder / "source", BATCH_BYTES)
    source.view[:] = os.urandom(BATCH_BYTES)
    into = memoryview(bytearray(BATCH_BYTES))
    async with session("shm", folder, 1) as shm:
        for size in BLOCK_BYTES:

            async def read(turn: int, size: int = size) -> None:
                await shm.read(blocks_of(size, BATCH_BYTES, turn), into, deadline_s=DEADLINE_S)

            async def copy(turn: int, size: int = size) -> None:
                for at, to, _ in blocks_of(size, BATCH_BYTES, turn):
                    copy_bytes(into[to : to + size], source.view[at : at + size])

            pairs = [
                ((await rates(read, BATCH_BYTES))[1], (await rates(copy, BATCH_BYTES))[1])
                for _ in range(rounds)
            ]
            rows.append(row("shm read of 8MiB / memcpy", size, pairs, SHM_TARGET))
    return rows


async def measure_tcp(folder: Path, rounds: int, streams: int) -> list[list[str]]:
    """Rows: batches that cover the region, against iperf3 writing as large buffers."""
    rows = []
    into = private_memory(REGION_BYTES).view
    async with session("tcp", folder, streams) as tcp:
        await tcp.read([Span(0, 0, REGION_BYTES)], into, deadline_s=DEADLINE_S)  # all connected
        for region, size in TCP_CASES:

            async def read(turn: int, size: int = size, region: int = region) -> None:
                await tcp.read(blocks_of(size, region, turn), into, deadline_s=DEADLINE_S)

            pairs = [
                ((await rates(read, region, IPERF_S))[0], await iperf3(streams, size))
                for _ in range(rounds)
            ]
            target = TCP_TARGET if region == BATCH_BYTES else None
            what = f"tcp read of {format_bytes(region)} / iperf3, {streams} streams"
            rows.append(row(what, size, pairs, target))
    return rows


async def iperf3(streams: int, size: int) -> float:
    """Bytes a second that iperf3 receives over loopback; nan without it."""
    if shutil.which("iperf3") is None:
        return float("nan")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = await asyncio.create_subprocess_exec(
        *("iperf3", "-s", "-1", "-p", port, "--forceflush"), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    await server.stdout.readuntil(b"listening")
    client = await asyncio.create_subprocess_exec(
        *(
            "iperf3",
            "-c",
            "127.0.0.1",
            "-p",
            port,
            "-P",
            str(streams),
            "-l",
            str(min(size, 1 << 20)),
        ),
        *("-t", f"{IPERF_S:.0f}", "-J"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await client.communicate()
    await server.communicate()
    return float(json.loads(printed)["end"]["sum_received"]["bits_per_second"]) / 8


async def measure_latency(folder: Path, rounds: int) -> list[list[str]]:
    """Rows: one block of 4 KiB at a time."""
    rows = []
    into = memoryview(bytearray(SMALL_BYTES))
    with echo() as ask:
        for name in ("shm", "tcp"):
            async with session(name, folder, 1) as one:  # type: ignore[arg-type]
                ours, other = [], []
                for _ in range(rounds):
                    for turn in range(SMALL_READS):
                        start_s = time.perf_counter()
                        span = Span(turn * SMALL_BYTES, 0, SMALL_BYTES)
                        await one.read([span], into, deadline_s=DEADLINE_S)
                        ours.append(time.perf_counter() - start_s)
                    for _ in range(SMALL_READS):
                        start_s = time.perf_counter()
                        ask(into)
                        other.append(time.perf_counter() - start_s)
            p50, p99 = (statistics.quantiles(ours, n=100)[at] * 1e6 for at in (49, 98))
            base = statistics.median(other) * 1e6
            figures = [f"{p50:.0f} us, p99 {p99:.0f} us", f"{base:.0f} us", f"{p50 / base:.2f}", ""]
            rows.append([f"{name} read / socket round trip", format_bytes(SMALL_BYTES), *figures])
    return rows


@contextlib.contextmanager
def echo() -> Iterator[Callable[[memoryview], None]]:
    """Asks another process for SMALL_BYTES over one connection."""
    command = [sys.executable, "-c", ECHO, str(SMALL_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with socket.create_connection(("127.0.0.1", int(process.stdout.readline()))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def ask(into: memoryview) -> None:
                connection.sendall(bytes(64))
                missing = into
                while missing:
                    missing = missing[connection.recv_into(missing) :]

            yield ask
        process.wait()


async def measure_hand_off(folder: Path, streams: int) -> list[list[str]]:
    """Rows: bytes that pass when the destination has some of the blocks already."""
    rows = []
    size, count = 1 << 20, REGION_BYTES >> 20
    into = memoryview(bytearray(REGION_BYTES))
    for name in ("shm", "tcp"):
        for held in (0, count // 2, count - 1):
            async with session(name, folder, streams) as one:  # type: ignore[arg-type]
                missing = [Span(n * size, n * size, size) for n in range(held, count)]
                await one.read(missing, into, deadline_s=DEADLINE_S)
                moved, need = one.counters.read_bytes, len(missing) * size
            what = f"{name} hand-off, {held} of {count} blocks held"
            moved_text, need_text = format_bytes(moved), format_bytes(need)
            rows.append(
                [what, format_bytes(size), moved_text, need_text, f"{moved / need:.2f}", "1"]
            )
    return rows


def row(what: str, size: int, pairs: list[tuple[float, float]], target: float | None) -> list[str]:
    """One comparison: medians in GB/s, and the median of the rounds' ratios."""
    ours, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    judged = target is not None and size >= TARGET_FROM_BYTES
    wanted = f"≥{target}" if judged else ""
    figures = [f"{ours / 1e9:.2f} GB/s", f"{other / 1e9:.2f} GB/s", f"{ratio:.2f}"]
    return [what, format_bytes(size), *figures, wanted]


def show(rows: list[list[str]]) -> None:
    """The table, in Markdown."""
    head = ["what", "block", "ours", "compared to", "ratio", "target"]
    for cells in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(cells) + " |")


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kimistack-bench-", dir=args.folder) as name:
        folder = Path(name)
        rows = await measure_shm(folder, args.rounds)
        if shutil.which("iperf3") is None:
            print("iperf3 is not installed: tcp has nothing to be compared to (nan)")
        rows += await measure_tcp(folder, args.rounds, args.streams)
        rows += await measure_latency(folder, args.rounds)
        rows += await measure_hand_off(folder, args.streams)
    show(rows)
    judged = [cells for cells in rows if cells[5].startswith("≥")]
    met = sum(float(cells[4]) >= float(cells[5][1:]) for cells in judged)
    print(f"{met} of {len(judged)} targets met on {os.cpu_count()} cores")


if __name__ == "__main__":
    asyncio.run(main())
