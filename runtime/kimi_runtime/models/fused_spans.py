"""Spans by the library's fused attention for CPUs: scores, softmax and sums without leaving cache.

    scores = scale q . k + bias;  mean = softmax(scores) v;  log-sum = log sum exp scores

Scores stay in fp32 from the product to the softmax, whose weights are rounded once, for the product
with the rows. The library promises nothing about its rows' independence: `FusedSpans.of` looks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_runtime.models.rows import cancelling
from kimi_runtime.models.spans import SpanGeometry

_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
"""One of those that the public function chooses from; other versions may lack it."""

_WIDTHS = tuple(range(32, 513, 32))
"""512 keys are what the library's function itself works on at once."""

_PROBE_QUERIES = 32
"""Different ones of a probe; more are these again."""
_PROBED_QUERIES = (3, 16, 48, 127, 192, 256)
_PROBED_BATCHES = (1, 2, 3, 8, 33)
_LOUD = 2.0**16
"""A scale at which the rounding of sums that cancel decides the softmax."""


class FusedSpans:
    """`models.attention.SpanKernel` of a CPU."""

    def __init__(self, scale: float, geometry: SpanGeometry) -> None:
        self._scale, self.geometry = scale, geometry

    @classmethod
    def of(
        cls, heads: int, row_dim: int, scale: float, *, like: Tensor, promise: bool
    ) -> "FusedSpans | None":
        """Spans in widths that, with `promise`, were seen to keep a query's bits among others.

        None where the full span is not one of them, or the library has no such function.
        """
        if not hasattr(torch.ops.aten, _KERNEL):
            return None
        widths = _WIDTHS
        if promise:
            probes = tuple(_probes(_PROBE_QUERIES * heads, row_dim, like))
            widths = tuple(
                width
                for width in _WIDTHS
                if all(_independent(probe, heads, width) for probe in probes)
            )
            if _WIDTHS[-1] not in widths:
                return None
        return cls(scale, SpanGeometry(widths))

    def __call__(self, q: Tensor, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """As the protocol says."""
        return _attend(q, rows, bias, self._scale)


def _attend(q: Tensor, rows: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Means [G, R, row_dim] and log-sums [G, R, 1]."""
    keys = rows[:, None]
    mean, log_sum = getattr(torch.ops.aten, _KERNEL)(
        q[:, None], keys, keys, attn_mask=None if bias is None else bias[:, None], scale=scale
    )
    return mean[:, 0], log_sum.view(*q.shape[:2], 1)


class _Probe(NamedTuple):
    """Queries [R, row_dim] over one history's rows [n, row_dim]."""

    q: Tensor
    rows: Tensor
    scale: float


def _probes(queries: int, row_dim: int, like: Tensor) -> Iterator[_Probe]:
    """One in which the scores are nothing but rounding, one in which the means are."""
    width = _WIDTHS[-1]
    q, rows = (side.to(like) for side in cancelling(queries, row_dim, width))
    yield _Probe(q, rows, _LOUD)
    values = cancelling(1, width, row_dim)[1].T.contiguous().to(like)
    yield _Probe(torch.zeros_like(q), values, 1.0)


def _independent(probe: _Probe, heads: int, width: int) -> bool:
    """Whether one query's bits, in a full span, come again among many, in `width` rows."""
    hidden = torch.zeros(1, 1, len(probe.rows)).to(probe.q)
    hidden[..., width:] = -torch.inf
    alone = [
        _attend(q[None], probe.rows[None], hidden, probe.scale)
        for q in probe.q.view(-1, heads, probe.q.shape[1])
    ]
    want = tuple(torch.cat(parts, dim=1) for parts in zip(*alone, strict=True))
    rows = probe.rows[None, :width].contiguous()

    def as_alone(groups: int, queries: int, bias: Tensor | None) -> bool:
        chosen = torch.arange(groups * queries * heads) % len(probe.q)
        q = probe.q[chosen].view(groups, -1, probe.q.shape[1])
        got = _attend(q, rows.expand(groups, -1, -1).contiguous(), bias, probe.scale)
        return all(
            torch.equal(one.flatten(0, 1), other[0, chosen])
            for one, other in zip(got, want, strict=True)
        )

    return all(
        as_alone(1, queries, bias)
        for queries in _PROBED_QUERIES
        for bias in (None, hidden[..., :width].expand(1, queries * heads, -1))
    ) and all(as_alone(groups, 1, None) for groups in _PROBED_BATCHES)
