"""An engine without a model: it answers from a script, with a pace, and with the faults asked for.

It stands in for a real engine wherever the ids matter and the mathematics does not: router tests,
simulations, and replays of recorded conversations. It keeps the real engine's promises: the
prefix cache is an LRU of real block keys with a feed, hand-offs are tickets with leases, full
queues refuse, deadlines and cancellation free everything.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from kimi_runtime import clock
from kimi_runtime.engine.adapters.scripted_kv import ScriptedKv
from kimi_runtime.engine.adapters.scripts import Reply, Script
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.intake import Intake
from kimi_runtime.errors import DeadlineExceeded, KimistackError, NotFound, Overloaded, RequestError
from kimi_runtime.spec.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    HandOffProgress,
    KvUsage,
    Timing,
    TokenLogprob,
)
from kimi_runtime.spec.worker import Capabilities, LoadReport, Role, WorkerInfo
from kimi_runtime.umbp.feed import FeedLog


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the stand-in is. The default takes no time at all."""

    prefill_tokens_per_s: float = math.inf
    output_ids_per_s: float = math.inf
    ids_per_chunk: int = 1


def scripted_info(
    name: str,
    role: Role = Role.BOTH,
    *,
    epoch: int = 1,
    block_tokens: int = 64,
    total_blocks: int = 4096,
    max_context_tokens: int = 131_072,
    vocabulary_digest: str = "",
) -> WorkerInfo:
    """What a scripted worker says it is. Workers built with the same arguments can be paired."""
    return WorkerInfo(
        name=name,
        role=role,
        engine="scripted",
        epoch=epoch,
        revision="scripted",
        model="scripted",
        model_digest="scripted",
        layout=f"scripted/{block_tokens}",
        vocabulary_digest=vocabulary_digest,
        block_tokens=block_tokens,
        block_bytes=block_tokens,
        max_context_tokens=max_context_tokens,
        total_blocks=total_blocks,
        capabilities=Capabilities(
            roles=tuple(Role),
            per_request_roles=True,
            fetch_source=False,
            layer_streaming=False,
            mid_decode_move=False,
            grammar=True,
            logprobs=True,
        ),
    )


@dataclass(slots=True)
class _Lane:
    """One request on its way through `ScriptedAdapter.generate`."""

    request: GenerateRequest
    reply: Reply
    usage: KvUsage = field(default_factory=KvUsage)
    sent: int = 0
    timing: Timing | None = None


