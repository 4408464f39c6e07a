"""Which history each query of a step reads, cut into spans that depend on its position alone.

A query at position p attends to positions 0 .. p in spans of a fixed number of tokens, aligned to
absolute positions. How many spans there are and what is in them follows from p, never from what
else is in the step (split-KV by batch size is how a row comes to differ from itself,
tokenspeed#904). Pure index arithmetic, done once per step and used by every layer.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimi_runtime.models.cache import KvCache

_CALL_COST_TOKENS = 128
"""What one more call costs, in tokens of one history: about 30 us against 0.25 us."""

# On a CPU what one operation works on should not outgrow the caches before the next one reads it; a
# GPU has launches to save instead.
_PART_BYTES = 2**24
"""Copied of many histories at once. With less the library's cost per call shows."""
GROUP_TOKENS = 128
"""Of one prompt at once. All of them read what the last one sees: more at once compute more that
is hidden, fewer make more calls than that saves."""

Ints = NDArray[np.int64]


class TokenRun(Protocol):
    """Consecutive tokens of one request; `engine.plan.Row` is one."""

    @property
    def start(self) -> int:
        """Position of the first token."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens, at least one."""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block `blocks[p // block_tokens]` has position p."""

    @property
    def sample(self) -> bool:
        """Logits are wanted after the last token."""


@dataclass(frozen=True, slots=True)
class SpanGeometry:
    """The numbers of tokens a span may be read in, rising; the last is the full span."""

    widths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a full span."""
        return self.widths[-1]

    def width_for(self, tokens: int) -> int:
        """The narrowest width that holds `tokens`, at most a full span."""
        return next((width for width in self.widths if width >= tokens), self.tokens)


@dataclass(frozen=True, slots=True)
class SpanPart:
    """The same span of the histories of G requests, in one width."""

    queries: slice
    """Of their group: one for each history, or all of the only history."""
    rows: int
    """Tokens read of each history: one of the geometry's widths."""
    slots: Tensor
    """[G * rows] int64: where the rows lie, in layer 0. What would lie past a history's end is its
    last row once more, in weight zero: zero times what an earlier owner left there is only zero
    while that is finite."""
    bias: Tensor | None
    """Added to scores: minus infinity where a query may not see, else 0; None if it sees all.
    In the cache's dtype, [G, 1, rows] for a history each; for one, [1, heads * queries, rows]."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span of positions, for the queries `first ..` of their group."""

    first: int
    parts: tuple[SpanPart, ...]
    """They cover those queries in order."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Queries with one span list: tokens of one request, or one token each of many."""

    tokens: slice
    """Of the step's tokens."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step as tensors. `ids` and `positions` are padded to a row count of the ladder.

    Tokens lie by group, in the groups' order, whatever the order of the runs was.
    """

    tokens: int
    ids: Tensor
    positions: Tensor
    slots: Tensor
    """[tokens] int64: where each token's row goes, in layer 0."""
    groups: tuple[QueryGroup, ...]
    sampled: Tensor
    """[S] int64: tokens whose logits are wanted, in order of the runs."""


