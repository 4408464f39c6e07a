"""What the SSD log costs: writes and reads against fio, and against plain files, on the same disk.

    PYTHONPATH=runtime python benchmarks/ssdlog.py [--folder DIR] [--blocks 128]

All sides move the same bytes in the same pieces and batches with as many threads, and sync at the
end of a write; the log also makes and checks tags and checksums, so other work on the cores costs
it more. Only the O_DIRECT rows tell of the disk: with the page cache, reads are copies in memory.
Rounds alternate; the best of each side counts. Without `fio` on this machine its column is empty.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.ssdlog.append import NewBlock
from kimi_runtime.umbp.ssdlog.disk import aligned_buffer
from kimi_runtime.umbp.ssdlog.log import SsdLog
from kimi_runtime.units import format_bytes, parse_bytes

ROUNDS = 5
THREADS = 4
BATCH = 16
ENOUGH_S = 12.0
"""Per row of the table: a slow disk gets fewer rounds."""


class Plain:
    """A file that blocks are written to one behind another."""

    def __init__(self, folder: Path, direct: bool) -> None:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
        self.path = folder / "plain"
        self.fd = os.open(self.path, flags)
        self.pool = ThreadPoolExecutor(THREADS)

    def write(self, blocks: list[memoryview]) -> None:
        """Write and sync them all."""
        self._in_batches(os.pwritev, blocks)
        os.fdatasync(self.fd)

    def read(self, targets: list[memoryview]) -> None:
        """Read them all."""
        self._in_batches(os.preadv, targets)

    def _in_batches(self, move: Callable[..., int], views: list[memoryview]) -> None:
        placed = [(n * view.nbytes, view) for n, view in enumerate(views)]
        for start in range(0, len(placed), BATCH):
            batch = placed[start : start + BATCH]
            list(self.pool.map(lambda at: move(self.fd, [at[1]], at[0]), batch))

    def close(self) -> None:
        """Close and delete it."""
        self.pool.shutdown()
        os.close(self.fd)
        self.path.unlink()


def fio_seconds(folder: Path, direct: bool, blocks: list[memoryview]) -> tuple[float, float]:
    """Seconds of fio's write, synced at its end, and of its read, of as many bytes."""
    if shutil.which("fio") is None:
        return math.nan, math.nan
    size = sum(block.nbytes for block in blocks)
    times = []
    for rw in ("write", "read"):
        command = [
            *("fio", "--name=kv", "--output-format=json", f"--directory={folder}"),
            *(f"--rw={rw}", f"--bs={blocks[0].nbytes}", f"--direct={int(direct)}"),
            *(f"--numjobs={THREADS}", f"--size={size // THREADS}", "--ioengine=psync"),
            *("--thread", "--group_reporting", "--end_fsync=1", "--invalidate=0"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        times.append(json.loads(done.stdout)["jobs"][0][rw]["runtime"] / 1e3)
    for file in folder.glob("kv.*"):
        file.unlink()
    return times[0], times[1]


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def one_round(
    folder: Path, direct: bool, blocks: list[memoryview], targets: list[memoryview]
) -> tuple[float, ...]:
    """Seconds of fio's, the plain file's and the log's write, then of their reads."""
    fio_write_s, fio_read_s = fio_seconds(folder, direct, blocks)
    plain = Plain(folder, direct)
    plain_write_s = seconds(lambda: plain.write(blocks))
    plain_read_s = seconds(lambda: plain.read(targets))
    plain.close()
    size = sum(block.nbytes for block in blocks)
    spec = SsdSpec(
        folder=folder / "log", capacity=max(size * 2, 4 << 28), direct=direct, io_threads=THREADS
    )
    log = SsdLog.open(spec)
    new = [NewBlock(n.to_bytes(16, "big"), block) for n, block in enumerate(blocks)]
    batches = [slice(start, start + BATCH) for start in range(0, len(new), BATCH)]

    def put() -> None:
        for batch in batches:
            assert log.put(new[batch]).refusal is None
        assert log.flush()

    def get() -> None:
        for batch in batches:
            keys = [block.key for block in new[batch]]
            assert len(log.get(keys, targets[batch]).tags) == len(keys)

    log_write_s, log_read_s = seconds(put), seconds(get)
    log.close()
    shutil.rmtree(spec.folder)
    return fio_write_s, plain_write_s, log_write_s, fio_read_s, plain_read_s, log_read_s


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--block-bytes", type=parse_bytes, default=1 << 20)
    options = parser.parse_args()
    size = options.blocks * options.block_bytes
    memory, into = aligned_buffer(size), aligned_buffer(size)
    memory[:] = os.urandom(size)
    cuts = [slice(at, at + options.block_bytes) for at in range(0, size, options.block_bytes)]
    blocks, targets = [memory[cut] for cut in cuts], [into[cut] for cut in cuts]
    print(f"{options.blocks} blocks of {format_bytes(options.block_bytes)}, {THREADS} threads")
    columns = ("fio GB/s", "plain GB/s", "log GB/s", "of fio", "of plain")
    print(f"{'':<28}" + "".join(f"{column:>12}" for column in columns))
    shares = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for direct in (False, True):
            started_s, rounds = time.perf_counter(), []
            while len(rounds) < ROUNDS and time.perf_counter() - started_s < ENOUGH_S:
                rounds.append(one_round(Path(folder), direct, blocks, targets))
            assert into == memory
            best = [size / min(times) / 1e9 for times in zip(*rounds, strict=True)]
            how = "O_DIRECT: the disk" if direct else "page cache"
            for name, (fio, plain, ours) in (("write", best[:3]), ("read", best[3:])):
                print(
                    f"{f'{name}, {how}':<28}{fio:>12.2f}{plain:>12.2f}{ours:>12.2f}"
                    f"{ours / fio:>12.0%}{ours / plain:>12.0%}"
                )
                shares.append(ours / fio)
    write, read = shares[-2:]
    print(f"O_DIRECT: write {write:.0%} and read {read:.0%} of fio on this disk")


if __name__ == "__main__":
    main()
