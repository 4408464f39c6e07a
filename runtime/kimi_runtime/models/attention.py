"""Attention of latent queries over the paged cache, span by span in a fixed order.

Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over the spans of `models.spans`: the
maximum is exact in any order, sums over one span have a fixed order, and spans are added up from
the first to the last. So a query's result depends on its position and its history alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.models.cache import KvCache
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
from kimi_runtime.models.spans import QueryGroup, SpanGeometry, SpanPart

_PROBED_BATCHES = (1, 2, 3, 8, 33, 64)
_PROBE_ROWS = LADDER[-1]


@dataclass(frozen=True, slots=True)
class WidthTiles:
    """How products with one span of some width may be computed."""

    scores: Tiles
    mix: Tiles
    batched: bool
    """Whether many requests' spans may be multiplied in one call, `heads` rows each."""


class SpanAttention:
    """q [Q, H, row_dim] over the cached rows -> latent outputs [Q, H, latent_dim].

    Keys are whole cached rows, values their first `latent_dim` elements. With `promise` the ways of
    multiplying are measured at construction, as `models.rows` explains.
    """

    def __init__(
        self,
        *,
        heads: int,
        row_dim: int,
        latent_dim: int,
        scale: float,
        geometry: SpanGeometry,
        like: Tensor,
        promise: bool,
    ) -> None:
        self._latent_dim, self._scale = latent_dim, scale
        if promise:
            probe = _Probe(heads, row_dim, geometry, like)
            self._tiles = probe.usable_widths()
        else:
            free = WidthTiles(ANY_ROWS, ANY_ROWS, batched=True)
            self._tiles = dict.fromkeys(geometry.widths, free)
        self.geometry = SpanGeometry(tuple(self._tiles))
        """What spans must be cut to: widths that failed the self-test are not in it."""

    def __call__(self, q: Tensor, cache: KvCache, layer: int, group: QueryGroup) -> Tensor:
        """q are the group's queries; the step's own rows are in the cache already."""
        best = total = out = q.new_empty(0)
        for number, span in enumerate(group.spans):
            parts = [self._part(q, best if number else None, cache, layer, p) for p in span.parts]
            peak, weight, mix = map(_joined, zip(*parts, strict=True))
            if number == 0:  # every query has the first span
                best, total, out = peak, weight, mix.float()
                continue
            active = slice(span.first, None)
            shrink = torch.exp(best[active] - peak)
            total[active].mul_(shrink).add_(weight)
            out[active].mul_(shrink).add_(mix)
            best[active] = peak
        return out.div_(total).to(q.dtype)

    def _part(
        self, q: Tensor, best: Tensor | None, cache: KvCache, layer: int, part: SpanPart
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The greatest score so far, the sum of the part's weights and the rows' sum by weight."""
        rows = cache.read(layer, part.slots, part.rows)
        scores = self._scores(q[part.queries], rows).mul_(self._scale)
        if part.hidden is not None:
            scores.masked_fill_(part.hidden, -torch.inf)
        peak = scores.amax(dim=-1, keepdim=True)
        if best is not None:
            peak = torch.maximum(best[part.queries], peak)
        weights = scores.sub_(peak).exp_()
        return peak, self._sum(weights), self._mix(weights, rows)

    def _scores(self, q: Tensor, rows: Tensor) -> Tensor:
        """q [Q, H, D] with rows [G, n, D] -> [Q, H, n] fp32; G is Q, or 1 for one history."""
        tiles = self._tiles[rows.shape[1]]
        flat = q.reshape(rows.shape[0], -1, q.shape[-1])
        if len(flat) == len(q) and tiles.batched:
            return _batched_scores(flat, rows)
        parts = [
            tiles.scores.apply(_scores_of(one), queries)
            for queries, one in zip(flat, rows, strict=True)
        ]
        return _joined(parts).view(*q.shape[:2], -1).float()

    def _mix(self, weights: Tensor, rows: Tensor) -> Tensor:
        """weights [Q, H, n] in fp32 with rows [G, n, D] -> [Q, H, latent_dim]."""
        tiles = self._tiles[rows.shape[1]]
        flat = weights.to(rows.dtype).reshape(rows.shape[0], -1, weights.shape[-1])
        # whole rows: to cut the values out first would copy them, ten times the product's work
        if len(flat) == len(weights) and tiles.batched:
            return torch.bmm(flat, rows)[..., : self._latent_dim]
        parts = [
            tiles.mix.apply(_mix_of(one), share) for share, one in zip(flat, rows, strict=True)
        ]
        return _joined(parts).view(*weights.shape[:2], -1)[..., : self._latent_dim]

    def _sum(self, weights: Tensor) -> Tensor:
        missing = self.geometry.tokens - weights.shape[-1]
        # the order of additions follows from the width: always that of a full span
        return row_sum(functional.pad(weights, (0, missing)) if missing else weights)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


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

    def __init__(self, heads: int, row_dim: int, geometry: SpanGeometry, like: Tensor) -> None:
        self._heads, self._row_dim = heads, row_dim
        self._geometry, self._like = geometry, like

    def usable_widths(self) -> dict[int, WidthTiles]:
        """The full width, which must pass (NotInvariant otherwise), and the narrower that do."""
        full = self._geometry.tokens
        usable = {}
        for width in self._geometry.widths:
            try:
                usable[width] = self._tiles(width)
            except NotInvariant:
                if width == full:
                    raise
        return usable

    def _tiles(self, width: int) -> WidthTiles:
        what = f"attention over {width} of {self._geometry.tokens} rows of {self._row_dim}"
        queries, keys = cancelling(_PROBE_ROWS, self._row_dim, self._geometry.tokens)
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
        missing = self._geometry.tokens - width
        rows = torch.cat((values.T, torch.ones(missing, self._row_dim)))
        return functional.pad(weights, (0, missing)).to(self._like), rows.to(self._like)

    def _first(self, batch: int, rows: Tensor) -> Tensor:
        """`heads` rows for each request of a batch, starting again after the last."""
        return rows[torch.arange(batch * self._heads, device=rows.device) % len(rows)]

    def _batch_of(self, batch: int, left: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of `batch` requests whose rows lie as the cache delivers them."""
        left = self._first(batch, left).view(batch, self._heads, -1)
        return left, rows.expand(batch, *rows.shape).contiguous()
