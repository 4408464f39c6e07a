"""What tags cost one core: hashes of KV bytes, and copies of pieces that are hashed by leaves.

    PYTHONPATH=runtime python benchmarks/tags.py

The first table decides which hash (`docs/decisions/0003-tag-hash.md`), the second how large leaves
are and whether they are hashed before a piece is copied or after (`0020-large-leaves.md`). Sides
take turns; a rate is of the least processor time, so that others' work beside counts little. A
price is the part of the whole that a copy alone would not have taken.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Callable
from functools import partial

import xxhash

from kimi_connect.blocks import PIECE_BYTES
from kimi_connect.copying import copier
from kimi_connect.tags import LEAF_BYTES, numpy_leaves
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.umbp import tags
from kimi_runtime.units import format_bytes

BLOCK_BYTES = 4 << 20
ROUNDS = 40
LEAVES = (4 << 10, 16 << 10, 64 << 10, 128 << 10, 256 << 10)
COPIED = (4 << 20, 64 << 20)
"""What lies in the last cache, and what does not."""


def rates(works: list[Callable[[], object]], size: int, rounds: int) -> list[float]:
    """Bytes per second of processor time, of each one's best round."""
    best_s = [float("inf")] * len(works)
    for _ in range(rounds):
        for number, work in enumerate(works):
            start_s = time.process_time()
            work()
            best_s[number] = min(best_s[number], time.process_time() - start_s)
    return [size / seconds for seconds in best_s]


def by_leaves(digest: Callable[[memoryview], bytes], leaf: int, data: memoryview) -> bytes:
    """A hash of every leaf."""
    return b"".join([digest(data[at : at + leaf]) for at in range(0, data.nbytes, leaf)])


def hashes() -> None:
    """Print the first table."""
    data = memoryview(os.urandom(BLOCK_BYTES))
    into = memoryview(bytearray(BLOCK_BYTES))
    small = partial(by_leaves, leaf=4096, data=data)
    large = partial(by_leaves, leaf=LEAF_BYTES, data=data)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("memcpy", partial(into.__setitem__, slice(None), data)),
        ("xxh3_64, 4 KiB leaves", lambda: small(xxhash.xxh3_64_digest)),
        ("xxh3_128, 4 KiB leaves", lambda: small(xxhash.xxh3_128_digest)),
        ("xxh64, 4 KiB leaves", lambda: small(xxhash.xxh64_digest)),
        (f"xxh3_64, {LEAF_BYTES >> 10} KiB leaves", lambda: large(xxhash.xxh3_64_digest)),
        ("xxh3_64, whole", lambda: xxhash.xxh3_64_digest(data)),
        ("crc32 (zlib), whole", lambda: zlib.crc32(data)),
        ("sha256, whole", lambda: hashlib.sha256(data).digest()),
        ("blake2b, whole", lambda: hashlib.blake2b(data).digest()),
        ("the tag", lambda: tags.tag(b"k" * 16, 0, data)),
        ("its leaves in numpy", partial(numpy_leaves(), data)),
    ]
    got = rates([work for _, work in cases], BLOCK_BYTES, ROUNDS)
    print(f"{'hash of 4 MiB':<36}{'GB/s':>8}{'of memcpy':>12}")
    for (name, _), rate in zip(cases, got, strict=True):
        print(f"{name:<36}{rate / 1e9:>8.2f}{rate / got[0]:>11.0%}")


def copies(size: int) -> None:
    """Print rows of the second table: a price for each size of leaves, hashed after and before."""
    source, target = private_memory(size).view, private_memory(size).view
    source[:] = os.urandom(PIECE_BYTES) * (size // PIECE_BYTES)
    target[:] = source
    copy = copier(target, source)

    def move(leaf: int, hashed: memoryview | None, before: bool) -> None:
        for at in range(0, size, PIECE_BYTES):
            end = at + PIECE_BYTES
            if hashed is not None and before:
                by_leaves(xxhash.xxh3_64_digest, leaf, hashed[at:end])
            copy(at, end)
            if hashed is not None and not before:
                by_leaves(xxhash.xxh3_64_digest, leaf, hashed[at:end])

    works = [partial(move, 0, None, False)]
    works += [partial(move, leaf, target, False) for leaf in LEAVES]
    works += [partial(move, leaf, source, True) for leaf in LEAVES]
    plain, *hashed = rates(works, size, max(ROUNDS, (1 << 30) // size))
    for name, some in (
        ("copied, then hashed", hashed[: len(LEAVES)]),
        ("hashed, then copied", hashed[len(LEAVES) :]),
    ):
        prices = "".join(f"{1 - rate / plain:>10.0%}" for rate in some)
        print(f"{format_bytes(size):<8}{name:<22}{plain / 1e9:>8.1f}{prices}")


def main() -> None:
    """Print both tables."""
    hashes()
    print()
    heads = "".join(f"{format_bytes(leaf):>10}" for leaf in LEAVES)
    print(f"{'of':<30}{'copy':>8}   price by size of leaves, pieces of {format_bytes(PIECE_BYTES)}")
    print(f"{'':<30}{'GB/s':>8}{heads}")
    for size in COPIED:
        copies(size)


if __name__ == "__main__":
    main()
