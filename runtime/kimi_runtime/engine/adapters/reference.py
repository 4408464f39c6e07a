"""The `kimistack` engine behind a worker: admission, fetching, streaming, draining."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from kimi_runtime import clock
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.ending import Ending
from kimi_runtime.engine.intake import Intake
from kimi_runtime.engine.loop import Parts, StepLoop
from kimi_runtime.engine.request import KeyChain, Request, rank_of
from kimi_runtime.engine.sampler import GrammarMask, RequestSampler
from kimi_runtime.engine.stream import Stopped, Stream
from kimi_runtime.errors import DeadlineExceeded, KimistackError, NotFound, RequestError
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.spec.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Grammar,
    HandOff,
    HandOffProgress,
)
from kimi_runtime.spec.worker import LoadReport, WorkerInfo
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.keys import hex_keys, root_key

BACKGROUND_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class Model:
    """What the loop must know of the model it runs."""

    vocabulary: Vocabulary
    vocab_size: int
    eos_ids: tuple[int, ...]
    pool_key: bytes
    grammar: Callable[[Grammar, int], GrammarMask]
    """Compile a grammar for an output of so many ids at most; RequestError if it is none. Called
    in a thread."""


class ReferenceAdapter:
    """An `Adapter` over our own parts. `run` must be running for `generate` to advance."""

    def __init__(self, info: WorkerInfo, model: Model, feed: FeedLog, parts: Parts) -> None:
        self._info, self._model, self._feed, self._parts = info, model, feed, parts
        self._scheduler, self._counters = parts.scheduler, parts.counters
        self._loop = StepLoop(parts)
        self._intake = Intake(info.name)
        self._fetching = 0
        self._numbers = 0
        self._request_s = 1.0
        """What a request takes, a moving average."""

    @property
    def info(self) -> WorkerInfo:
        """What this worker is; constant."""
        return self._info

    @property
    def feed(self) -> FeedLog:
        """The engine's own KV blocks, as they come and go."""
        return self._feed

    def counters(self) -> EngineCounters:
        """A snapshot of what it has done."""
        self._counters.preemptions = self._scheduler.preemptions
        self._counters.running = self._scheduler.running
        self._counters.waiting = self._scheduler.waiting + self._fetching
        if self._parts.hand_offs is not None:
            self._counters.open_hand_offs = self._parts.hand_offs.tickets
        return self._counters.copy()

    def load(self) -> LoadReport:
        """What it has to do right now; every call raises `seq`."""
        unclaimed = self._parts.landing.unclaimed
        reading = (one.request.to_compute for one in self._loop.streams if not one.scheduled)
        return LoadReport(
            epoch=self._info.epoch,
            seq=self._intake.next_seq(),
            waiting=self._scheduler.waiting + self._fetching,
            running=self._scheduler.running,
            queued_tokens=self._scheduler.queued_tokens + sum(reading),
            free_blocks=max(unclaimed, 0),
            short_blocks=max(-unclaimed, 0),
            total_blocks=self._scheduler.blocks.total,
            steps=self._counters.steps,
            last_request=dict(self._intake.last_request),
            in_flight=dict(self._intake.in_flight),
            draining=self._intake.draining,
        )

    async def generate(self, asked: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Run one request; see `Adapter.generate`."""
        arrived_s = clock.now_s()
        with self._intake.entered(asked):
            stream = self._admit(asked, arrived_s)
            ended = "left"
            try:
                await self._prepare(stream)
                while stream.finish is None or stream.has_ids:
                    await stream.changed()
                    chunk = await self._next_chunk(stream)
                    if chunk is not None:
                        ended = chunk.finish or ended
                        yield chunk
            except Stopped:
                self._loop.leave(stream)
                ended = stream.finish = FinishReason.CANCELLED
                yield stream.take()
            except DeadlineExceeded:
                ended = "late"
                raise
            except KimistackError:
                ended = "failed"
                raise
            finally:
                if self._parts.hand_offs is not None:
                    self._parts.hand_offs.abandon(stream.request, failed=ended == "failed")
                self._loop.leave(stream)
                self._counters.finished[ended] += 1
                self._request_s += 0.2 * (clock.now_s() - arrived_s - self._request_s)

    async def release(self, ticket: str) -> bool:
        """End a hand-off; False if the ticket is unknown or already ended.

        Nobody wants a prompt any more whose hand-off is released while it is computed.
        """
        if self._parts.hand_offs is None:
            return False
        unwanted = self._parts.hand_offs.computing(ticket)
        for stream in self._loop.streams if unwanted is not None else ():
            if stream.request is unwanted:
                stream.stop()
        return self._parts.hand_offs.release(ticket)

    async def progress(self, ticket: str, after: int) -> AsyncGenerator[HandOffProgress, None]:
        """What of a hand-off can be read; see `Adapter.progress`."""
        if self._parts.hand_offs is None:
            raise NotFound(f"worker {self._info.name} hands nothing off")
        async with aclosing(self._parts.hand_offs.progress(ticket, after)) as lines:
            async for line in lines:
                yield line

    async def drain(self, *, within_s: float) -> None:
        """Refuse new requests, let the running ones finish within the time, then cancel them.

        What of the time is left goes into handing computed blocks to the pool.
        """
        until_s = clock.now_s() + within_s
        self._intake.draining = True
        if not await self._intake.emptied(within_s=within_s):
            for stream in self._loop.streams:
                stream.stop()
                if stream.scheduled:  # else bytes may be arriving in its blocks
                    self._loop.leave(stream)
        if self._parts.writer is not None:
            await self._parts.writer.flushed(within_s=max(0.0, until_s - clock.now_s()))

    async def run(self) -> None:
        """Work until `aclose`. Raises what is our own bug; a failed step is not."""
        try:
            await self._loop.run()
        finally:
            self._scheduler.blocks.forget_all()

    async def aclose(self) -> None:
        """Cancel every request and end `run`."""
        await self.drain(within_s=0.0)
        await self._loop.aclose()

    def check_integrity(self) -> None:
        """AssertionError unless every block is accounted for by exactly who holds it."""
        self._loop.check_integrity()

    def _admit(self, asked: GenerateRequest, arrived_s: float) -> Stream:
        """A stream for the request, or its refusal."""
        try:
            self._check(asked)
        except KimistackError as exc:
            self._counters.refused[exc.type] += 1
            raise
        chain = KeyChain(
            self._model.pool_key,
            root_key(
                self._model.pool_key,
                model_digest=self._info.model_digest,
                layout=self._info.layout,
                adapter=asked.adapter,
                tenant=asked.tenant,
            ),
            self._info.block_tokens,
        )
        self._numbers += 1
        request = Request(
            number=self._numbers,
            tokens=self._to_compute(asked),
            chain=chain,
            rank=rank_of(asked.priority, arrived_s, background_delay_s=BACKGROUND_DELAY_S),
            priority=asked.priority,
            tenant=asked.tenant,
            samples=_samples(asked),
        )
        told, own = asked.kv.keys[: len(chain.keys)], chain.keys[: len(asked.kv.keys)]
        if told != hex_keys(own):
            self._counters.key_mismatches += 1
        room = self._info.max_context_tokens - len(asked.ids)
        sampling = asked.sampling
        if asked.grammar is not None:  # nothing may follow the end that a grammar leads to
            sampling = sampling.model_copy(update={"ignore_eos": False})
        ending = Ending(
            sampling,
            eos_ids=self._model.eos_ids,
            most_ids=min(room, sampling.max_tokens),
            vocabulary=self._model.vocabulary,
        )
        stream = Stream(asked, request, ending, arrived_s + asked.deadline_ms / 1000)
        self._loop.enter(stream)
        return stream

    def _to_compute(self, asked: GenerateRequest) -> list[int]:
        """The ids whose KV is wanted. Who takes the KV over computes the last one for its logits,
        and needs the state before it, which a model that has computed it has no more.
        """
        without_last = asked.kv.offer and self._parts.states is not None and len(asked.ids) > 1
        return list(asked.ids[:-1] if without_last else asked.ids)

    def _check(self, asked: GenerateRequest) -> None:
        if max(asked.ids) >= self._model.vocab_size:
            raise RequestError(
                f"id {max(asked.ids)} is none of the model's {self._model.vocab_size} ids; "
                "tokenise with the model's own vocabulary",
                param="ids",
            )
        if asked.adapter:
            raise RequestError(
                f"worker {self._info.name} has no adapter {asked.adapter!r}; leave adapter empty",
                param="adapter",
            )
        if asked.kv.offer and self._parts.hand_offs is None:
            raise RequestError(
                f"worker {self._info.name} has no transport to hand KV off; "
                "set transfer in its file",
                param="kv.offer",
            )
        waiting = self._scheduler.waiting + self._fetching
        retry_s = self._request_s * (waiting + 1) / self._scheduler.limits.max_running
        self._scheduler.check(
            len(asked.ids),
            asked.sampling.max_tokens if _samples(asked) else 0,
            fetching=self._fetching,
            retry_after_s=min(max(retry_s, 0.1), 60.0),
        )

    async def _prepare(self, stream: Stream) -> None:
        """Compile the grammar, fetch KV, and queue the request."""
        asked, take = stream.asked, stream.asked.kv.take
        self._fetching += 1
        try:
            async with stream.waiting():
                grammar = None
                if asked.grammar is not None and stream.request.samples:
                    most = stream.ending.most_ids
                    grammar = await asyncio.to_thread(self._model.grammar, asked.grammar, most)
                await self._parts.fetcher.fetch(stream.request, take)
        finally:
            self._fetching -= 1
            if take is not None and self._parts.releaser is not None:
                self._parts.releaser.release(take.release_url)
        if stream.request.samples:
            stream.sampler = RequestSampler(
                asked.sampling,
                asked.ids,
                self._model.vocab_size,
                grammar,
                random_seed=secrets.randbits(63),
                eos_ids=self._model.eos_ids,
            )
        self._loop.schedule(stream)

    async def _next_chunk(self, stream: Stream) -> GenerateChunk | None:
        """What has happened since the last chunk; None if nothing that the caller needs."""
        if stream.has_ids:
            return stream.take()
        if stream.failure is not None:
            raise stream.failure
        hand_offs = self._parts.hand_offs
        if stream.ticket_due and hand_offs is not None:
            stream.told_early = True
            states = self._parts.states
            size = 0 if states is None else states.state_bytes
            ticket = hand_offs.open(stream.request, state_bytes=size)
            return GenerateChunk(hand_off=ticket, usage=stream.request.usage)
        if not stream.completed:
            return None
        hand_off: HandOff | None = None
        if stream.told_early and hand_offs is not None:
            if self._parts.states is not None:
                state = self._parts.states.state(stream.request.number)
                async with stream.waiting():
                    await hand_offs.add_state(stream.request, state)
            hand_offs.complete(stream.request)
        elif stream.asked.kv.offer and hand_offs is not None:
            async with stream.waiting():
                hand_off = await hand_offs.offer(stream.request)
        self._loop.leave(stream)
        stream.finish = FinishReason.HANDED_OFF if stream.asked.kv.offer else FinishReason.LENGTH
        return stream.take().model_copy(update={"hand_off": hand_off})


def _samples(asked: GenerateRequest) -> bool:
    return not asked.kv.offer and asked.sampling.max_tokens > 0
