"""Carrying plans out on simulated workers: prefill, hand-off, decode, and again after failures.

What `router.dispatch` does over HTTP: the ledger is entered before anything else happens, a leg
that fails is planned anew without the worker, and a refusal is taken as its Retry-After says. Pure.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kimi_runtime.engine.request import Request, rank_of
from kimi_runtime.errors import (
    CapacityError,
    Overloaded,
    RequestError,
    Unavailable,
    WorkerFailed,
)
from kimi_runtime.router.course import Course
from kimi_runtime.router.decisions import Decision
from kimi_runtime.router.insight import Front
from kimi_runtime.router.plan import Mode, NobodyNow, Plan
from kimi_runtime.router.view import RequestClass, RequestView
from kimi_runtime.sim.cluster import Cluster
from kimi_runtime.sim.content import KnownChain, Unsaid
from kimi_runtime.sim.record import Record
from kimi_runtime.sim.router import SimRouter
from kimi_runtime.sim.sources import read_from
from kimi_runtime.sim.work import Read, Work
from kimi_runtime.sim.worker import SimWorker
from kimi_runtime.spec.request import FinishReason, GenerateChunk, KvUsage, Priority, Timing

BACKGROUND_DELAY_S = 30.0
ASK_AGAIN_S = 0.5
MAX_TRIES = 200
RETRY_WINDOW_S = 10.0
"""`spec.router.RouterSpec.retry_window`: how long a router holds a deferred request back."""


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way. `known` are the keys of its prompt and of its whole answer."""

    view: RequestView
    known: Sequence[bytes]
    output_tokens: int
    record: Record
    began: Callable[[], None]
    ended: Callable[[], None]
    fronts: tuple[Front, ...] = ()
    plan: Plan | None = None
    course: Course | None = None
    open: ExitStack = field(default_factory=ExitStack)
    """What ends with the attempt."""
    legs: list[tuple[SimWorker, Work]] = field(default_factory=list)
    wire_id: str = ""
    closed: bool = False


