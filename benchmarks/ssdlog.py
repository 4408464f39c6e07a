"""What the SSD log costs: writes and reads against fio, and against plain files, on the same disk.

    PYTHONPATH=runtime python benchmarks/ssdlog.py [--folder DIR] [--blocks 128]

All sides move the same bytes on the same file system in pieces of one block, as many at a time, by
positioned reads and writes of threads, into files whose space is reserved before (fio does that by
itself), with or without O_DIRECT; what is written is on stable storage at the end. All use their
memory again, a batch of it: the log and plain files such memory as an engine has (`private_memory`,
on huge pages), fio as many blocks per thread. With O_DIRECT, where that would be more requests at a
time, fio uses one block per thread; with the page cache, which copies, one block per thread would
stay in the processor's own cache, and reads go over the file several times, for fio's pages to be
there. The log also makes and checks tags and checksums, which is why its processor time is beside
fio's. Only the O_DIRECT rows tell of the disk: with the page cache, reads are copies in memory.

Rounds take turns; a ratio is the median of the rounds' ratios. Without `fio` on this machine its
columns are empty.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.umbp.ssdlog.append import NewBlock
from kimi_runtime.umbp.ssdlog.log import SsdLog
from kimi_runtime.units import format_bytes, parse_bytes

ROUNDS = 9
THREADS = 4
BATCH = 32
"""Blocks handed over at a time; what a daemon's write-through does."""

READ_LOOPS = 4
"""Of fio, over a file that the page cache holds."""

ENOUGH_S = 30.0
"""With and without O_DIRECT each: a slow disk gets fewer rounds."""


class Took(NamedTuple):
    """Seconds of one side's write or read: by the clock, and of processors."""

    wall_s: float
    cpu_s: float


class Round(NamedTuple):
    """One round of writing or reading."""

    fio: Took
    plain: Took
    log: Took


def timed(work: Callable[[], object]) -> Took:
    """How long it takes this process."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - start_s, time.process_time() - cpu_s)


def fio_round(folder: Path, direct: bool, blocks: int, block_bytes: int) -> tuple[Took, Took]:
    """fio's write, synced at its end, and its read."""
    if shutil.which("fio") is None:
        return Took(math.nan, math.nan), Took(math.nan, math.nan)
    took = []
    memory = ("psync", 1) if direct else ("libaio", BATCH // THREADS)
    for rw in ("write", "read"):
        loops = READ_LOOPS if rw == "read" and not direct else 1
        command = [
            *("fio", "--name=kv", "--output-format=json", f"--directory={folder}"),
            *(f"--rw={rw}", f"--bs={block_bytes}", f"--direct={int(direct)}", "--thread"),
            *(f"--numjobs={THREADS}", f"--size={blocks * block_bytes // THREADS}"),
            *(f"--ioengine={memory[0]}", f"--iodepth={memory[1]}", f"--loops={loops}"),
            *("--group_reporting", "--end_fsync=1", "--invalidate=0"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout)["jobs"][0]
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        took.append(Took(job[rw]["runtime"] / 1e3 / loops, cpu_s / loops))
    for file in folder.glob("kv.*"):
        file.unlink()
    return took[0], took[1]


def plain_round(
    folder: Path, direct: bool, count: int, views: Sequence[memoryview]
) -> tuple[Took, Took]:
    """A file written, synced and read by as many threads, without a log."""
    path, size = folder / "plain", views[0].nbytes
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
    os.posix_fallocate(fd, 0, count * size)

    def move(call: Callable[..., int]) -> None:
        for start in range(0, count, BATCH):
            numbers = range(start, min(start + BATCH, count))
            list(pool.map(lambda n: call(fd, [views[n % BATCH]], n * size), numbers))

    def write() -> None:
        move(os.pwritev)
        os.fdatasync(fd)

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return timed(write), timed(lambda: move(os.preadv))
    finally:
        os.close(fd)
        path.unlink()


def log_round(
    folder: Path, direct: bool, count: int, views: Sequence[memoryview]
) -> tuple[Took, Took]:
    """The log's write, flushed, and its read, verified."""
    size = count * views[0].nbytes
    spec = SsdSpec(
        folder=folder / "log", capacity=max(size * 2, 4 << 28), direct=direct, io_threads=THREADS
    )
    log = SsdLog.open(spec)
    new = [NewBlock(n.to_bytes(16, "big"), views[n % BATCH]) for n in range(count)]
    batches = [new[start : start + BATCH] for start in range(0, count, BATCH)]

    def put() -> None:
        for batch in batches:
            assert log.put(batch).refusal is None
        assert log.flush()

    def get() -> None:
        for batch in batches:
            got = log.get([block.key for block in batch], views[: len(batch)])
            assert len(got.tags) == len(batch)

    took = timed(put), timed(get)
    log.close()
    shutil.rmtree(spec.folder)
    return took


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-bytes", type=parse_bytes, default=1 << 20)
    options = parser.parse_args()
    count, size = options.blocks, options.block_bytes
    memory = private_memory(BATCH * size).view
    memory[:] = os.urandom(memory.nbytes)
    views = [memory[n * size : (n + 1) * size] for n in range(BATCH)]
    print(f"{count} blocks of {format_bytes(size)}, {THREADS} threads, batches of {BATCH}")
    columns = ("fio GB/s", "plain GB/s", "log GB/s", "of fio", "of plain", "fio cpu", "log cpu")
    print(f"{'':<20}" + "".join(f"{column:>11}" for column in columns))
    shares = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for direct in (False, True):
            writes, reads, started_s = list[Round](), list[Round](), time.perf_counter()
            while len(writes) < ROUNDS and time.perf_counter() - started_s < ENOUGH_S:
                sides = (
                    fio_round(Path(folder), direct, count, size),
                    plain_round(Path(folder), direct, count, views),
                    log_round(Path(folder), direct, count, views),
                )
                writes.append(Round(*(side[0] for side in sides)))
                reads.append(Round(*(side[1] for side in sides)))
            how = "O_DIRECT" if direct else "page cache"
            shares.append(_row(f"write, {how}", writes, count * size))
            shares.append(_row(f"read, {how}", reads, count * size))
    cached, direct_io = (
        f"write {w:.0%} and read {r:.0%} of fio" for w, r in (shares[:2], shares[2:])
    )
    print(f"O_DIRECT: {direct_io}; page cache: {cached}; target 80%")


def _row(name: str, rounds: Sequence[Round], size: int) -> float:
    """Print a row; the log's speed, of fio's."""
    speeds = (
        size / statistics.median(took.wall_s for took in side) / 1e9
        for side in zip(*rounds, strict=True)
    )
    of_fio, of_plain = (
        statistics.median(getattr(turn, side).wall_s / turn.log.wall_s for turn in rounds)
        for side in ("fio", "plain")
    )
    cpu = (
        1e3 * statistics.median(getattr(turn, side).cpu_s for turn in rounds) / (size / 1e9)
        for side in ("fio", "log")
    )
    print(
        f"{name:<20}"
        + "".join(f"{speed:>11.2f}" for speed in speeds)
        + f"{of_fio:>11.0%}{of_plain:>11.0%}"
        + "".join(f"{f'{ms:.0f}ms/GB':>11}" for ms in cpu)
    )
    return of_fio


if __name__ == "__main__":
    main()
