"""Carrying plans out on simulated workers: prefill, hand-off, decode, and again after failures.

What `router.dispatch` does over HTTP: the ledger is entered before anything else happens, a leg
that fails is planned anew without the worker, and a refusal is taken as its Retry-After says. Pure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kimi_runtime.engine.request import Request, rank_of
from kimi_runtime.errors import CapacityError, Overloaded, RequestError, Unavailable
from kimi_runtime.router.plan import Fetch, NobodyNow, Plan
from kimi_runtime.router.view import RequestClass, RequestView
from kimi_runtime.sim.cluster import Cluster
from kimi_runtime.sim.content import KnownChain
from kimi_runtime.sim.record import Record
from kimi_runtime.sim.router import SimRouter
from kimi_runtime.sim.work import Read, Work
from kimi_runtime.sim.worker import SimWorker
from kimi_runtime.spec.request import Priority

BACKGROUND_DELAY_S = 30.0
ASK_AGAIN_S = 0.5
MAX_TRIES = 200


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way. `known` are the keys of its prompt and of its whole answer."""

    view: RequestView
    known: Sequence[bytes]
    output_tokens: int
    record: Record
    began: Callable[[], None]
    ended: Callable[[], None]
    plan: Plan | None = None
    legs: list[tuple[SimWorker, Work]] = field(default_factory=list)
    wire_id: str = ""
    closed: bool = False