class StepBuilder:
    """Turns token runs into tensors on the model's device."""

    def __init__(
        self, cache: KvCache, geometry: SpanGeometry, heads: int, device: torch.device
    ) -> None:
        self._geometry, self._cache, self._device = geometry, cache, device
        self._heads = heads
        self._block_tokens = cache.block_tokens
        row_bytes = cache.row_dim * cache.dtype.itemsize
        on_cpu = device.type == "cpu"
        self._part_tokens = _PART_BYTES // row_bytes if on_cpu else sys.maxsize
        self._group_tokens = GROUP_TOKENS if on_cpu else sys.maxsize

    def build(self, runs: Sequence[TokenRun], padded_tokens: int) -> StepInputs:
        """`padded_tokens` is at least the number of tokens in `runs`."""
        # single tokens first, by rising position: those that have a span are then a suffix
        order = sorted(range(len(runs)), key=lambda i: _by_group(runs[i]))
        ordered = [runs[i] for i in order]
        lengths = np.array([len(run.ids) for run in ordered], np.int64)
        starts = np.array([run.start for run in ordered], np.int64)
        ends = np.cumsum(lengths)
        tokens = int(ends[-1])
        ids = np.zeros(padded_tokens, np.int64)
        ids[:tokens] = np.fromiter((id_ for run in ordered for id_ in run.ids), np.int64, tokens)
        positions = np.zeros(padded_tokens, np.int64)
        within = np.arange(tokens) - np.repeat(ends - lengths, lengths)
        positions[:tokens] = np.repeat(starts, lengths) + within
        last = np.empty(len(runs), np.int64)
        last[order] = ends - 1
        tables = [np.array(run.blocks, np.int64) for run in ordered]
        return StepInputs(
            tokens=tokens,
            ids=self._tensor(ids),
            positions=self._tensor(positions),
            slots=self._slots(tables, lengths, positions[:tokens]),
            groups=tuple(self._groups(tables, starts, lengths)),
            sampled=self._tensor(last[[run.sample for run in runs]]),
        )

    def _tensor(self, values: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _slots(self, tables: list[Ints], lengths: Ints, positions: Ints) -> Tensor:
        numbers, offsets = np.divmod(positions, self._block_tokens)
        first = np.cumsum([table.size for table in tables]) - [table.size for table in tables]
        blocks = np.concatenate(tables)[np.repeat(first, lengths) + numbers]
        return self._cache.first_slots(self._tensor(blocks), self._tensor(offsets))

    def _groups(self, tables: list[Ints], starts: Ints, lengths: Ints) -> Iterator[QueryGroup]:
        single = int((lengths == 1).sum())
        if single:
            yield QueryGroup(
                slice(0, single), self._spans(tables[:single], starts[:single], starts[:single])
            )
        at = single
        for table, start, length in zip(
            tables[single:], starts[single:].tolist(), lengths[single:].tolist(), strict=True
        ):
            for first in range(start, start + length, self._group_tokens):
                positions = np.arange(first, min(first + self._group_tokens, start + length))
                tokens = slice(at, at + len(positions))
                yield QueryGroup(tokens, self._spans([table], positions[-1:], positions))
                at = tokens.stop

    def _spans(self, tables: list[Ints], lasts: Ints, positions: Ints) -> tuple[Span, ...]:
        """Spans for queries at rising `positions`: one history each, or one for all of them."""
        spans = []
        for start in range(0, int(positions[-1]) + 1, self._geometry.tokens):
            first = int(np.searchsorted(positions, start))
            if len(tables) == len(positions):
                parts = tuple(self._parts(start, first, tables, lasts))
            else:
                queries = slice(first, len(positions))
                parts = (self._part(start, queries, tables, lasts, positions[first:]),)
            spans.append(Span(first, parts))
        return tuple(spans)

    def _parts(self, start: int, first: int, tables: list[Ints], lasts: Ints) -> Iterator[SpanPart]:
        """Queries `first ..` with a history each, by the width of what they have of the span."""
        widths = [self._geometry.width_for(last + 1 - start) for last in lasts[first:].tolist()]
        begin = 0
        while begin < len(widths):
            end, wasted = begin + 1, 0
            while end < len(widths) and (end + 1 - begin) * widths[end] <= self._part_tokens:
                wasted += (widths[end] - widths[end - 1]) * (end - begin)
                if wasted > _CALL_COST_TOKENS:
                    break
                end += 1
            own = slice(first + begin, first + end)
            yield self._part(start, own, tables[own], lasts[own], lasts[own])
            begin = end

    def _part(
        self, start: int, queries: slice, tables: list[Ints], lasts: Ints, positions: Ints
    ) -> SpanPart:
        """Span from `start` of histories that end with `lasts`, for queries at `positions`."""
        rows = self._geometry.width_for(int(lasts[-1]) + 1 - start)
        columns = np.arange(start, start + rows)
        bias = None
        if positions[0] + 1 < start + rows:  # both rise: the first sees least
            bias = self._bias(columns > positions[:, None], alone=len(tables) < len(positions))
        numbers, offsets = np.divmod(np.minimum(columns, lasts[:, None]), self._block_tokens)
        blocks = np.stack([table[row] for table, row in zip(tables, numbers, strict=True)])
        return SpanPart(
            queries=queries,
            rows=rows,
            slots=self._cache.first_slots(
                self._tensor(blocks.reshape(-1)), self._tensor(offsets.reshape(-1))
            ),
            bias=bias,
        )

    def _bias(self, unseen: NDArray[np.bool_], *, alone: bool) -> Tensor:
        """`unseen` [queries, rows], of a history each or of one `alone`."""
        hidden = self._tensor(unseen)
        bias = torch.zeros(hidden.shape, dtype=self._cache.dtype, device=self._device)
        bias.masked_fill_(hidden, -torch.inf)
        return bias.repeat(self._heads, 1)[None] if alone else bias[:, None]


def _by_group(run: TokenRun) -> tuple[bool, int]:
    many = len(run.ids) > 1
    return (many, 0 if many else run.start)