class ScriptedAdapter:
    """An `Adapter` that answers from `script`.

    `pool_key` names its blocks as the deployment's other workers do. At most `max_running`
    requests run at once, at most `max_waiting` more wait; the next is refused. The script is
    trusted to obey a request's grammar.
    """

    def __init__(
        self,
        info: WorkerInfo,
        script: Script,
        *,
        pace: Pace | None = None,
        pool_key: bytes = b"scripted",
        max_running: int = 64,
        max_waiting: int = 256,
        lease_s: float = 30.0,
        release_url: str = "",
    ) -> None:
        self._info, self._script, self._pace = info, script, pace or Pace()
        self._max_waiting = max_waiting
        self._feed = FeedLog(
            info.name, epoch=info.epoch, tier="hbm", block_tokens=info.block_tokens
        )
        self._kv = ScriptedKv(
            info, self._feed, pool_key=pool_key, lease_s=lease_s, release_url=release_url
        )
        self._intake = Intake(info.name)
        self._slots = asyncio.Semaphore(max_running)
        self._stopped = asyncio.Event()
        self._queued_tokens = 0
        self._counters = EngineCounters()

    @property
    def info(self) -> WorkerInfo:
        """What this worker is; constant."""
        return self._info

    @property
    def feed(self) -> FeedLog:
        """The blocks it claims to hold."""
        return self._feed

    def counters(self) -> EngineCounters:
        """A snapshot of what it has done."""
        return self._counters.copy()

    def load(self) -> LoadReport:
        """What it has to do right now; every call raises `seq`."""
        return LoadReport(
            epoch=self._info.epoch,
            seq=self._intake.next_seq(),
            waiting=self._counters.waiting,
            running=self._counters.running,
            queued_tokens=self._queued_tokens,
            free_blocks=self._info.total_blocks,
            total_blocks=self._info.total_blocks,
            steps=self._counters.steps,
            last_request=dict(self._intake.last_request),
            in_flight=dict(self._intake.in_flight),
            draining=self._intake.draining,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Answer from the script; see `Adapter.generate`."""
        deadline_s = clock.now_s() + request.deadline_ms / 1000
        ended = "left"
        with self._intake.entered(request):
            self._admit(request)
            chunks = self._run(_Lane(request, self._script(request)))
            try:
                while True:
                    chunk = await self._next(chunks, request, deadline_s)
                    if chunk is None:
                        return
                    if chunk.finish is not None:
                        ended = chunk.finish
                    yield chunk
            except DeadlineExceeded:
                ended = "late"
                raise
            except KimistackError:
                ended = "failed"
                raise
            finally:
                await chunks.aclose()
                self._counters.finished[ended] += 1

    async def progress(self, ticket: str, after: int) -> AsyncGenerator[HandOffProgress, None]:
        """It tells no hand-off early."""
        raise NotFound(f"worker {self._info.name} has no hand-off {ticket} to be followed")
        yield HandOffProgress(epoch=self._info.epoch, first=after)

    async def release(self, ticket: str) -> bool:
        """End a hand-off; False if the ticket is unknown, ended or past its lease."""
        released = self._kv.release(ticket, now_s=clock.now_s())
        self._counters.hand_offs_released += released
        return released

    async def drain(self, *, within_s: float) -> None:
        """Refuse new requests, let the running ones finish, then cancel them."""
        self._intake.draining = True
        if not await self._intake.emptied(within_s=within_s):
            self._stopped.set()

    async def aclose(self) -> None:
        """Cancel everything and forget every block."""
        self._intake.draining = True
        self._stopped.set()
        self._kv.clear()

    def _admit(self, request: GenerateRequest) -> None:
        size, limit = len(request.ids), self._info.max_context_tokens
        if size + (request.sampling.max_tokens > 0 and not request.kv.offer) > limit:
            self._counters.refused["invalid_request_error"] += 1
            raise RequestError(
                f"the prompt has {size} tokens, but the context holds {limit} with what is "
                "generated; shorten the prompt",
                param="ids",
                code="context_length_exceeded",
            )
        if self._slots.locked() and self._counters.waiting >= self._max_waiting:
            self._counters.refused["rate_limit_error"] += 1
            raise Overloaded(
                f"worker {self._info.name} has {self._counters.running} requests running and "
                f"{self._counters.waiting} waiting, as many as it takes; try again later",
                retry_after_s=1.0,
            )

    async def _next(
        self,
        chunks: AsyncGenerator[GenerateChunk, None],
        request: GenerateRequest,
        deadline_s: float,
    ) -> GenerateChunk | None:
        """The next chunk; None at the end. DeadlineExceeded at the deadline."""
        try:
            async with asyncio.timeout(deadline_s - clock.now_s()):
                return await anext(chunks, None)
        except TimeoutError as exc:
            raise DeadlineExceeded(
                f"request {request.request_id} was not done after {request.deadline_ms} ms"
            ) from exc

    async def _run(self, lane: _Lane) -> AsyncGenerator[GenerateChunk, None]:
        prompt, arrived_s = len(lane.request.ids), clock.now_s()
        self._counters.waiting += 1
        self._queued_tokens += prompt
        try:
            await self._slots.acquire()
        finally:
            self._counters.waiting -= 1
            self._queued_tokens -= prompt
        self._counters.running += 1
        try:
            began_s = clock.now_s()
            await self._prefill(lane)
            lane.timing = Timing(
                prepared_s=0.0,
                queued_s=began_s - arrived_s,
                prefill_s=clock.now_s() - began_s,
            )
            if lane.request.kv.offer:
                await self._fault(lane.reply, 0)
                yield self._hand_off(lane)
            else:
                async for chunk in self._decode(lane):
                    yield chunk
        finally:
            self._counters.running -= 1
            self._slots.release()

    async def _prefill(self, lane: _Lane) -> None:
        lane.usage = self._kv.usage(lane.request)
        self._counters.count_prompt(lane.usage)
        self._counters.hand_off_bytes += lane.usage.hand_off_bytes
        self._counters.hand_offs_taken += lane.usage.hand_off_tokens > 0
        await self._work(lane.usage.computed_tokens / self._pace.prefill_tokens_per_s)
        self._kv.keep(lane.request)

    def _hand_off(self, lane: _Lane) -> GenerateChunk:
        self._counters.hand_offs_offered += 1
        return GenerateChunk(
            finish=FinishReason.HANDED_OFF,
            usage=lane.usage,
            timing=lane.timing,
            hand_off=self._kv.offer(lane.request, now_s=clock.now_s()),
        )

    async def _decode(self, lane: _Lane) -> AsyncGenerator[GenerateChunk, None]:
        sampling = lane.request.sampling
        room = self._info.max_context_tokens - len(lane.request.ids)
        most = min(sampling.max_tokens, room)
        chunk: list[int] = []
        finish = FinishReason.LENGTH
        ids = iter(lane.reply.ids)
        while (count := lane.sent + len(chunk)) < most:
            if chunk and lane.reply.faulty_at(count):
                yield self._chunk(lane, chunk)
                chunk = []
            await self._fault(lane.reply, count)
            if count == lane.reply.cut_after:
                return
            number = None if self._stopped.is_set() else next(ids, None)
            if number is None:
                stopped = self._stopped.is_set()
                finish = FinishReason.CANCELLED if stopped else lane.reply.finish
                break
            chunk.append(number)
            if number in sampling.stop_ids and count >= sampling.min_tokens:
                finish = FinishReason.STOP
                break
            if len(chunk) == self._pace.ids_per_chunk:
                await self._work(len(chunk) / self._pace.output_ids_per_s)
                yield self._chunk(lane, chunk)
                chunk = []
        yield self._chunk(lane, chunk, finish)

    async def _fault(self, reply: Reply, count: int) -> None:
        """What the script wants to go wrong once `count` ids were sent."""
        if reply.error is not None and count >= reply.fail_after:
            raise reply.error
        if count == reply.stall_after:
            await self._stopped.wait()

    def _chunk(
        self, lane: _Lane, ids: Sequence[int], finish: FinishReason | None = None
    ) -> GenerateChunk:
        asked = lane.request.sampling.logprobs
        logprobs = tuple(
            TokenLogprob(id=number, logprob=0.0, top=((number, 0.0),) if asked else ())
            for number in (ids if asked is not None else ())
        )
        usage = lane.usage if lane.sent == 0 or finish is not None else None
        lane.sent += len(ids)
        self._counters.steps += 1
        self._counters.output_tokens += len(ids)
        return GenerateChunk(
            ids=tuple(ids),
            logprobs=logprobs,
            finish=finish,
            usage=usage,
            timing=None if usage is None else lane.timing,
        )

    async def _work(self, seconds: float) -> None:
        """Take the time; less if the adapter stops. Others run even if it takes none."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return
