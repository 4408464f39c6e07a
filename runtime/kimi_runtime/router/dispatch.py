"""Carrying a plan out: prefill, hand-off, decode; retries before the first token; nothing leaks.

Whoever stops reading (a client that left, a deadline) closes the generator, which closes the
connection to the worker that is busy with the request, and that cancels it there. A hand-off is
released as soon as the decode worker has answered, or when the attempt ends without it.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from kimi_runtime import clock
from kimi_runtime.errors import (
    DeadlineExceeded,
    KimistackError,
    Overloaded,
    Unavailable,
    WorkerFailed,
)
from kimi_runtime.router.client import PeerAbsent
from kimi_runtime.router.discovery import Fleet
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.plan import NobodyNow, Plan
from kimi_runtime.router.policies.base import Policy
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Grammar,
    HandOff,
    KvPlan,
    KvUsage,
    Sampling,
)
from kimi_runtime.umbp.keys import hex_keys

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Journey:
    """What happened to a request, filled in as it happens; for its log line, metrics and usage."""

    plan: Plan | None = None
    prefill_usage: KvUsage | None = None
    decode_usage: KvUsage | None = None
    retries: int = 0
    prefill_s: float | None = None
    ttft_s: float | None = None
    tried: list[str] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was there before: neither computed nor handed over from there."""
        usage = self.prefill_usage or self.decode_usage
        return 0 if usage is None else usage.hbm_tokens + usage.pool_tokens


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt on its way to workers."""

    trace_id: str
    tenant: str
    ids: tuple[int, ...]
    sampling: Sampling
    grammar: Grammar | None
    grammar_required: bool
    """False: the grammar is a help, and a worker that knows none may serve without it."""
    session: bytes
    owners: tuple[str, ...]
    keys: Mapping[Geometry, Sequence[bytes]]
    deadline_s: float
    """On our clock."""
    retry_window_s: float = 0.0
    """How long to wait for a worker where none can take it but one may come."""
    journey: Journey = field(default_factory=Journey)

    @property
    def view(self) -> RequestView:
        """The job as a decision sees it."""
        return RequestView(
            prompt_tokens=len(self.ids),
            max_tokens=self.sampling.max_tokens,
            session=self.session,
            owners=self.owners,
            grammar=self.grammar_required,
            logprobs=self.sampling.logprobs is not None,
        )


class Dispatcher:
    """Runs jobs on the fleet. `views` gives the workers as of now for a job's keys."""

    def __init__(
        self,
        *,
        router: str,
        fleet: Fleet,
        ledger: Ledger,
        policy: Policy,
        views: Callable[[Job, float], list[WorkerView]],
        retries: int,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._router, self._fleet, self._ledger = router, fleet, ledger
        self._policy, self._views, self._retries = policy, views, retries
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
            plan, views = await self._planned(
                job, avoid, retry_until_s=started_s + job.retry_window_s
            )
            begun = False
            try:
                async with aclosing(self._attempt(job, plan, views)) as chunks:
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

    async def _planned(
        self, job: Job, avoid: "_Avoided", *, retry_until_s: float
    ) -> tuple[Plan, dict[str, WorkerView]]:
        """A plan; waits for one where a change among the workers may bring it."""
        while True:
            change = self._fleet.next_change
            try:
                return self._plan(job, avoid)
            except Unavailable as exc:
                nobody = exc
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

    def _plan(self, job: Job, avoid: "_Avoided") -> tuple[Plan, dict[str, WorkerView]]:
        now_s = clock.now_s()
        if now_s >= job.deadline_s:
            raise DeadlineExceeded("the request's deadline passed before a worker answered")
        views = [view for view in self._views(job, now_s) if self._process(view.name) not in avoid]
        plan = self._policy.choose(job.view, views, now_s=now_s)
        job.journey.plan = plan
        job.journey.tried.extend(plan.workers)
        return plan, {view.name: view for view in views}

    async def _attempt(
        self, job: Job, plan: Plan, views: Mapping[str, WorkerView]
    ) -> AsyncGenerator[GenerateChunk, None]:
        wire_id = f"{job.trace_id}.{secrets.token_hex(4)}"
        whole = plan.prefill is None
        lacking = len(job.ids) - views[plan.prefill or plan.decode].cached_tokens
        with self._entered(plan.decode, wire_id, lacking if whole else 0) as decode_began:
            hand_off = None
            if plan.prefill is not None:
                with self._entered(plan.prefill, wire_id, lacking):
                    hand_off = await self._prefill(job, plan.prefill, wire_id)
            try:
                request = self._request(job, plan.decode, wire_id, KvPlan(take=hand_off))
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

    async def _prefill(self, job: Job, worker: str, wire_id: str) -> HandOff:
        started_s = clock.now_s()
        request = self._request(job, worker, wire_id, KvPlan(offer=True))
        async with aclosing(self._leg(job, worker, request)) as chunks:
            async for chunk in chunks:
                job.journey.prefill_usage = chunk.usage or job.journey.prefill_usage
                if chunk.hand_off is not None:
                    job.journey.prefill_s = clock.now_s() - started_s
                    return chunk.hand_off
        raise _LegFailed(worker, WorkerFailed(f"{worker} finished a prefill without a hand-off"))

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

    def _request(self, job: Job, worker: str, wire_id: str, kv: KvPlan) -> GenerateRequest:
        info = self._fleet[worker].info
        assert info is not None  # it was planned onto
        geometry = Geometry(info.model_digest, info.layout, info.block_tokens)
        return GenerateRequest(
            request_id=wire_id,
            ids=job.ids,
            sampling=job.sampling,
            grammar=job.grammar if info.capabilities.grammar and not kv.offer else None,
            kv=kv.model_copy(update={"keys": hex_keys(job.keys.get(geometry, ()))}),
            deadline_ms=max(int((job.deadline_s - clock.now_s()) * 1000), 1),
            tenant=job.tenant,
            router=self._router,
        )

    @contextmanager
    def _entered(self, worker: str, wire_id: str, new_tokens: int) -> Iterator[Callable[[], None]]:
        """Keep the request in the ledger; calling what is yielded says that its prompt is done."""
        self._ledger.start(worker, wire_id, new_tokens=max(new_tokens, 0))
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
