"""Matrix products whose rows do not depend on how many rows are computed together.

A matrix library picks its kernel by the shape, and another kernel may add a row's products in
another order: on CPUs with AMX a bf16 product over 512 inputs or more gives other last bits for 64
rows than for 16 (docs/decisions/0004-batch-invariance.md). A row must not feel its batch, so every
product here runs in *tiles* of a few fixed row counts. The 16-row tile defines the result; other
counts are used only where a self-test at start found them bitwise equal to it, on operands whose
products cancel, so that what is left is nothing but the order of the additions.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.errors import KimistackError

LADDER = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Row counts that a step, an expert's share or a tile may have; more rows are cut."""

REFERENCE_ROWS = 16

CALL_COST_ROWS = 64
"""What one more call costs, in rows: about 20 us against 0.3 us."""

Product = Callable[[Tensor], Tensor]
"""[..., M, K] -> [..., M, N], rows along the last but one axis."""


class NotInvariant(KimistackError):
    """No tile was found whose rows are independent of each other on this device."""


def padded_rows(rows: int) -> int:
    """The next row count of the ladder; beyond its end, the next multiple of its end."""
    for size in LADDER:
        if rows <= size:
            return size
    return -(-rows // LADDER[-1]) * LADDER[-1]


class Tiles:
    """The row counts in which a product may be computed."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.cut = lru_cache(maxsize=4096)(self._cut)

    def _cut(self, rows: int) -> tuple[int, ...]:
        """Tiles that cover `rows` at the least cost, the greatest first; they may exceed it."""
        if rows in self.sizes:
            return (rows,)
        whole, rest = divmod(rows, self.sizes[-1])
        cost = [0] * (rest + 1)
        first = [0] * (rest + 1)
        for count in range(1, rest + 1):
            cost[count], first[count] = min(
                (cost[max(0, count - size)] + size + CALL_COST_ROWS, size) for size in self.sizes
            )
        tiles = [self.sizes[-1]] * whole
        while rest > 0:
            tiles.append(first[rest])
            rest -= first[rest]
        return tuple(sorted(tiles, reverse=True))

    def apply(self, product: Product, x: Tensor) -> Tensor:
        """`product(x)`, computed tile by tile."""
        rows = x.shape[-2]
        sizes = self.cut(rows)
        if sizes == (rows,):
            return product(x)
        parts, start = [], 0
        for size in sizes:
            part = x[..., start : start + size, :]
            if part.shape[-2] < size:
                part = functional.pad(part, (0, 0, 0, size - part.shape[-2]))
            parts.append(product(part.contiguous()))
            start += size
        return torch.cat(parts, dim=-2)[..., :rows, :]


ANY_ROWS = Tiles(tuple(range(1, LADDER[-1] + 1)))
"""For dtypes without the promise (fp32 in tests): whatever comes is computed at once."""


def cancelling(
    rows: int, inputs: int, outputs: int, *, lead: tuple[int, ...] = (), seed: int = 0
) -> tuple[Tensor, Tensor]:
    """x [*lead, rows, inputs] and w [*lead, outputs, inputs] in fp32 with `x @ w.T` exactly zero.

    The second half of the inputs repeats the first, negated and in another order. What a product
    returns is its rounding error alone: any other order of additions shows in almost every element,
    also after the result was rounded to bf16. Values are exact in bf16.
    """
    generator = torch.Generator().manual_seed(seed)
    half = inputs // 2
    order = torch.randperm(half, generator=generator)
    x = torch.zeros(*lead, rows, inputs)
    w = torch.zeros(*lead, outputs, inputs)
    for target, sign in ((x, -1.0), (w, 1.0)):
        values = torch.randn(*target.shape[:-1], half, generator=generator).bfloat16().float()
        target[..., :half] = values
        target[..., half : 2 * half] = sign * values[..., order]
    return x, w


def in_reference_tiles(product: Product, x: Tensor) -> Tensor:
    """The result that every other way of computing must equal. x has a multiple of 16 rows."""
    parts = [
        product(x[..., start : start + REFERENCE_ROWS, :].contiguous())
        for start in range(0, x.shape[-2], REFERENCE_ROWS)
    ]
    return torch.cat(parts, dim=-2)


def measure_tiles(product: Product, x: Tensor, what: str, expected: Tensor | None = None) -> Tiles:
    """Those row counts of the ladder that give the reference tile's bits, whatever the position.

    x [..., 512, K] is the probe. Raises NotInvariant when even rows of one reference tile depend on
    their position.
    """
    alike = x[..., :1, :].expand(*x.shape[:-2], REFERENCE_ROWS, x.shape[-1]).contiguous()
    result = product(alike)
    if expected is None:
        expected = in_reference_tiles(product, x)
    alone = expected[..., :1, :].expand_as(result)
    if not (torch.equal(result, alone) and _equals(product, x, expected, REFERENCE_ROWS)):
        raise NotInvariant(
            f"{what} on {x.device} in {x.dtype} with {torch.get_num_threads()} threads: equal rows "
            f"of one {REFERENCE_ROWS}-row tile differ by their position; use another number of "
            "threads, or another build of PyTorch"
        )
    return Tiles(tuple(size for size in LADDER if _equals(product, x, expected, size)))


def _equals(product: Product, x: Tensor, expected: Tensor, size: int) -> bool:
    for start in {0, (x.shape[-2] - size) // 2, x.shape[-2] - size}:
        part = slice(start, start + size)
        if not torch.equal(product(x[..., part, :].contiguous()), expected[..., part, :]):
            return False
    return True
