"""What an engine has done so far, as plain numbers for the worker's metrics."""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Self

from kimi_runtime.spec.request import KvUsage


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started, and four gauges of now.

    The sums of `prompt_tokens` are over admitted requests: every token of an admitted prompt is
    counted once, under where its KV came from (`hbm`, `pool`, `hand_off`, `computed`).
    """

    prompt_tokens: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended: a `FinishReason`, `failed`, `late` or `left` (by the client)."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests never admitted, by error type."""
    key_mismatches: int = 0
    """Requests whose keys from the router are not the worker's own."""
    steps: int = 0
    step_tokens: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    pool_stored: int = 0
    """Blocks the pool took, those it held already included."""
    pool_dropped: int = 0
    """Blocks not offered to the pool, or refused by it."""
    states_stored: int = 0
    states_dropped: int = 0
    """States that were to be kept and are not: too many waited, or the pool had no room."""
    pool_failures: Counter[str] = field(default_factory=Counter)
    """Loads from the pool that did not end in a hit or a miss, by outcome."""
    hand_offs_offered: int = 0
    hand_offs_released: int = 0
    hand_offs_expired: int = 0
    hand_offs_taken: int = 0
    """Hand-offs of which every block that was lacking arrived."""
    hand_off_bytes: int = 0
    hand_off_early_bytes: int = 0
    """Of them, those read before their owner had the whole prompt."""
    hand_off_blocks: int = 0
    hand_off_transports: Counter[str] = field(default_factory=Counter)
    """Hand-offs of which anything was read, by transport; those there are start at 0."""
    hand_off_failures: Counter[str] = field(default_factory=Counter)
    release_failures: int = 0
    """Hand-offs whose owner could not be told; its lease ends them."""
    transfer_faults: Counter[str] = field(default_factory=Counter)
    """Faults that transfers met because its file asks for them (`WorkerSpec.chaos`), by kind."""
    running: int = 0
    waiting: int = 0
    open_hand_offs: int = 0
    """Tickets whose blocks are kept for their readers."""
    quarantined_blocks: int = 0
    """Blocks that a transfer which never ended might still write to; they are never used again."""

    def copy(self) -> Self:
        """A snapshot that later counting does not change."""
        return deepcopy(self)

    def count_prompt(self, usage: KvUsage) -> None:
        """A prompt's KV is complete."""
        self.prompt_tokens["hbm"] += usage.hbm_tokens
        self.prompt_tokens["pool"] += usage.pool_tokens
        self.prompt_tokens["hand_off"] += usage.hand_off_tokens
        self.prompt_tokens["computed"] += usage.computed_tokens
