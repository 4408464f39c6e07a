"""Which hash tags KV bytes: GB/s of one core, whole buffers and 4 KiB leaves.

    PYTHONPATH=runtime python benchmarks/tags.py

The result decides `docs/decisions/0003-tag-hash.md`.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Callable

import xxhash

from kimi_connect.tags import LEAF_BYTES, numpy_leaves
from kimi_runtime.umbp import tags

BLOCK_BYTES = 4 << 20
ROUNDS = 7


def rate(work: Callable[[memoryview], object], data: memoryview) -> float:
    """Bytes per second of the best round: what the core can do when it is left alone."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        work(data)
        best_s = min(best_s, time.perf_counter() - start_s)
    return data.nbytes / best_s


def by_leaves(digest: Callable[[memoryview], bytes]) -> Callable[[memoryview], bytes]:
    """A hash of every leaf."""
    return lambda data: b"".join(
        [digest(data[at : at + LEAF_BYTES]) for at in range(0, data.nbytes, LEAF_BYTES)]
    )


def main() -> None:
    """Print one table."""
    data = memoryview(os.urandom(BLOCK_BYTES))
    into = memoryview(bytearray(BLOCK_BYTES))
    key = b"k" * 16

    def copy(source: memoryview) -> None:
        into[:] = source

    cases: list[tuple[str, Callable[[memoryview], object]]] = [
        ("memcpy", copy),
        ("xxh3_64, 4 KiB leaves", by_leaves(xxhash.xxh3_64_digest)),
        ("xxh3_128, 4 KiB leaves", by_leaves(xxhash.xxh3_128_digest)),
        ("xxh64, 4 KiB leaves", by_leaves(xxhash.xxh64_digest)),
        ("xxh3_64, whole", xxhash.xxh3_64_digest),
        ("crc32 (zlib), whole", zlib.crc32),
        ("sha256, whole", lambda view: hashlib.sha256(view).digest()),
        ("blake2b, whole", lambda view: hashlib.blake2b(view).digest()),
        ("tag: xxh3_64 leaves under blake2b", lambda view: tags.tag(key, 0, view)),
        ("xxh3_64 leaves in numpy", numpy_leaves()),
    ]
    memcpy = rate(copy, data)
    print(f"{'hash':<36}{'GB/s':>8}{'of memcpy':>12}")
    for name, work in cases:
        got = rate(work, data)
        print(f"{name:<36}{got / 1e9:>8.2f}{got / memcpy:>11.0%}")


if __name__ == "__main__":
    main()
