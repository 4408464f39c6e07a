"""The router as one object: what it owns, and how a turn of a session becomes an answer."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

import aiohttp

from kimi_runtime import clock
from kimi_runtime.auth import read_call_key
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.router.admission import Admission
from kimi_runtime.router.capacity import kv_capacity
from kimi_runtime.router.client import PeerClient, open_http
from kimi_runtime.router.course import Outcome
from kimi_runtime.router.decisions import Decision, Decisions
from kimi_runtime.router.discovery import Fleet, Member, Seer
from kimi_runtime.router.dispatch import Dispatcher
from kimi_runtime.router.estimate.outputs import Phase
from kimi_runtime.router.explain.log import ExplainLog
from kimi_runtime.router.follow import Feeds
from kimi_runtime.router.hints import Hints
from kimi_runtime.router.insight import Insight, fronts_of
from kimi_runtime.router.job import Job
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.membership import Membership
from kimi_runtime.router.observations import Observations
from kimi_runtime.router.parking import Parking
from kimi_runtime.router.pauses import Pauses
from kimi_runtime.router.policies import open_policy, planner_of
from kimi_runtime.router.readiness import Readiness
from kimi_runtime.router.recorder import Recorder
from kimi_runtime.router.session_gate import SessionGate
from kimi_runtime.router.sessions import Sessions, Turn
from kimi_runtime.router.trust import PoolTrust
from kimi_runtime.router.turns import Turns
from kimi_runtime.router.view import RequestClass, RequestView, WorkerView
from kimi_runtime.spec.request import FinishReason, GenerateChunk, Grammar, Sampling
from kimi_runtime.spec.router import Cost, RouterSpec
from kimi_runtime.spec.signals import RouterSignals
from kimi_runtime.spec.worker import LoadReport, WorkerInfo
from kimi_runtime.umbp.keys import pool_key_of

STALE_INTERVALS = 5
"""A load report older than this many intervals says nothing about now."""
MAX_SESSIONS = 100_000
MAX_SESSION_IDS = 64_000_000
"""256 MB of ids; 640 sessions of 100k tokens."""
PROBE_TENANT = PROBE_TRACE = "readyz"
PROBE_S = 10.0
EXPIRE_S = 30.0


class Router:
    """Sessions, workers and the dispatcher between them. Made by `open_router`."""

    def __init__(
        self,
        spec: RouterSpec,
        vocabulary: Vocabulary,
        *,
        http: aiohttp.ClientSession,
        call_key: bytes,
        trust: PoolTrust,
        tasks: asyncio.TaskGroup,
    ) -> None:
        workers, pools = (
            [PeerClient(http, one.name, one.url, call_key, trust=trust) for one in some]
            for some in (spec.workers, spec.pools)
        )
        interval_s = spec.load_interval
        policy = open_policy(spec.policy)
        planner = planner_of(policy)
        self.insight = Insight(planner, load_interval_s=interval_s)
        self.explain = (
            None
            if spec.explain is None
            else ExplainLog(spec.explain, router=spec.name, policy=spec.policy)
        )
        self.spec, self.vocabulary = spec, vocabulary
        self._epochs: dict[str, int] = {}
        self.ledger = Ledger(spec.name, stale_after_s=STALE_INTERVALS * max(interval_s, 0.2))
        self.readiness = Readiness(self.probe, lambda: self.parking.look())
        self.fleet = Fleet(
            [
                Member(endpoint, client)
                for endpoint, client in zip(spec.workers, workers, strict=True)
            ],
            self.ledger,
            vocabulary_digest=vocabulary.digest,
            load_interval_s=interval_s,
            changed=self._workers_changed,
            reported=self._reported,
        )
        self.parking = Parking(self.fleet, self.readiness)
        self.observations = Observations(spec.name, started_s=clock.now_s())
        self.feeds = Feeds(workers, pools, evicted=None if planner is None else self._evicted)
        self.admission = Admission(spec.max_in_flight)
        self._pool_key = pool_key_of(call_key)
        self.sessions = Sessions(
            vocabulary,
            self._pool_key,
            max_sessions=MAX_SESSIONS,
            max_ids=MAX_SESSION_IDS,
        )
        admits = spec.sessions.enabled
        self.gate = SessionGate(
            spec.sessions,
            self._session_memory,
            enabled=isinstance(spec.policy, Cost) if admits is None else admits,
        )
        self.hints = Hints(self.feeds.pool)
        self.recorder = (
            None if spec.record is None else Recorder(spec.record, started_s=clock.now_s())
        )
        self.turns = Turns(
            self.gate,
            Pauses(self.insight.gaps, self.hints.tell, self._pseudonym),
            fleet=self.fleet,
            feeds=self.feeds,
            insight=self.insight,
            name=self._pseudonym,
            hold_s=spec.sessions.hold,
            recording=None if self.recorder is None else self.recorder.sessions,
        )
        self.dispatcher = Dispatcher(
            router=spec.name,
            fleet=self.fleet,
            ledger=self.ledger,
            decisions=Decisions(
                policy, self.insight, self._tell, explains=spec.explain is not None
            ),
            look=self._look,
            retries=spec.retries,
            tasks=tasks,
        )

    def job(
        self,
        turn: Turn,
        *,
        trace_id: str,
        sampling: Sampling,
        grammar: Grammar | None = None,
        grammar_required: bool = False,
        urgency: RequestClass = RequestClass.INTERACTIVE,
        phase: Phase = Phase.TOOL,
        deadline_s: float | None = None,
    ) -> Job:
        """The work that a turn asks for, due by `deadline_s`, or `request_deadline` from now."""
        distinct = self.fleet.roster.distinct
        keys = {geometry: self.sessions.keys(turn, geometry) for geometry in distinct}
        fronts = fronts_of(turn.ends.values(), keys)
        if not turn.continues:
            self.insight.started(fronts, now_s=clock.now_s())
        return Job(
            trace_id=trace_id,
            tenant=turn.session.tenant,
            ids=turn.ids,
            sampling=sampling,
            grammar=grammar,
            grammar_required=grammar_required,
            session=self._pseudonym(turn.session.id),
            owners=turn.session.owners,
            keys=keys,
            starts_session=not turn.continues,
            urgency=urgency,
            phase=phase,
            moved_s=turn.session.moved_s,
            fronts=fronts,
            deadline_s=clock.now_s() + self.spec.request_deadline
            if deadline_s is None
            else deadline_s,
            retry_window_s=self.spec.retry_window,
        )

    async def generate(self, turn: Turn, job: Job) -> AsyncGenerator[GenerateChunk, None]:
        """`Dispatcher.run`, and what came out becomes the session's history.

        Also when the reader stops early: what was sampled until then is in the cache.
        """
        output: list[int] = []
        try:
            async with aclosing(self._observed(job)) as chunks:
                async for chunk in chunks:
                    output.extend(chunk.ids)
                    yield chunk
        finally:
            plan = job.journey.plan
            if plan is not None and output and turn.ends:
                self.sessions.end(
                    turn, output, owners=plan.workers, keys=job.keys, now_s=clock.now_s()
                )

    async def _observed(self, job: Job) -> AsyncGenerator[GenerateChunk, None]:
        """`Dispatcher.run`, with its times noted for the signals."""
        seen = self.observations
        last_s: float | None = None
        reader_s = 0.0
        with seen.following(job.journey, now_s=clock.now_s()):
            async with aclosing(self.dispatcher.run(job)) as chunks:
                async for chunk in chunks:
                    came_s = clock.now_s()
                    if last_s is None:
                        seen.began(job.journey, now_s=came_s)
                    else:
                        gap_s, count = came_s - last_s, len(chunk.ids)
                        seen.gap(gap_s, tokens=count, reader_s=reader_s, now_s=came_s)
                    plan = job.journey.plan
                    if plan is not None:
                        seen.sampled(plan.decode, len(chunk.ids), now_s=came_s)
                    yield chunk
                    last_s, reader_s = came_s, clock.now_s() - came_s

    def signals(self) -> RouterSignals:
        """What an operator needs to know to scale, drain and give up workers."""
        return self.observations.signals(
            self.fleet,
            self.ledger,
            self.feeds,
            self.parking,
            self.admission,
            self.gate,
            now_s=clock.now_s(),
        )

    def _workers_changed(self) -> None:
        present = {
            member.name: member.info.epoch
            for member in self.fleet.members
            if member.info is not None
        }
        for name, epoch in self._epochs.items():
            if present.get(name) != epoch:
                self.insight.gone(name)
        self._epochs = present
        self.readiness.wake()
        self.parking.look()
        self.gate.wake()

    def _session_memory(self) -> int | None:
        """Tokens of KV that sessions share; None where it bounds them no more, or nobody knows.

        What workers evict a pool keeps: with one, sessions beyond the workers' memory cost reads,
        and holding them back costs far more. Whoever enables admission bounds them anyway.
        """
        if self.spec.sessions.enabled is None and self.feeds.pooled:
            return None
        return kv_capacity(self.fleet, self.ledger)

    async def probe(self) -> None:
        """Let a worker generate one id for `/readyz`; raises what a client would get."""
        ids = tuple(self.vocabulary.encode_text("Is anybody there?"))
        job = Job(
            trace_id=PROBE_TRACE,
            tenant=PROBE_TENANT,
            ids=ids,
            sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),
            grammar=None,
            grammar_required=False,
            session=PROBE_TENANT.encode(),
            owners=(),
            keys={},
            deadline_s=clock.now_s() + PROBE_S,
        )
        async with aclosing(self.dispatcher.run(job)) as chunks:
            async for chunk in chunks:
                if chunk.finish is not None and chunk.finish is not FinishReason.CANCELLED:
                    return

    async def forget_silent(self) -> None:
        """Give up sessions that nobody came back to, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRE_S)
            self.turns.expire()

    def _reported(self, info: WorkerInfo, report: LoadReport) -> None:
        now_s = clock.now_s()
        self.insight.reported(info, report, now_s=now_s)
        view = self.fleet.prepare(info.name, self._seer(0, now_s), now_s=now_s)
        if view is not None and self.insight.planner is not None:
            self.insight.planner.columns.see(view)

    def _seer(self, need_tokens: int, now_s: float) -> Seer:
        """What decisions of now see of workers, for a request that may want so much space."""
        return partial(
            self.insight.all_facts, held=self.feeds.held, need_tokens=need_tokens, now_s=now_s
        )

    def _evicted(self, worker: str, keys: Sequence[bytes]) -> None:
        self.insight.evicted(worker, keys, now_s=clock.now_s())

    def _tell(self, decision: Decision, outcome: Outcome) -> None:
        if self.explain is not None and decision.request != PROBE_TRACE:
            self.explain.explain(decision, outcome)

    def _pseudonym(self, session: bytes) -> bytes:
        """The session's name in decisions and their log; the same in every replica."""
        return hashlib.blake2b(session, key=self._pool_key, digest_size=16).digest()

    def _look(self, job: Job, now_s: float) -> tuple[RequestView, list[WorkerView]]:
        geometries, nodes, pieces, distinct = self.fleet.roster
        if not all(one in job.keys for one in distinct):
            # a worker that appeared since has nothing cached for it
            geometries = {name: one for name, one in geometries.items() if one in job.keys}
        found = self.feeds.cached_tokens(geometries, job.keys, nodes, pieces)
        cached, pooled = found.own, found.pooled
        self.insight.promised(job.fronts, cached, now_s=now_s)
        need_tokens = len(job.ids) + job.sampling.max_tokens
        seer = self._seer(need_tokens, now_s)
        views = self.fleet.views(cached, pooled, seer, now_s=now_s, checkpoints=found.checkpoints)
        asked = self.insight.request(job.view(now_s=now_s), job.fronts, cached, now_s=now_s)
        if found.pools and any(view.fetches for view in views):
            asked = replace(asked, sources=found.pools)
        return asked, views


