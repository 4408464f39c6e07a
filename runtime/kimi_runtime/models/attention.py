"""Attention of latent queries over the paged cache, span by span in a fixed order.

A span's result is its softmax-weighted mean of rows and the logarithm of its sum of exponentials.
Spans are merged by those (Milakov and Gimelshein, arXiv 1805.02867) from the first to the last, so
that a query's result depends on its position and its history alone.
"""

from typing import Protocol

import torch
from torch import Tensor

from kimi_runtime.models.cache import KvCache
from kimi_runtime.models.fused_spans import FusedSpans
from kimi_runtime.models.spans import QueryGroup, SpanGeometry, SpanPart
from kimi_runtime.models.tiled_spans import TiledSpans


class SpanKernel(Protocol):
    """Computes one span of G histories for R queries of each."""

    @property
    def geometry(self) -> SpanGeometry:
        """What spans must be cut to."""

    def __call__(self, q: Tensor, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """q [G, R, row_dim], rows [G, n, row_dim], bias [G, 1, n] or [1, R, n], added to scores.

        Returns means of rows [G, R, row_dim] in q's dtype and log-sums [G, R, 1] in fp32.
        """


def open_kernel(
    *,
    heads: int,
    row_dim: int,
    scale: float,
    like: Tensor,
    promise: bool,
) -> SpanKernel:
    """The library's fused attention where its rows are independent of each other, or products.

    With `promise` that is measured here, as `models.rows` explains.
    """
    if like.device.type == "cpu":
        fused = FusedSpans.of(heads, row_dim, scale, like=like, promise=promise)
        if fused is not None:
            return fused
    return TiledSpans(
        heads=heads,
        row_dim=row_dim,
        scale=scale,
        like=like,
        promise=promise,
    )


class SpanAttention:
    """q [H, Q, row_dim] over the cached rows -> their weighted means, as wide as q.

    A mean's first elements are of the latent values; what the keys' rotated part gives is no value.
    """

    def __init__(self, kernel: SpanKernel) -> None:
        self._kernel = kernel
        self.geometry = kernel.geometry
        """What spans must be cut to."""

    def __call__(self, q: Tensor, cache: KvCache, layer: int, group: QueryGroup) -> Tensor:
        """q are the group's queries; the step's own rows are in the cache already."""
        out, best = self._span(q, cache, layer, group.spans[0].parts)
        if len(group.spans) == 1:
            return out
        out, total = out.float(), torch.ones_like(best)
        for span in group.spans[1:]:
            active = slice(span.first, None)
            mean, log_sum = self._span(q, cache, layer, span.parts)
            peak = torch.maximum(best[:, active], log_sum)
            shrink = best[:, active].sub_(peak).exp_()
            weight = log_sum.sub_(peak).exp_()
            total[:, active].mul_(shrink).add_(weight)
            out[:, active].mul_(shrink).add_(mean * weight)
            best[:, active] = peak
        return out.div_(total).to(q.dtype)

    def _span(
        self, q: Tensor, cache: KvCache, layer: int, parts: tuple[SpanPart, ...]
    ) -> tuple[Tensor, Tensor]:
        """Means [H, Q', row_dim] and log-sums [H, Q', 1] of the parts' queries."""
        if len(parts) == 1:
            return self._part(q, cache, layer, parts[0])
        means, log_sums = zip(*(self._part(q, cache, layer, part) for part in parts), strict=True)
        return torch.cat(means, dim=1), torch.cat(log_sums, dim=1)

    def _part(self, q: Tensor, cache: KvCache, layer: int, part: SpanPart) -> tuple[Tensor, Tensor]:
        q = q[:, part.queries]
        rows = cache.read(layer, part.slots, part.rows)
        if len(rows) == q.shape[1]:  # a history each
            mean, log_sum = self._kernel(q.transpose(0, 1), rows, part.bias)
            return mean.transpose(0, 1), log_sum.transpose(0, 1)
        # all heads' queries as one list: they read the same rows
        mean, log_sum = self._kernel(q.reshape(1, -1, q.shape[-1]), rows, part.bias)
        return mean.view(q.shape), log_sum.view(*q.shape[:2], 1)
