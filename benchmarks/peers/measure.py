"""What every store is put through: batches put, then got, beside a memcpy of the same bytes.

Imported by scripts that run in other environments: numpy and the standard library alone.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

SIZES = (64 << 10, 1 << 20, 4 << 20)
BATCHES = (1, 4, 16)
ROUNDS, QUIET_S = 5, 0.5


class Store(Protocol):
    """A store that serves other processes too."""

    def put(self, keys: Sequence[str], blocks: Sequence[np.ndarray]) -> None:
        """Put blocks; they can be got by another process when this returns."""

    def get(self, keys: Sequence[str], into: Sequence[np.ndarray]) -> None:
        """Fill the arrays."""


def best_s(works: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each work's best round; they take turns, so that all meet the same machine."""
    best = [float("inf")] * len(works)
    rounds, ends_s = ROUNDS, time.perf_counter() + QUIET_S
    while rounds > 0 or time.perf_counter() < ends_s:
        rounds -= 1
        for number, work in enumerate(works):
            start_s = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - start_s)
    return best


def run(store: Store, source: np.ndarray, target: np.ndarray) -> None:
    """Print a line of JSON for each size and batch. The arrays hold the largest batch each."""
    source[:] = np.random.default_rng(0).integers(0, 255, source.nbytes, np.uint8)
    for size in SIZES:
        for batch in BATCHES:
            blocks = [source[n * size : (n + 1) * size] for n in range(batch)]
            into = [target[n * size : (n + 1) * size] for n in range(batch)]
            times = _times(store, f"{size}-{batch}", blocks, into)
            if not all(np.array_equal(a, b) for a, b in zip(blocks, into, strict=True)):
                sys.exit(f"what was got is not what was put ({size} bytes, {batch} blocks)")
            print(json.dumps({"size": size, "batch": batch, **times}), flush=True)


def _times(
    store: Store, name: str, blocks: Sequence[np.ndarray], into: Sequence[np.ndarray]
) -> dict[str, float]:
    numbers = itertools.count()

    def put() -> list[str]:
        number = next(numbers)
        keys = [f"{name}-{number}-{n}" for n in range(len(blocks))]
        store.put(keys, blocks)
        return keys

    def copy() -> None:
        for one, other in zip(into, blocks, strict=True):
            np.copyto(one, other)

    keys = put()
    copy_s, put_s, get_s = best_s((copy, put, lambda: store.get(keys, into)))
    for one in into:
        one[:] = 0
    store.get(keys, into)
    return {"memcpy": copy_s, "put": put_s, "get": get_s}


def buffers() -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of the largest batch, every page of theirs touched."""
    size = max(SIZES) * max(BATCHES)
    return np.ones(size, np.uint8), np.ones(size, np.uint8)