class Dispatch:
    """Runs jobs. `numbers` are given to requests in the order in which they are sent."""

    def __init__(self, cluster: Cluster, router: SimRouter) -> None:
        self._cluster, self._router = cluster, router
        self._timeline = cluster.timeline
        self._jobs: dict[Work, Job] = {}
        self._arrived_s: dict[Work, float] = {}
        self._numbers = 0

    def submit(self, job: Job) -> None:
        """Plan the job and send it off."""
        if job.closed:
            return
        now_s = self._timeline.now_s
        try:
            decision = self._router.decide(
                f"{job.record.session}.{job.record.turn}",
                job.view,
                self._keys(job),
                attempt=job.record.retries,
                fronts=job.fronts,
            )
            for name in decision.plan.workers:
                self._check(self._cluster.workers[name], job)
        except Overloaded as exc:
            self._again(job, max(exc.retry_after_s or 0.0, ASK_AGAIN_S))
        except NobodyNow:
            self._again(job, ASK_AGAIN_S)
        except (Unavailable, RequestError, CapacityError) as exc:
            self._refuse(job, str(exc))
        else:
            if decision.plan.mode is Mode.DEFER:
                wait_s = decision.plan.wait_s
                if now_s + wait_s > job.record.asked_s + RETRY_WINDOW_S:
                    self._router.decisions.refused(decision)
                self._again(job, wait_s)
                return
            self._numbers += 1
            job.wire_id = f"r{self._numbers}"
            self._send(job, decision)

    def leave(self, job: Job) -> None:
        """The client has left."""
        job.closed = True
        self._close(job)

    def failed(self, lost: Sequence[Work]) -> None:
        """A worker is gone with these: each is planned anew, from its beginning."""
        for job in dict.fromkeys(self._jobs[work] for work in lost if work in self._jobs):
            if job.closed:
                continue
            record = job.record
            record.retries += 1
            record.first_s = record.scheduled_s = None
            self._close(job, WorkerFailed("a worker is gone with the request"))
            self.submit(job)

    def _keys(self, job: Job) -> Sequence[bytes]:
        return job.known[: job.view.prompt_tokens // self._cluster.spec.block_tokens]

    def _send(self, job: Job, decision: Decision) -> None:
        record, plan = job.record, decision.plan
        record.mode, record.workers, record.terms = plan.mode.value, plan.workers, dict(plan.terms)
        record.expected_s = None
        if decision.expected_s is not None:
            record.expected_s = decision.now_s - record.asked_s + decision.expected_s
        first = plan.prefill or plan.decode
        new, length = decision.new_tokens, job.view.prompt_tokens
        ledger, workers = self._router.ledger, self._cluster.workers
        for name in plan.workers:
            self._router.sent(workers[name])
        course = self._router.decisions.course(job.wire_id, decision, self._now)
        job.plan, job.course = plan, job.open.enter_context(course)
        job.course.prefill_keys = self._keys(job)
        own = 0 if plan.prefill else new
        ledger.start(plan.decode, job.wire_id, new_tokens=own, prompt_tokens=length)
        worker = workers[first]
        if plan.prefill is None:
            work = self._work(job, job.output_tokens, began=lambda: self._began(job, work))
        else:
            ledger.start(plan.prefill, job.wire_id, new_tokens=new, prompt_tokens=length)
            work = self._work(job, 0, began=lambda: self._prefilled(job, worker, work))
        work.read = self._fetch(plan, worker)
        self._arrive(job, worker, work)

    def _now(self) -> float:
        return self._timeline.now_s

    def _arrive(self, job: Job, worker: SimWorker, work: Work) -> None:
        job.legs.append((worker, work))
        self._jobs[work] = job
        self._arrived_s[work] = self._timeline.now_s
        worker.last_request = job.wire_id
        worker.arrive(work)

    def _work(self, job: Job, output: int, *, began: Callable[[], None]) -> Work:
        background = job.view.urgency is RequestClass.BACKGROUND
        priority = Priority.BACKGROUND if background else Priority.INTERACTIVE
        self._numbers += 1
        request = Request(
            number=self._numbers,
            tokens=Unsaid(job.view.prompt_tokens),
            chain=KnownChain(job.known, self._cluster.spec.block_tokens),
            rank=rank_of(priority, self._timeline.now_s, background_delay_s=BACKGROUND_DELAY_S),
            priority=priority,
            tenant=job.view.tenant,
            samples=output > 0,
        )
        return Work(request, output, began, lambda: self._ended(job))

    def _prefilled(self, job: Job, worker: SimWorker, work: Work) -> None:
        """The prompt is computed: hand it over."""
        self._note_prefill(job, work)
        if job.course is not None:
            job.course.prefilled(self._chunk(work))
        self._router.ledger.computed(worker.name, job.wire_id)
        self._router.ledger.finish(worker.name, job.wire_id)
        delay_s = self._cluster.timing.constants.hand_off_s
        self._timeline.after(delay_s, lambda: self._hand_over(job, worker, work))

    def _hand_over(self, job: Job, source: SimWorker, held: Work) -> None:
        plan = job.plan
        if job.closed or held.left or plan is None or plan.prefill != source.name:
            return
        target = self._cluster.workers.get(plan.decode)
        if target is None or target.failed:
            self._router.lose(plan.decode)
            self._close(job, WorkerFailed("who was to decode is gone"))
            job.record.retries += 1
            self.submit(job)
            return
        work = self._work(job, job.output_tokens, began=lambda: self._began(job, work))
        work.read = Read(
            "hand_off",
            self._cluster.route(source.name, target),
            hold=lambda keys: 0 if source.failed else len(keys),
            release=lambda: source.leave(held),
            tail=True,
        )
        self._arrive(job, target, work)

    def _fetch(self, plan: Plan, worker: SimWorker) -> Read | None:
        """What the plan wants read from a source that is not the worker's own pool."""
        for fetch in plan.fetches:
            if fetch.source != worker.node:
                until = fetch.end // self._cluster.spec.block_tokens
                return read_from(self._cluster, fetch.source, worker, until=until)
        return None

    def _began(self, job: Job, work: Work) -> None:
        """The first token is there."""
        now_s, record, plan = self._timeline.now_s, job.record, job.plan
        assert plan is not None
        worker = next(worker for worker, one in job.legs if one is work)
        if plan.prefill is None:
            self._note_prefill(job, work)
            self._router.ledger.computed(worker.name, job.wire_id)
        else:
            usage = work.request.usage
            record.hand_off_bytes = (
                0 if usage is None else usage.hand_off_tokens * self._cluster.timing.kv_token_bytes
            )
        record.first_s = now_s
        if job.course is not None:
            chunk = self._chunk(work, handed_over=plan.prefill is not None)
            job.course.came(chunk, now_s=now_s)
            heard = job.course.sampled
            self._router.answering(worker, job.wire_id, work, heard)
        job.began()

    def _chunk(self, work: Work, *, handed_over: bool = False) -> GenerateChunk:
        """What the worker tells with its first ids, or with the computed prompt."""
        usage, timing = work.request.usage, None
        if usage is not None and not handed_over:
            # what was read from a peer's memory was read, like what the pool brought
            usage = KvUsage(
                hbm_tokens=usage.hbm_tokens,
                pool_tokens=usage.pool_tokens + usage.hand_off_tokens,
                hand_off_tokens=0,
                computed_tokens=usage.computed_tokens,
                hand_off_bytes=0,
                hand_off_failure=None,
            )
        elif usage is not None:
            size = usage.hand_off_tokens * self._cluster.timing.kv_token_bytes
            usage = usage.model_copy(update={"hand_off_bytes": size})
        if work.scheduled_s is not None and work.computing_s is not None:
            timing = Timing(
                prepared_s=work.scheduled_s - self._arrived_s[work],
                queued_s=work.computing_s - work.scheduled_s,
                prefill_s=self._timeline.now_s - work.computing_s,
            )
        ids = (0,) if work.output_tokens else ()
        return GenerateChunk(ids=ids, usage=usage, timing=timing)

    def _note_prefill(self, job: Job, work: Work) -> None:
        record, usage = job.record, work.request.usage
        record.scheduled_s, record.computing_s = work.scheduled_s, work.computing_s
        if usage is not None:
            record.hbm_tokens, record.pool_tokens = usage.hbm_tokens, usage.pool_tokens
            record.peer_tokens = usage.hand_off_tokens
            record.computed_tokens = usage.computed_tokens

    def _ended(self, job: Job) -> None:
        now_s, record = self._timeline.now_s, job.record
        record.ended_s, record.output_tokens = now_s, job.output_tokens
        worker, work = job.legs[-1]
        if job.course is not None:
            told = 1 + self._router.answered(worker, job.wire_id)
            finish = None if record.aborted else FinishReason.STOP
            rest = GenerateChunk(ids=(0,) * max(job.output_tokens - told, 0), finish=finish)
            job.course.came(rest, now_s=now_s)
        self._jobs.pop(work, None)
        job.closed = True
        self._close(job)
        self._tell(job)

    def _close(self, job: Job, failure: Exception | None = None) -> None:
        """The attempt is over: nothing of it stays anywhere."""
        legs, job.legs = job.legs, []
        for worker, work in legs:
            self._jobs.pop(work, None)
            self._arrived_s.pop(work, None)
            if not worker.failed:
                worker.leave(work)
            work.began = work.ended = _nothing
            self._router.answered(worker, job.wire_id)
            self._router.ledger.finish(worker.name, job.wire_id)
        if job.plan is not None:
            self._router.ledger.finish(job.plan.decode, job.wire_id)
        attempt, job.open, job.course = job.open, ExitStack(), None
        attempt.__exit__(*((None,) * 3 if failure is None else (type(failure), failure, None)))

    def _check(self, worker: SimWorker, job: Job) -> None:
        """What a worker answers at once: refused, full, or gone."""
        if worker.failed:
            self._router.lose(worker.name)
            job.record.retries += 1
            raise NobodyNow(f"{worker.name} is gone")
        worker.sync()
        worker.scheduler.check(job.view.prompt_tokens, job.output_tokens)

    def _again(self, job: Job, after_s: float) -> None:
        record = job.record
        record.deferred_s += after_s
        record.retries += 1
        if record.retries > MAX_TRIES:
            self._refuse(job, f"nobody took it in {MAX_TRIES} tries")
            return
        self._timeline.after(after_s, lambda: self.submit(job))

    def _refuse(self, job: Job, why: str) -> None:
        job.record.refused, job.closed = why, True
        self._tell(job)

    def _tell(self, job: Job) -> None:
        """The job is over, and forgets whom to tell: it would keep itself alive by that."""
        ended, job.began, job.ended = job.ended, _nothing, _nothing
        ended()


def _nothing() -> None:
    """Nobody is told of what is over."""
