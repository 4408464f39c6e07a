"""Spans by two products whose rows do not depend on each other, for any device; see `models.rows`.

weights = exp(scale q . k + bias - peak);  mean = weights k / sum;  log-sum = peak + log sum
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.models.norm import row_sum
from kimi_runtime.models.rows import (
    ANY_ROWS,
    LADDER,
    NotInvariant,
    Product,
    Tiles,
    cancelling,
    in_reference_tiles,
    measure_tiles,
)
from kimi_runtime.models.spans import SpanGeometry

_GEOMETRY = SpanGeometry((64, 128, 192, 256))
_PROBED_BATCHES = (1, 2, 3, 8, 33, 64)
_PROBE_ROWS = LADDER[-1]


@dataclass(frozen=True, slots=True)
class WidthTiles:
    """How products with one span of some width may be computed."""

    scores: Tiles
    mix: Tiles
    batched: bool
    """Whether many requests' spans may be multiplied in one call, `heads` rows each."""


class TiledSpans:
    """`models.attention.SpanKernel` of products in tiles.

    With `promise` the ways of multiplying are measured at construction; widths that failed that are
    left out. NotInvariant when the full span did.
    """

    def __init__(
        self,
        *,
        heads: int,
        row_dim: int,
        scale: float,
        like: Tensor,
        promise: bool,
    ) -> None:
        self._heads, self._scale = heads, scale
        if promise:
            probe = _Probe(heads, row_dim, like)
            self._tiles = probe.usable_widths()
        else:
            free = WidthTiles(ANY_ROWS, ANY_ROWS, batched=True)
            self._tiles = dict.fromkeys(_GEOMETRY.widths, free)
        self.geometry = SpanGeometry(tuple(self._tiles))

    def __call__(self, q: Tensor, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """As the protocol says."""
        scores = self._scores(q, rows).mul_(self._scale)
        if bias is not None:
            scores.add_(bias)
        peak = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(peak).exp_()
        total = self._sum(weights)
        mean = self._mix(weights, rows).float().div_(total).to(q.dtype)
        return mean, total.log_().add_(peak)

    def _scores(self, q: Tensor, rows: Tensor) -> Tensor:
        """q [G, R, D] with rows [G, n, D] -> [G, R, n] fp32."""
        tiles = self._tiles[rows.shape[1]]
        if q.shape[1] == self._heads and tiles.batched:
            return _batched_scores(q, rows)
        parts = [
            tiles.scores.apply(_scores_of(one), queries.contiguous())
            for queries, one in zip(q, rows, strict=True)
        ]
        return torch.stack(parts).float()

    def _mix(self, weights: Tensor, rows: Tensor) -> Tensor:
        """weights [G, R, n] in fp32 with rows [G, n, D] -> [G, R, D]."""
        tiles = self._tiles[rows.shape[1]]
        weights = weights.to(rows.dtype)
        if weights.shape[1] == self._heads and tiles.batched:
            return torch.bmm(weights, rows)
        parts = [
            tiles.mix.apply(_mix_of(one), share) for share, one in zip(weights, rows, strict=True)
        ]
        return torch.stack(parts)

    def _sum(self, weights: Tensor) -> Tensor:
        missing = self.geometry.tokens - weights.shape[-1]
        # the order of additions follows from the width: always that of a full span
        return row_sum(functional.pad(weights, (0, missing)) if missing else weights)


def _batched_scores(q: Tensor, rows: Tensor) -> Tensor:
    """q [G, H, D] with rows [G, n, D] -> [G, H, n] fp32.

    The many rows stand left, as they lie in memory: on the right they would be packed anew each
    time, which takes longer than the product.
    """
    scores = torch.bmm(rows, q.transpose(1, 2)).transpose(1, 2)
    return scores.to(torch.float32, memory_format=torch.contiguous_format)


def _scores_of(rows: Tensor) -> Product:
    return lambda q: functional.linear(q, rows)


def _mix_of(rows: Tensor) -> Product:
    return lambda weights: torch.mm(weights, rows)


class _Probe:
    """Finds which products with a span equal the reference tile's over a full span."""

    def __init__(self, heads: int, row_dim: int, like: Tensor) -> None:
        self._heads, self._row_dim = heads, row_dim
        self._like = like

    def usable_widths(self) -> dict[int, WidthTiles]:
        """The full width, which must pass (NotInvariant otherwise), and the narrower that do."""
        full = _GEOMETRY.tokens
        usable = {}
        for width in _GEOMETRY.widths:
            try:
                usable[width] = self._tiles(width)
            except NotInvariant:
                if width == full:
                    raise
        return usable

    def _tiles(self, width: int) -> WidthTiles:
        what = f"attention over {width} of {_GEOMETRY.tokens} rows of {self._row_dim}"
        queries, keys = cancelling(_PROBE_ROWS, self._row_dim, _GEOMETRY.tokens)
        queries, keys = queries.to(self._like), keys.to(self._like)
        scores = in_reference_tiles(_scores_of(keys), queries)[:, :width]
        keys = keys[:width].contiguous()
        weights, rows = self._mixture(width)
        mixed = in_reference_tiles(_mix_of(rows), weights)
        weights, rows = weights[:, :width].contiguous(), rows[:width].contiguous()
        batched = all(
            torch.equal(
                _batched_scores(*self._batch_of(batch, queries, keys)).flatten(0, 1),
                self._first(batch, scores).float(),
            )
            and torch.equal(
                torch.bmm(*self._batch_of(batch, weights, rows)).flatten(0, 1),
                self._first(batch, mixed),
            )
            for batch in _PROBED_BATCHES
        )
        return WidthTiles(
            scores=measure_tiles(_scores_of(keys), queries, what, scores),
            mix=measure_tiles(_mix_of(rows), weights, what, mixed),
            batched=batched,
        )

    def _mixture(self, width: int) -> tuple[Tensor, Tensor]:
        """Weights [probe rows, full span], zero from `width` on, and rows [full span, row_dim]."""
        weights, values = cancelling(_PROBE_ROWS, width, self._row_dim)
        missing = _GEOMETRY.tokens - width
        rows = torch.cat((values.T, torch.ones(missing, self._row_dim)))
        return functional.pad(weights, (0, missing)).to(self._like), rows.to(self._like)

    def _first(self, batch: int, rows: Tensor) -> Tensor:
        """`heads` rows for each request of a batch, starting again after the last."""
        return rows[torch.arange(batch * self._heads, device=rows.device) % len(rows)]

    def _batch_of(self, batch: int, left: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of `batch` requests whose rows lie as the cache delivers them."""
        left = self._first(batch, left).view(batch, self._heads, -1)
        return left, rows.expand(batch, *rows.shape).contiguous()
