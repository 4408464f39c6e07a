"""Faults on purpose, around any transport: what links, peers and software do on bad days.

Which batch gets which fault follows from a seed and the order of batches, so a run that failed can
be repeated. With no fault in the plan it is the inner transport.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from kimi_connect.blocks import flat
from kimi_runtime.errors import RegionGone, TransferCancelled, TransferLate
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.spec.transfer import TransferChaos
from kimi_runtime.transfer.base import LinkCounters, Session, Span, Transport
from kimi_runtime.transfer.memory import Memory


class Fault(StrEnum):
    """What can happen to a batch."""

    DELAY = "delay"
    """It starts later."""
    DROP = "drop"
    """Nothing moves; the deadline ends it."""
    DUPLICATE = "duplicate"
    """It moves twice."""
    CORRUPT = "corrupt"
    """It reports success, and one bit is wrong."""
    STALL = "stall"
    """A part moves, then nothing; the deadline ends it."""
    REHOME = "rehome"
    """The region is gone, as after a restart of its owner."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The chance of each fault per batch (they exclude each other; the sum is at most 1)."""

    seed: int = 0
    delay: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    stall: float = 0.0
    rehome: float = 0.0
    delay_s: float = 0.01

    def __post_init__(self) -> None:
        chances = [getattr(self, fault.value) for fault in Fault]
        if min(chances) < 0 or sum(chances) > 1 + 1e-9:
            raise ValueError(f"chances of {chances} are no chances of exclusive faults")

    @classmethod
    def of(cls, chaos: TransferChaos) -> Self:
        """The plan a process's file asks for."""
        chances = {fault.value: getattr(chaos, fault.value) for fault in Fault}
        return cls(seed=chaos.seed, delay_s=chaos.delay_time, **chances)

    def draw(self, dice: random.Random) -> Fault | None:
        """The fault of one batch."""
        left = dice.random()
        for fault in Fault:
            left -= getattr(self, fault.value)
            if left < 0:
                return fault
        return None


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault that was injected into a session's batch number `batch`."""

    fault: Fault
    peer: str
    batch: int


class ChaosTransport:
    """`inner` with the faults of `plan`; `injected` lists them."""

    def __init__(
        self, inner: Transport, plan: ChaosPlan, *, counts: Counter[str] | None = None
    ) -> None:
        """`counts`: where each is counted as well, by kind; None: nowhere."""
        self.injected: list[Injection] = []
        self._counts: Counter[str] = Counter() if counts is None else counts
        self._inner, self._plan = inner, plan
        self._dice = random.Random(plan.seed)
        # of their own: whether a read came in time must not change which faults come next
        self._bits = random.Random(f"{plan.seed}/bits")
        self._sessions: list[ChaosSession] = []

    @classmethod
    def asked(cls, inner: Transport, chaos: TransferChaos, counts: Counter[str]) -> Self:
        """What a process's file asks for; every kind is in `counts` from the start."""
        counts.update({fault.value: 0 for fault in Fault})
        return cls(inner, ChaosPlan.of(chaos), counts=counts)

    @property
    def name(self) -> str:
        """The inner transport's: regions are its own."""
        return self._inner.name

    def register(self, memory: Memory, *, writable: bool = False) -> RegionRef:
        """As the inner transport."""
        return self._inner.register(memory, writable=writable)

    def release(self, region: RegionRef) -> None:
        """As the inner transport."""
        self._inner.release(region)

    async def open(self, remote: RegionRef, *, deadline_s: float) -> Session:
        """A session whose batches meet faults."""
        inner = await self._inner.open(remote, deadline_s=deadline_s)
        session = ChaosSession(
            *(inner, remote, self._plan), dice=self._dice, bits=self._bits, note=self._note
        )
        self._sessions = [s for s in self._sessions if not s.closed] + [session]
        return session

    async def aclose(self) -> None:
        """Close the sessions, then the inner transport."""
        for session in self._sessions:
            await session.aclose()
        await self._inner.aclose()

    def _note(self, injection: Injection) -> None:
        self.injected.append(injection)
        self._counts[injection.fault.value] += 1