class Dispatch:
    """Runs jobs. `numbers` are given to requests in the order in which they are sent."""

    def __init__(self, cluster: Cluster, router: SimRouter) -> None:
        self._cluster, self._router = cluster, router
        self._timeline = cluster.timeline
        self._jobs: dict[Work, Job] = {}
        self._numbers = 0

    def submit(self, job: Job) -> None:
        """Plan the job and send it off."""
        if job.closed:
            return
        keys = job.known[: job.view.prompt_tokens // self._cluster.spec.block_tokens]
        try:
            seen = self._router.choose(job.view, keys)
            for name in seen.plan.workers:
                self._check(self._cluster.workers[name], job)
        except Overloaded as exc:
            self._again(job, max(exc.retry_after_s or 0.0, ASK_AGAIN_S))
        except NobodyNow:
            self._again(job, ASK_AGAIN_S)
        except (Unavailable, RequestError, CapacityError) as exc:
            self._refuse(job, str(exc))
        else:
            job.plan = seen.plan
            self._numbers += 1
            job.wire_id = f"r{self._numbers}"
            self._send(job, seen.plan, {n: v.cached_tokens for n, v in seen.views.items()})

    def leave(self, job: Job) -> None:
        """The client has left."""
        job.closed = True
        self._close_legs(job)

    def failed(self, lost: Sequence[Work]) -> None:
        """A worker is gone with these: each is planned anew, from its beginning."""
        for job in dict.fromkeys(self._jobs[work] for work in lost if work in self._jobs):
            if job.closed:
                continue
            record = job.record
            record.retries += 1
            record.first_s = record.scheduled_s = None
            self._close_legs(job)
            self.submit(job)

    def _send(self, job: Job, plan: Plan, cached: dict[str, int]) -> None:
        now_s, record = self._timeline.now_s, job.record
        record.mode, record.workers, record.terms = plan.mode.value, plan.workers, dict(plan.terms)
        self._router.feedback.planned(job.wire_id, plan, now_s=now_s)
        first = plan.prefill or plan.decode
        lacking = max(job.view.prompt_tokens - cached.get(first, 0), 0)
        self._router.ledger.start(
            plan.decode, job.wire_id, new_tokens=0 if plan.prefill else lacking
        )
        if plan.prefill is None:
            worker = self._cluster.workers[plan.decode]
            work = self._work(job, job.output_tokens, began=lambda: self._began(job, work))
            work.read = self._fetch(plan, worker)
            self._arrive(job, worker, work, cached.get(plan.decode, 0))
            return
        self._router.ledger.start(plan.prefill, job.wire_id, new_tokens=lacking)
        worker = self._cluster.workers[plan.prefill]
        work = self._work(job, 0, began=lambda: self._prefilled(job, worker, work))
        work.read = self._fetch(plan, worker)
        self._arrive(job, worker, work, cached.get(plan.prefill, 0))

    def _arrive(self, job: Job, worker: SimWorker, work: Work, predicted: int) -> None:
        job.legs.append((worker, work))
        self._jobs[work] = job
        worker.last_request = job.wire_id
        worker.arrive(work)
        if predicted:
            here = sum(
                index not in work.request.fetched for index in range(len(work.request.blocks))
            )
            if here or self._cluster.spec.pool:
                found = here * self._cluster.spec.block_tokens
                self._router.feedback.found(worker.name, predicted=predicted, found=found)

    def _work(self, job: Job, output: int, *, began: Callable[[], None]) -> Work:
        background = job.view.urgency is RequestClass.BACKGROUND
        priority = Priority.BACKGROUND if background else Priority.INTERACTIVE
        self._numbers += 1
        request = Request(
            number=self._numbers,
            tokens=[0] * job.view.prompt_tokens,
            chain=KnownChain(job.known, self._cluster.spec.block_tokens),
            rank=rank_of(priority, self._timeline.now_s, background_delay_s=BACKGROUND_DELAY_S),
            priority=priority,
            tenant=job.view.tenant,
            samples=output > 0,
        )
        return Work(request, output, began, lambda: self._ended(job))

    def _prefilled(self, job: Job, worker: SimWorker, work: Work) -> None:
        """The prompt is computed: hand it over."""
        self._learn_prefill(job, worker, work)
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
            self._close_legs(job)
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
        self._arrive(job, target, work, 0)

    def _fetch(self, plan: Plan, worker: SimWorker) -> Read | None:
        """What the plan wants read from a source that is not the worker's own pool."""
        for fetch in plan.fetches:
            if fetch.source != worker.node:
                return self._read(fetch, worker)
        return None

    def _read(self, fetch: Fetch, worker: SimWorker) -> Read | None:
        until = fetch.end // self._cluster.spec.block_tokens
        pool = self._cluster.pools.get(fetch.source)
        if pool is not None:
            pins: list[int] = []

            def pin(keys: Sequence[bytes]) -> int:
                number, held = pool.pin(keys, now_s=self._timeline.now_s)
                pins.append(number)
                return held

            def unpin() -> None:
                while pins:
                    pool.unpin(pins.pop())

            return Read("pool", self._cluster.route(pool.name, worker), pin, unpin, until)
        peer = self._cluster.workers.get(fetch.source)
        if peer is None or peer.failed:
            return None
        lent: list[int] = []

        def lend(keys: Sequence[bytes]) -> int:
            lent.extend(peer.lend(keys))
            return len(lent)

        def give_back() -> None:
            blocks, lent[:] = lent[:], []
            peer.give_back(blocks)

        return Read("hand_off", self._cluster.route(peer.name, worker), lend, give_back, until)

    def _began(self, job: Job, work: Work) -> None:
        """The first token is there."""
        now_s, record, plan = self._timeline.now_s, job.record, job.plan
        assert plan is not None
        worker = next(worker for worker, one in job.legs if one is work)
        if plan.prefill is None:
            self._learn_prefill(job, worker, work)
            self._router.ledger.computed(worker.name, job.wire_id)
        else:
            usage = work.request.usage
            record.hand_off_bytes = (
                0 if usage is None else usage.hand_off_tokens * self._cluster.timing.kv_token_bytes
            )
            self._router.feedback.handed_over(job.wire_id, work.read_s or None, now_s=now_s)
        record.first_s = now_s
        record.expected_s = self._router.feedback.first_token(plan, now_s - record.asked_s)
        job.began()

    def _learn_prefill(self, job: Job, worker: SimWorker, work: Work) -> None:
        now_s, record, usage = self._timeline.now_s, job.record, work.request.usage
        record.scheduled_s = work.scheduled_s
        if usage is not None:
            record.hbm_tokens, record.pool_tokens = usage.hbm_tokens, usage.pool_tokens
            record.peer_tokens = usage.hand_off_tokens
            record.computed_tokens = usage.computed_tokens
        plan = job.plan
        if plan is not None and plan.fetches:
            self._router.feedback.read(job.wire_id, work.read_s or None, now_s=now_s)
        if work.scheduled_s is not None and work.computing_s is not None and usage is not None:
            cached = job.view.prompt_tokens - usage.computed_tokens
            self._router.feedback.prefilled(
                worker.name, usage.computed_tokens, cached, now_s - work.computing_s, now_s=now_s
            )

    def _ended(self, job: Job) -> None:
        now_s, record = self._timeline.now_s, job.record
        record.ended_s, record.output_tokens = now_s, job.output_tokens
        self._router.feedback.answered(job.view, job.output_tokens, cut=record.aborted)
        worker, work = job.legs[-1]
        if record.first_s is not None and job.output_tokens > 8:
            rows, held = worker.last_step
            pace_s = (now_s - record.first_s) / (job.output_tokens - 1)
            self._router.feedback.stepped(worker.name, rows, held, pace_s, now_s=now_s)
        self._jobs.pop(work, None)
        job.closed = True
        self._close_legs(job)
        job.ended()

    def _close_legs(self, job: Job) -> None:
        now_s = self._timeline.now_s
        legs, job.legs = job.legs, []
        for worker, work in legs:
            self._jobs.pop(work, None)
            if not worker.failed:
                worker.leave(work)
            self._router.ledger.finish(worker.name, job.wire_id)
        plan = job.plan
        if plan is not None:
            self._router.ledger.finish(plan.decode, job.wire_id)
            if plan.fetches:
                self._router.feedback.read(job.wire_id, None, now_s=now_s)
            if plan.hand_off is not None:
                self._router.feedback.handed_over(job.wire_id, None, now_s=now_s)

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
        job.ended()
