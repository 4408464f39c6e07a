"""A runner of exact integer arithmetic whose every id depends on every KV byte of its context.

A position's KV is a hash of its token and of all KV before it, *as read from the blocks*; a sampled
id is a hash of all KV of the context. So a wrong block, a stale one, a copy that never arrived or a
position never computed changes the ids. Block layout: layer groups one after another, each
`[block_tokens, u64]`.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kimi_runtime.engine.plan import Row, Sampled, StepPlan

_MASK = 2**64 - 1
_GROUPS = 2


class HashRunner:
    """`Runner` over `memory`, `vocab_size` ids.

    `before_step` is called in the runner's thread before each step; what it raises is the step's
    failure, and half of the step's KV was then written. `after_group` is called after each layer
    group that was told.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        *,
        vocab_size: int = 500,
        memory: memoryview | None = None,
        before_step: Callable[[StepPlan], None] = lambda plan: None,
        after_group: Callable[[int], None] = lambda group: None,
    ) -> None:
        self.after_group = after_group
        self.block_tokens, self.vocab_size, self.before_step = block_tokens, vocab_size, before_step
        self.layer_group_bytes = (8 * block_tokens,) * _GROUPS
        self.block_bytes = sum(self.layer_group_bytes)
        size = blocks * self.block_bytes
        self.memory = memory if memory is not None else memoryview(bytearray(size))
        self.memory[:size] = b"\xa5" * size  # unwritten KV is not zero by luck
        self._words = self.memory.cast("Q")
        self.computed_tokens = 0

    def block(self, number: int) -> memoryview:
        return self.memory[number * self.block_bytes : (number + 1) * self.block_bytes]

    def run(
        self,
        plan: StepPlan,
        samplers: Mapping[int, Any],
        *,
        group_done: Callable[[int], None] | None = None,
    ) -> Sequence[Sampled]:
        try:
            self.before_step(plan)
        except Exception:
            for row in plan.rows:
                self._write(row.blocks, row.start, 0xDEAD)
            raise
        drawn = [(row, self._compute(row)) for row in plan.rows]
        for group in range(_GROUPS) if group_done is not None else ():
            group_done(group)
            self.after_group(group)
        return [self._sample(row, state, samplers) for row, state in drawn if row.sample]

    def _sample(self, row: Row, state: int, samplers: Mapping[int, Any]) -> Sampled:
        drawn = (state >> 20) % self.vocab_size
        if row.request in samplers and not samplers[row.request].takes_argmax:
            logits = np.full(samplers[row.request].vocab_size, -10.0, np.float32)
            logits[drawn] = 10.0
            drawn, logprob = samplers[row.request].draw(logits)
            return Sampled(row.request, drawn, logprob)
        return Sampled(row.request, drawn)

    def _compute(self, row: Row) -> int:
        state = 0
        for position in range(row.start):
            state = self._fold(state, self._read(row.blocks, position))
        for position, token in enumerate(row.ids, start=row.start):
            value = _mix(state ^ (token * 0x9E3779B97F4A7C15 + position))
            self._write(row.blocks, position, value)
            state = self._fold(state, self._read(row.blocks, position))
        self.computed_tokens += len(row.ids)
        return state

    def _fold(self, state: int, values: Iterable[int]) -> int:
        for value in values:
            state = (state * 6364136223846793005 + value + 1) & _MASK
        return state

    def _read(self, blocks: Sequence[int], position: int) -> list[int]:
        return [self._words[index] for index in self._indices(blocks, position)]

    def _write(self, blocks: Sequence[int], position: int, value: int) -> None:
        for group, index in enumerate(self._indices(blocks, position)):
            self._words[index] = _mix(value + group)

    def _indices(self, blocks: Sequence[int], position: int) -> list[int]:
        block, inside = divmod(position, self.block_tokens)
        start = blocks[block] * self.block_tokens * _GROUPS
        return [start + group * self.block_tokens + inside for group in range(_GROUPS)]


class StatefulHashRunner(HashRunner):
    """Every id also depends on a state that only computing every token before brings about."""

    state_bytes = 10_000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.states: dict[int, bytearray] = {}

    def state(self, request: int) -> memoryview:
        return memoryview(self.states.setdefault(request, bytearray(self.state_bytes)))

    def drop(self, request: int) -> None:
        self.states.pop(request, None)

    def _compute(self, row: Row) -> int:
        kv, state = super()._compute(row), self.state(row.request)
        if row.start == 0:
            state[:] = bytes(self.state_bytes)
        for token in row.ids:
            seed = bytes(state) + token.to_bytes(4, "little")
            state[:] = hashlib.shake_128(seed).digest(self.state_bytes)
        return kv ^ int.from_bytes(state[:8], "little")


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