class ChaosSession:
    """A session with faults."""

    def __init__(
        self,
        inner: Session,
        remote: RegionRef,
        plan: ChaosPlan,
        *,
        dice: random.Random,
        bits: random.Random,
        note: Callable[[Injection], None],
    ) -> None:
        self._inner, self._remote, self._plan = inner, remote, plan
        self._dice, self._bits, self._note = dice, bits, note
        self._closing = asyncio.Event()
        self._batch = 0
        self._failed = 0
        """Batches that failed before they reached the inner session."""

    @property
    def counters(self) -> LinkCounters:
        """The inner session's, and the batches that never reached it."""
        c = self._inner.counters
        return replace(
            c, batches=c.batches + self._failed, failed_batches=c.failed_batches + self._failed
        )

    @property
    def closed(self) -> bool:
        """Whether the session was given up."""
        return self._closing.is_set()

    async def read(self, spans: Sequence[Span], into: memoryview, *, deadline_s: float) -> None:
        """A read that meets the next fault."""
        fault = self._next_fault()
        deadline_s = await self._before(fault, deadline_s)
        if fault is Fault.STALL:
            half = spans[: (len(spans) + 1) // 2]
            await self._inner.read(half, into, deadline_s=deadline_s)
            await self._never(deadline_s)
        await self._inner.read(spans, into, deadline_s=deadline_s)
        if fault is Fault.DUPLICATE:
            await self._inner.read(spans, into, deadline_s=deadline_s)
        if fault is Fault.CORRUPT:
            self._flip(flat(into), [(span.local, span.size) for span in spans])

    async def write(self, spans: Sequence[Span], data: memoryview, *, deadline_s: float) -> None:
        """A write that meets the next fault."""
        fault = self._next_fault()
        deadline_s = await self._before(fault, deadline_s)
        if fault is Fault.STALL:
            half = spans[: (len(spans) + 1) // 2]
            await self._inner.write(half, data, deadline_s=deadline_s)
            await self._never(deadline_s)
        if fault is Fault.CORRUPT:
            data = memoryview(bytearray(flat(data)))
            self._flip(data, [(span.local, span.size) for span in spans])
        await self._inner.write(spans, data, deadline_s=deadline_s)
        if fault is Fault.DUPLICATE:
            await self._inner.write(spans, data, deadline_s=deadline_s)

    async def aclose(self) -> None:
        """End what is delayed or stalled, then the inner session."""
        self._closing.set()
        await self._inner.aclose()

    def _next_fault(self) -> Fault | None:
        self._batch += 1
        fault = self._plan.draw(self._dice)
        if fault is not None:
            self._note(Injection(fault, self._remote.peer, self._batch))
        return fault

    async def _before(self, fault: Fault | None, deadline_s: float) -> float:
        """What happens before anything moves; the seconds that are left then."""
        if fault is Fault.REHOME:
            self._failed += 1
            raise RegionGone(
                f"region {self._remote.key} of {self._remote.peer} moved to another epoch; "
                "look its blocks up again"
            )
        if fault is Fault.DROP:
            self._failed += 1
            await self._never(deadline_s)
        if fault is Fault.DELAY:
            wait_s = min(self._plan.delay_s, deadline_s)
            await self._closed_within(wait_s)
            return deadline_s - wait_s
        return deadline_s

    async def _never(self, deadline_s: float) -> None:
        await self._closed_within(deadline_s)
        raise TransferLate(f"{self._remote.peer} did not answer within {deadline_s:.3f} s")

    async def _closed_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._closing.wait()
        except TimeoutError:
            return
        raise TransferCancelled(f"the session to {self._remote.peer} was closed")

    def _flip(self, view: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        if not ranges:
            return
        start, size = self._bits.choice(ranges)
        view[start + self._bits.randrange(size)] ^= 1 << self._bits.randrange(8)
