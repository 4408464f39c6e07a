"""What one request has produced and its caller has not fetched yet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kimi_runtime import clock
from kimi_runtime.engine.ending import Ending
from kimi_runtime.engine.plan import Sampled
from kimi_runtime.engine.request import Request
from kimi_runtime.engine.sampler import RequestSampler
from kimi_runtime.engine.states import KeptState
from kimi_runtime.errors import DeadlineExceeded, KimistackError
from kimi_runtime.spec.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Timing,
    TokenLogprob,
)


class Stopped(Exception):
    """The engine stops and will not go on with this request."""


@dataclass(slots=True, eq=False)
class Stream:
    """A slow caller gets fewer, larger chunks: what has piled up goes out as one."""

    asked: GenerateRequest
    request: Request
    ending: Ending
    deadline_s: float
    """Of `clock.now_s`."""
    sampler: RequestSampler | None = None
    """None where nothing is sampled, and until the grammar is compiled."""
    scheduled: bool = False
    failure: KimistackError | None = None
    finish: FinishReason | None = None
    prompt_counted: bool = False
    completed: bool = False
    """The prompt's KV is there, and that is all that was wanted."""
    told_early: bool = False
    """The caller has the ticket under which the KV is handed over while it is computed."""
    arrived_s: float = field(default_factory=clock.now_s)
    prepared_s: float | None = None
    began_s: float | None = None
    """When a step first computed a part of it."""
    computed_s: float | None = None
    """When its first id was drawn or, if none is wanted, its prompt's KV was there."""
    last_state: KeptState | None = None
    """The newest state behind a whole block of the answer, of a model that has states."""
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _sent: bool = False
    _stopped: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _waits: asyncio.Timeout | None = None

    def push(self, sampled: Sampled) -> FinishReason | None:
        """An id was drawn; returns why the generation ends with it, if it does."""
        assert self.sampler is not None
        self._computed()
        self.sampler.accept(sampled.id)
        self._ids.append(sampled.id)
        if sampled.logprob is not None:
            self._logprobs.append(sampled.logprob)
        self.finish = self.ending.after(sampled.id)
        self._changed.set()
        return self.finish

    def begin(self) -> None:
        """A step computes a part of it."""
        if self.began_s is None:
            self.began_s = clock.now_s()
            if self.ticket_due:
                self._changed.set()

    def complete(self) -> None:
        """The prompt's KV is there."""
        self._computed()
        self.completed = True
        self._changed.set()

    def fail(self, failure: KimistackError) -> None:
        """It can't go on; what was drawn before still goes out."""
        self.failure = failure
        self._changed.set()

    def stop(self) -> None:
        """The engine stops: whatever the caller waits for ends with `Stopped`."""
        self._stopped = True
        if self._waits is not None:
            self._waits.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """A wait that ends by the deadline (DeadlineExceeded) or when the engine stops."""
        if self._stopped:
            raise Stopped
        try:
            async with asyncio.timeout(self.deadline_s - clock.now_s()) as self._waits:
                yield
        except TimeoutError as exc:
            if self._stopped:
                raise Stopped from exc
            raise DeadlineExceeded(
                f"request {self.asked.request_id} was not done after {self.asked.deadline_ms} ms"
            ) from exc
        finally:
            self._waits = None

    @property
    def ticket_due(self) -> bool:
        """Whether the caller is to have a ticket now, before the prompt is computed."""
        wanted = self.asked.kv.offer and self.asked.kv.early and self.began_s is not None
        return wanted and not self.told_early and not self.completed

    async def changed(self) -> None:
        """Wait for ids, a failure, completion or the time for an early ticket; at once if there is
        something to take.
        """
        while not (self._ids or self.failure is not None or self.completed or self.ticket_due):
            self._changed.clear()
            async with self.waiting():
                await self._changed.wait()

    def take(self) -> GenerateChunk:
        """Everything since the last call."""
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        self._ids.clear()
        self._logprobs.clear()
        first = bool(ids) and not self._sent
        self._sent = self._sent or first
        told = first or self.finish is not None
        usage = self.request.usage if told else None
        timing = self.timing if told else None
        return GenerateChunk(
            ids=ids, logprobs=logprobs, finish=self.finish, usage=usage, timing=timing
        )

    @property
    def timing(self) -> Timing | None:
        """How long its prompt took; None before that is known."""
        prepared_s, began_s, computed_s = self.prepared_s, self.began_s, self.computed_s
        if prepared_s is None or began_s is None or computed_s is None:
            return None
        return Timing(
            prepared_s=max(prepared_s - self.arrived_s, 0.0),
            queued_s=max(began_s - prepared_s, 0.0),
            prefill_s=max(computed_s - began_s, 0.0),
        )

    def _computed(self) -> None:
        if self.computed_s is None:
            self.computed_s = clock.now_s()

    @property
    def has_ids(self) -> bool:
        """Whether something was drawn that the caller has not fetched."""
        return bool(self._ids)