@asynccontextmanager
async def open_router(spec: RouterSpec, vocabulary: Vocabulary) -> AsyncIterator[Router]:
    """A router that follows its workers and pools until the block ends.

    Raises ConfigError if the call key or `pools_ca` can't be read.
    """
    call_key = read_call_key(spec.call_key)
    trust = PoolTrust(spec.pools_ca, spec.pools_name)
    async with (
        open_http() as http,
        asyncio.TaskGroup() as tasks,
    ):
        router = Router(spec, vocabulary, http=http, call_key=call_key, trust=trust, tasks=tasks)
        watchers = [
            *(
                tasks.create_task(router.fleet.watch(member), name=f"watch {member.name}")
                for member in router.fleet.members
            ),
            *(
                tasks.create_task(router.feeds.follow(owner), name=f"follow {owner}")
                for owner in router.feeds.owners
            ),
            tasks.create_task(router.readiness.watch(), name="readiness"),
            tasks.create_task(router.gate.watch(), name="session gate"),
            tasks.create_task(router.hints.run(), name="hints"),
            tasks.create_task(router.forget_silent(), name="forget silent sessions"),
        ]
        if router.explain is not None:
            watchers.append(tasks.create_task(router.explain.run(), name="explain"))
        if router.recorder is not None:
            watchers.append(tasks.create_task(router.recorder.run(), name="record"))
        if spec.fleet is not None:
            membership = Membership(
                router.fleet,
                router.feeds,
                router.ledger,
                tasks,
                lambda name, url: PeerClient(http, name, url, call_key, trust=trust),
                linger_s=spec.request_deadline,
                told=lambda found: router.parking.allow(found.wake),
            )
            watchers.append(
                tasks.create_task(membership.watch(spec.fleet), name="watch the fleet's file")
            )
        try:
            yield router
        finally:
            for watcher in watchers:
                watcher.cancel()
