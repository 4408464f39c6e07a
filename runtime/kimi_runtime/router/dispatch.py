"""Carrying a plan out: prefill, hand-off, decode; retries before the first token; nothing leaks.

Between workers that stream, the decode leg starts as soon as the prompt is being computed, and
both go on beside each other; what becomes of the prefill then is the decode worker's to cope with.

Whoever stops reading (a client that left, a deadline) closes the generator, which closes the
connection to the worker that is busy with the request, and that cancels it there. A hand-off is
released as soon as the decode worker has answered, or when the attempt ends without it.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager

from kimi_runtime import clock
from kimi_runtime.errors import (
    DeadlineExceeded,
    KimistackError,
    Overloaded,
    Unavailable,
    WorkerFailed,
)
from kimi_runtime.router.client import PeerAbsent
from kimi_runtime.router.course import Course
from kimi_runtime.router.decisions import Decision, Decisions
from kimi_runtime.router.discovery import Fleet
from kimi_runtime.router.job import Job, Look
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.plan import Mode, NobodyNow, Plan, refusal
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.spec.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    HandOff,
    KvPlan,
    Priority,
)
from kimi_runtime.umbp.keys import hex_keys

_log = logging.getLogger(__name__)


class Dispatcher:
    """Runs jobs on the fleet."""

    def __init__(
        self,
        *,
        router: str,
        fleet: Fleet,
        ledger: Ledger,
        decisions: Decisions,
        look: Look,
        retries: int,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._router, self._fleet, self._ledger = router, fleet, ledger
        self._decisions, self._look, self._retries = decisions, look, retries
        self._tasks = tasks

    async def run(self, job: Job) -> AsyncGenerator[GenerateChunk, None]:
        """Chunks of the answer; the last has `finish`.

        Raises Unavailable (nobody can), Overloaded (everybody is full), DeadlineExceeded,
        RequestError (the worker refuses the request itself) before the first chunk with ids;
        after it any failure of the worker is WorkerFailed.
        """
        started_s = clock.now_s()
        counted = 0
        avoid: _Avoided = {}
        while True:
            decision = await self._decided(job, avoid, retry_until_s=started_s + job.retry_window_s)
            begun = False
            try:
                async with aclosing(self._attempt(job, decision)) as chunks:
                    async for chunk in chunks:
                        if not begun:
                            job.journey.ttft_s = clock.now_s() - started_s
                        begun = True
                        yield chunk
                return
            except _LegFailed as failed:
                self._note(job, failed, begun=begun)
                counted += not failed.not_taken
                if begun or counted > self._retries:
                    raise failed.error from failed
                job.journey.retries += 1
                avoid[self._process(failed.worker)] = failed

    def _note(self, job: Job, failed: "_LegFailed", *, begun: bool) -> None:
        if not isinstance(failed.error, WorkerFailed):
            return
        fields = {
            "request_id": job.trace_id,
            "worker": failed.worker,
            "begun": begun,
            "why": str(failed.error),
        }
        _log.warning("worker failed a request", extra={"fields": fields})
        if failed.unreachable:
            self._fleet.suspect(failed.worker)

    def _process(self, worker: str) -> tuple[str, int]:
        """The worker as it runs now: one that restarts is another one."""
        info = self._fleet[worker].info
        return worker, info.epoch if info is not None else 0

    async def _decided(self, job: Job, avoid: "_Avoided", *, retry_until_s: float) -> Decision:
        """A decision; waits for one where time, or a change among the workers, may bring it."""
        while True:
            change = self._fleet.next_change
            try:
                decision = self._decide(job, avoid)
            except Unavailable as exc:
                nobody = exc
            else:
                if decision.plan.mode is not Mode.DEFER:
                    return decision
                await self._deferred(decision, change, until_s=min(retry_until_s, job.deadline_s))
                continue
            refused = [failed.error for failed in avoid.values()]
            full = [error for error in refused if isinstance(error, Overloaded)]
            passing = isinstance(nobody, NobodyNow) and not full
            # who answered with a failure would do so again
            passing = passing and all(one.not_taken or one.unreachable for one in avoid.values())
            left_s = min(retry_until_s, job.deadline_s) - clock.now_s() if passing else 0.0
            try:
                async with asyncio.timeout(max(left_s, 0.0)):
                    await change.wait()
            except TimeoutError:
                # their answer says more than "nobody left"
                raise next(iter(full or refused), nobody) from None
            avoid.clear()

    async def _deferred(self, decision: Decision, change: asyncio.Event, *, until_s: float) -> None:
        """Wait as long as the plan says, or less if workers change; Overloaded if nobody may wait
        so long.
        """
        if clock.now_s() + decision.plan.wait_s > until_s:
            self._decisions.refused(decision)
            raise refusal(decision.plan)
        try:
            async with asyncio.timeout(decision.plan.wait_s):
                await change.wait()
        except TimeoutError:
            return

    def _decide(self, job: Job, avoid: "_Avoided") -> Decision:
        now_s = clock.now_s()
        if now_s >= job.deadline_s:
            raise DeadlineExceeded("the request's deadline passed before a worker answered")
        asked, workers = self._look(job, now_s)
        decision = self._decisions.decide(
            job.trace_id,
            asked,
            [view for view in workers if self._process(view.name) not in avoid],
            attempt=job.journey.retries,
            fronts=job.fronts,
            now_s=now_s,
        )
        if decision.plan.mode is not Mode.DEFER:
            job.journey.plan, job.journey.expected_s = decision.plan, decision.expected_s
            job.journey.tried.extend(decision.plan.workers)
        return decision

    async def _attempt(self, job: Job, decision: Decision) -> AsyncGenerator[GenerateChunk, None]:
        wire_id = f"{job.trace_id}.{secrets.token_hex(4)}"
        with self._decisions.course(wire_id, decision, clock.now_s) as course:
            course.prefill_keys = self._keys(job, decision.plan.prefill or decision.plan.decode)
            async with aclosing(self._legs(job, decision, course)) as chunks:
                async for chunk in chunks:
                    course.came(chunk, now_s=clock.now_s())
                    job.journey.served_s = course.first_token_s
                    yield chunk

    async def _legs(
        self, job: Job, decision: Decision, course: Course
    ) -> AsyncGenerator[GenerateChunk, None]:
        plan, wire_id = decision.plan, course.name
        whole = plan.prefill is None
        new = decision.new_tokens
        async with AsyncExitStack() as owned:
            decode_began = owned.enter_context(
                self._entered(job, plan.decode, wire_id, new if whole else 0)
            )
            hand_off = None
            if plan.prefill is not None:
                hand_off = await owned.enter_async_context(self._prefilling(job, plan, course, new))
            try:
                kv = KvPlan(take=hand_off, sources=self._sources(plan) if whole else ())
                request = self._request(job, plan.decode, wire_id, kv)
                async with aclosing(self._leg(job, plan.decode, request)) as chunks:
                    async for chunk in chunks:
                        if hand_off is not None:
                            self._release(job, hand_off)
                            hand_off = None
                        job.journey.decode_usage = chunk.usage or job.journey.decode_usage
                        decode_began()
                        if chunk.finish is FinishReason.CANCELLED:
                            raise _LegFailed(
                                plan.decode,
                                WorkerFailed(f"{plan.decode} is shutting down and cancelled"),
                            )
                        yield chunk
            finally:
                if hand_off is not None:
                    self._release(job, hand_off)

    @asynccontextmanager
    async def _prefilling(
        self, job: Job, plan: Plan, course: Course, new: int
    ) -> AsyncIterator[HandOff]:
        """The hand-off of the plan's prefill, which may go on inside the block and ends with it."""
        told: asyncio.Future[HandOff] = asyncio.get_running_loop().create_future()
        told.add_done_callback(lambda told: told.cancelled() or told.exception())
        leg = self._prefill(job, plan, course, new, told)
        task = self._tasks.create_task(leg, name=f"prefill {course.name}")
        try:
            hand_off = await told
            course.streamed = hand_off.progress_url is not None
            yield hand_off
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _prefill(
        self, job: Job, plan: Plan, course: Course, new: int, told: "asyncio.Future[HandOff]"
    ) -> None:
        """The prefill leg to its end. What fails before the hand-off is told is told instead."""
        worker = plan.prefill
        assert worker is not None  # it is a pair's
        started_s = clock.now_s()
        kv = KvPlan(offer=True, early=self._streams(plan), sources=self._sources(plan))
        try:
            request = self._request(job, worker, course.name, kv)
            with self._entered(job, worker, course.name, new):
                async with aclosing(self._leg(job, worker, request)) as chunks:
                    async for chunk in chunks:
                        job.journey.prefill_usage = chunk.usage or job.journey.prefill_usage
                        if chunk.finish is FinishReason.HANDED_OFF:
                            job.journey.prefill_s = clock.now_s() - started_s
                            course.prefilled(chunk)
                        if chunk.hand_off is not None and not told.done():
                            told.set_result(chunk.hand_off)
            if not told.done():
                without = WorkerFailed(f"{worker} finished a prefill without a hand-off")
                raise _LegFailed(worker, without)
        except Exception as exc:
            if not told.done():
                told.set_exception(exc)
            elif isinstance(exc, _LegFailed):
                self._note(job, exc, begun=True)

    def _streams(self, plan: Plan) -> bool:
        """Whether both workers of the plan can hand KV over while it is computed."""
        infos = [self._fleet[worker].info for worker in (plan.prefill, plan.decode) if worker]
        return all(info is not None and info.capabilities.layer_streaming for info in infos)

    async def _leg(
        self, job: Job, worker: str, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk, None]:
        """One worker's chunks. Retriable failures come out as `_LegFailed`."""
        client = self._fleet[worker].client
        try:
            async with aclosing(client.generate(request, trace_id=job.trace_id)) as chunks:
                while True:
                    try:
                        async with asyncio.timeout(job.deadline_s - clock.now_s()):
                            chunk = await anext(chunks, None)
                    except TimeoutError as exc:
                        raise DeadlineExceeded(
                            f"{worker} was not done with the request by its deadline"
                        ) from exc
                    if chunk is None:
                        return
                    yield chunk
        except (Unavailable, Overloaded) as exc:
            raise _LegFailed(worker, exc) from exc

    def _sources(self, plan: Plan) -> tuple[str, ...]:
        """Whose memory is read: workers' and other nodes' pools'; its own pool is read unasked."""
        nodes = self._fleet.roster.nodes
        own = nodes.get(plan.prefill or plan.decode)
        named = [fetch.source for fetch in plan.fetches if fetch.source != own]
        return tuple(name for name in named if name in nodes or name in nodes.values())

    def _keys(self, job: Job, worker: str) -> Sequence[bytes]:
        info = self._fleet[worker].info
        assert info is not None  # it was planned onto
        return job.keys.get(Geometry(info.model_digest, info.layout, info.block_tokens), ())

    def _request(self, job: Job, worker: str, wire_id: str, kv: KvPlan) -> GenerateRequest:
        info = self._fleet[worker].info
        assert info is not None  # it was planned onto
        return GenerateRequest(
            request_id=wire_id,
            ids=job.ids,
            sampling=job.sampling,
            grammar=job.grammar if info.capabilities.grammar and not kv.offer else None,
            kv=kv.model_copy(update={"keys": hex_keys(self._keys(job, worker))}),
            deadline_ms=max(int((job.deadline_s - clock.now_s()) * 1000), 1),
            priority=Priority(job.urgency.value),
            tenant=job.tenant,
            router=self._router,
        )

    @contextmanager
    def _entered(
        self, job: Job, worker: str, wire_id: str, new: int
    ) -> Iterator[Callable[[], None]]:
        """Keep the request in the ledger; calling what is yielded says that its prompt is done."""
        self._ledger.start(worker, wire_id, new_tokens=new, prompt_tokens=len(job.ids))
        try:
            yield lambda: self._ledger.computed(worker, wire_id)
        finally:
            self._ledger.finish(worker, wire_id)

    def _release(self, job: Job, hand_off: HandOff) -> None:
        self._tasks.create_task(self._released(job, hand_off), name=f"release {hand_off.ticket}")

    async def _released(self, job: Job, hand_off: HandOff) -> None:
        try:
            client = self._fleet[hand_off.worker].client
            await client.release(hand_off.ticket, trace_id=job.trace_id)
        except (KimistackError, KeyError) as exc:  # its lease ends it
            _log.info(
                "hand-off not released",
                extra={"fields": {"worker": hand_off.worker, "why": repr(exc)}},
            )


class _LegFailed(Exception):
    """One worker failed its part; another may do it."""

    def __init__(self, worker: str, error: KimistackError) -> None:
        super().__init__(str(error))
        self.worker, self.error = worker, error

    @property
    def unreachable(self) -> bool:
        """Whether the connection itself failed, rather than the worker answering with an error."""
        return self.error.__cause__ is not None

    @property
    def not_taken(self) -> bool:
        """Whether the worker never had it: it said so, or was not there to be asked."""
        return isinstance(self.error, Unavailable | Overloaded | PeerAbsent)


_Avoided = dict[tuple[str, int], _LegFailed]
"""Processes that failed the job, with how."""
