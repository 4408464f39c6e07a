"""What the SSD log costs: writes and reads against plain files on the same disk.

    PYTHONPATH=runtime python benchmarks/ssdlog.py [--folder DIR] [--blocks 128]

Both sides move the same bytes in the same pieces and batches with as many threads, and sync at the
end of a write; the log also makes and checks tags and checksums, so other work on the cores costs
it more. Only the O_DIRECT rows tell of the disk: with the page cache, reads are copies in memory.
Rounds alternate; the best of each side counts.
"""

import argparse
import os
import shutil
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


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def one_round(
    folder: Path, direct: bool, blocks: list[memoryview], targets: list[memoryview]
) -> tuple[float, float, float, float]:
    """Seconds of plain write, log write, plain read, log read."""
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
    return plain_write_s, log_write_s, plain_read_s, log_read_s


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
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
    print(f"{'':<34}{'plain GB/s':>12}{'log GB/s':>12}{'of plain':>10}")
    ratios = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for direct in (False, True):
            started_s, rounds = time.perf_counter(), []
            while len(rounds) < ROUNDS and time.perf_counter() - started_s < ENOUGH_S:
                rounds.append(one_round(Path(folder), direct, blocks, targets))
            assert into == memory
            best = [size / min(times) / 1e9 for times in zip(*rounds, strict=True)]
            how = "O_DIRECT: the disk" if direct else "page cache"
            read = how if direct else f"{how}: no disk"
            for name, plain, ours in (("write", *best[:2]), ("read", *best[2:])):
                label = f"{name}, {read if name == 'read' else how}"
                print(f"{label:<34}{plain:>12.2f}{ours:>12.2f}{ours / plain:>10.0%}")
            ratios = [best[1] / best[0], best[3] / best[2]]
    print(f"O_DIRECT: write {ratios[0]:.0%} and read {ratios[1]:.0%} of plain files on this disk")


if __name__ == "__main__":
    main()
