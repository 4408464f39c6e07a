"""A run of decode steps at once, when nothing but decoding happens. Pure.

While the same sequences decode and nobody waits, a step changes nothing but counters, except where
a sequence begins a block (it takes one) or fills one (it is sealed under its key). A `Window` does
only that, in the order in which the scheduler's own steps would: by rank, blocks taken when a step
is planned, sealed when it is committed. Requests' own counters are brought up when a block is
filled and when the window is over. What came of it is equal to stepping; a property test compares
them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.request import Request
from kimi_runtime.engine.scheduler import SealedBlock


class Pace(Protocol):
    """How long decode steps take."""

    @property
    def kv_token_s(self) -> float:
        """Of each KV token in a step."""

    def step_s(self, rows: int, kv_tokens: float, new_tokens: int = 0, pairs: float = 0.0) -> float:
        """Seconds of one step."""


@dataclass(slots=True)
class Window:
    """`steps` decode steps of `requests` (in the scheduler's order) from `start_s` on.

    `blocks` must be able to give what they take: `taken` says how many that is.
    """

    requests: Sequence[Request]
    blocks: KvBlocks
    start_s: float
    first_step_s: float
    growth_s: float
    """By how much every step is longer than the one before."""
    steps: int
    size: int
    """Tokens of a block."""
    done: int = 0
    _events: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """What there is to do, latest first: step, 0 to begin blocks or 1 to seal them, for whom (their
    places in `requests`)."""
    _base: list[int] = field(init=False)
    """Tokens that each request had computed when the window began."""
    _held: int = field(init=False)

    def __post_init__(self) -> None:
        """What the steps count from."""
        self._base = [request.computed for request in self.requests]
        self._held = sum(self._base)

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        blocks: KvBlocks,
        pace: Pace,
        *,
        slowness: float,
        start_s: float,
        steps: int,
    ) -> "Window":
        """A window that begins now; nothing of it has been done."""
        rows = len(requests)
        held = sum(request.computed for request in requests)
        made = cls(
            requests,
            blocks,
            start_s,
            slowness * pace.step_s(rows, held),
            slowness * pace.kv_token_s * rows,
            steps,
            size := requests[0].chain.block_tokens,
        )
        by_phase: dict[int, list[int]] = {}
        for number, request in enumerate(requests):
            by_phase.setdefault(request.computed % size, []).append(number)
        for phase, some in by_phase.items():
            made._events += [(step, 0, some) for step in range(-phase % size, steps, size)]
            made._events += [(step, 1, some) for step in range(size - 1 - phase, steps, size)]
        made._events.sort(key=_order, reverse=True)
        return made

    @property
    def held(self) -> int:
        """KV tokens that all of them hold by now."""
        return self._held + self.done * len(self.requests)

    @property
    def taken(self) -> int:
        """Blocks that the whole window takes."""
        size = self.size
        return sum(
            -(-(request.computed + self.steps) // size) - len(request.blocks)
            for request in self.requests
        )

    def ends_s(self, steps: int) -> float:
        """When so many steps will be over."""
        return self.start_s + steps * self.first_step_s + self.growth_s * steps * (steps - 1) / 2

    def step_s(self, step: int) -> float:
        """How long step `step` (from 0) takes."""
        return self.first_step_s + step * self.growth_s

    def next_seal(self) -> int:
        """Steps until a block is filled, counted from the window's start; `steps` if none is."""
        return next((step + 1 for step, kind, _ in reversed(self._events) if kind), self.steps)

    def over_by(self, now_s: float) -> int:
        """How many steps are over at `now_s`."""
        passed_s = now_s - self.start_s
        if passed_s <= 0:
            return 0
        half = self.growth_s / 2
        if half > 0:
            linear = self.first_step_s - half
            guess = (math.sqrt(linear * linear + 4 * half * passed_s) - linear) / (2 * half)
        else:
            guess = passed_s / self.first_step_s
        steps = min(max(int(guess), 0), self.steps)
        ends_s = self.ends_s
        while steps < self.steps and ends_s(steps + 1) <= now_s:
            steps += 1
        while steps and ends_s(steps) > now_s:
            steps -= 1
        return steps

    def advance(self, done: int) -> list[SealedBlock]:
        """Make it so that `done` steps are over and the next one is under way; what they sealed.

        Counters of the requests follow with `settle`: until then they all are as some steps ago.
        """
        sealed: list[SealedBlock] = []
        events, started = self._events, min(done, self.steps - 1)
        while events:
            step, kind, some = events[-1]
            if step > started or (kind and step == started):
                break
            events.pop()
            if kind:
                self._seal(step + 1, some, sealed)
            else:
                self._begin(some)
        while events and events[-1][0] < done:  # the last step of all has no next one
            step, _, some = events.pop()
            self._seal(step + 1, some, sealed)
        self.done = done
        return sealed

    def settle(self) -> None:
        """Bring the requests' counters up to the steps that are over."""
        self._write(self.done, range(len(self.requests)))

    def _begin(self, some: Sequence[int]) -> None:
        for number in some:
            taken = self.blocks.allocate(1)
            assert taken is not None, "a window was begun that there is no room for"
            self.requests[number].blocks.extend(taken)

    def _seal(self, done: int, some: Sequence[int], sealed: list[SealedBlock]) -> None:
        self._write(done, some)
        for number in some:
            request = self.requests[number]
            index = request.computed // self.size - 1
            own, key = request.blocks[index], request.chain.keys[index]
            request.blocks[index] = self.blocks.seal(own, key)
            if request.blocks[index] == own:
                sealed.append(SealedBlock(key, own, request.tenant))

    def _write(self, done: int, some: Iterable[int]) -> None:
        """Bring some requests' counters up to so many steps."""
        for number in some:
            request = self.requests[number]
            more = self._base[number] + done - request.computed
            if more:
                request.computed += more
                request.tokens.extend(range(more))
                request.chain.extend(request.tokens)


def _order(event: tuple[int, int, list[int]]) -> tuple[int, int]:
    return event[:2]
