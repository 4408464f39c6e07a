"""Several threads that copy and tag the blocks of one batch.

Copies leave the interpreter free, so while one thread copies another can hash: on two threads a
large batch takes about as long with tags as it does on one without.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

LEAST_BYTES = 1 << 20
"""What is worth a thread of its own: handing over costs some 20 µs."""


class Copiers:
    """`threads` in all, the caller's included; 1 starts none."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads can't copy anything")
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "kv-copy") if threads > 1 else None

    @property
    def alone(self) -> bool:
        """Whether there is only the caller's thread."""
        return self._pool is None

    def run(
        self, sizes: Sequence[int], work: Callable[[slice], Result]
    ) -> "list[tuple[slice, Result]]":
        """`work` on consecutive runs of blocks of these sizes, at once; each run with its result.

        Returns when every thread has ended, and raises what the first that failed has raised.
        """
        runs = self._runs(sizes) if self._pool is not None else [slice(0, len(sizes))]
        if self._pool is None or len(runs) < 2:
            return [(run, work(run)) for run in runs]
        others = [self._pool.submit(work, run) for run in runs[1:]]
        try:
            results = [work(runs[0]), *(other.result() for other in others)]
            return list(zip(runs, results, strict=True))
        finally:
            for other in others:
                other.exception()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _runs(self, sizes: Sequence[int]) -> "list[slice]":
        """Runs of about equal bytes, at most one a thread."""
        total = sum(sizes)
        share = max(total / self._threads, LEAST_BYTES)
        runs: list[slice] = []
        start = held = 0
        for place, size in enumerate(sizes):
            held += size
            if held >= share and len(runs) < self._threads - 1:
                runs.append(slice(start, place + 1))
                start, held = place + 1, 0
        if start < len(sizes):
            runs.append(slice(start, len(sizes)))
        return runs


def leading(counts: "Sequence[tuple[slice, int]]") -> int:
    """How many leading blocks were done, of how many each run has done of its own leading ones."""
    total = 0
    for run, count in counts:
        total += count
        if count < run.stop - run.start:
            break
    return total
