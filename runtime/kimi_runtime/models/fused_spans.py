"""Spans by the library's fused attention for CPUs: scores, softmax and sums without leaving cache.

    scores = scale q . k + bias;  mean = softmax(scores) v;  log-sum = log sum exp scores

Scores stay in fp32 from the product to the softmax, whose weights are rounded once, for the product
with the rows. The library promises nothing about its rows' independence: `FusedSpans.of` looks.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.models.rows import cancelling
from kimi_runtime.models.spans import GROUP_TOKENS, SpanGeometry

_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
"""One of those that the public function chooses from; other versions may lack it."""

_WIDTHS = tuple(range(32, 513, 32))
"""512 keys are what the library's function itself works on at once."""

_PROBE_QUERIES = 32
"""Different ones of a probe; more are these again."""
_PROBED_QUERIES = (3, 16, 48, GROUP_TOKENS - 1, GROUP_TOKENS)
"""The library works on 32, 64 or 256 rows at once, by how many there are."""
_PROBED_BATCHES = (1, 2, 3, 9)
"""It computes one history after the other, shared out among the threads."""
_SCORED = 16
"""Elements of a row that decide its weight where the means are probed."""
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
            queries = _PROBE_QUERIES * heads
            loud = _loud_probe(queries, row_dim, like)
            widths = tuple(
                width
                for width in _WIDTHS
                if _independent(loud, heads, width)
                and _independent(_mean_probe(queries, row_dim, width, like), heads, width)
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


def _loud_probe(queries: int, row_dim: int, like: Tensor) -> _Probe:
    """Scores are nothing but rounding."""
    q, rows = cancelling(queries, row_dim, _WIDTHS[-1])
    return _Probe(q.to(like), rows.to(like), _LOUD)


def _mean_probe(queries: int, row_dim: int, width: int, like: Tensor) -> _Probe:
    """Means over the first `width` rows are nothing but rounding.

    Those lie in pairs: equal in the few elements that scores are of, so that they weigh alike, and
    opposite in the others. Weights all of one value would add up without any rounding.
    """
    values, keys = cancelling(row_dim - _SCORED, width, _SCORED)
    missing = _WIDTHS[-1] - width
    rows = functional.pad(torch.cat((keys, values)).T, (0, 0, 0, missing), value=1.0)
    q = functional.pad(cancelling(queries, 2 * _SCORED, 1)[0][:, :_SCORED], (0, row_dim - _SCORED))
    return _Probe(q.to(like), rows.contiguous().to(like), _SCORED**-0.5)


def _independent(probe: _Probe, heads: int, width: int) -> bool:
    """Whether one query's bits, in a full span, come again among many, in `width` rows."""
    hidden = torch.zeros(1, 1, len(probe.rows)).to(probe.q)
    hidden[..., width:] = -torch.inf
    q = probe.q.view(-1, heads, probe.q.shape[1])
    # one call, not one for each: threads that wait for busy processors cost more than the work;
    # that these are as alone is among the cases below
    want = _attend(q, probe.rows.expand(len(q), -1, -1), hidden, probe.scale)
    rows = probe.rows[None, :width].contiguous()

    def as_alone(groups: int, queries: int, bias: Tensor | None) -> bool:
        chosen = torch.arange(groups * queries * heads) % len(probe.q)
        q = probe.q[chosen].view(groups, -1, probe.q.shape[1])
        got = _attend(q, rows.expand(groups, -1, -1).contiguous(), bias, probe.scale)
        return all(
            torch.equal(one.flatten(0, 1), other.flatten(0, 1)[chosen])
            for one, other in zip(got, want, strict=True)
        )

    return all(
        as_alone(1, queries, bias)
        for queries in _PROBED_QUERIES
        for bias in (None, hidden[..., :width].expand(1, queries * heads, -1))
    ) and all(as_alone(groups, 1, None) for groups in _PROBED_BATCHES)
