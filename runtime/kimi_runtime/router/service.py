"""The router as one object: what it owns, and how a turn of a session becomes an answer."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import aiohttp

from kimi_runtime import clock
from kimi_runtime.auth import read_call_key
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.router.admission import Admission
from kimi_runtime.router.client import PeerClient
from kimi_runtime.router.discovery import Fleet, Member
from kimi_runtime.router.dispatch import Dispatcher, Job
from kimi_runtime.router.follow import Feeds
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.membership import Membership
from kimi_runtime.router.observations import Observations
from kimi_runtime.router.parking import Parking
from kimi_runtime.router.policies import open_policy
from kimi_runtime.router.readiness import Readiness
from kimi_runtime.router.sessions import Sessions, Turn
from kimi_runtime.router.view import WorkerView
from kimi_runtime.spec.request import FinishReason, GenerateChunk, Grammar, Sampling
from kimi_runtime.spec.router import RouterSpec
from kimi_runtime.spec.signals import RouterSignals
from kimi_runtime.umbp.keys import pool_key_of

STALE_INTERVALS = 5
"""A load report older than this many intervals says nothing about now."""
MAX_SESSIONS = 100_000
MAX_SESSION_IDS = 64_000_000
"""256 MB of ids; 640 sessions of 100k tokens."""
PROBE_TENANT = "readyz"
PROBE_S = 10.0


class Router:
    """Sessions, workers and the dispatcher between them. Made by `open_router`."""

    def __init__(
        self,
        spec: RouterSpec,
        vocabulary: Vocabulary,
        *,
        http: aiohttp.ClientSession,
        call_key: bytes,
        tasks: asyncio.TaskGroup,
    ) -> None:
        workers = [PeerClient(http, one.name, one.url, call_key) for one in spec.workers]
        pools = [PeerClient(http, one.name, one.url, call_key) for one in spec.pools]
        interval_s = spec.load_interval
        self.spec, self.vocabulary = spec, vocabulary
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
        )
        self.parking = Parking(self.fleet, self.readiness)
        self.observations = Observations(spec.name, started_s=clock.now_s())
        self.feeds = Feeds(workers, pools)
        self.admission = Admission(spec.max_in_flight)
        self.sessions = Sessions(
            vocabulary,
            pool_key_of(call_key),
            max_sessions=MAX_SESSIONS,
            max_ids=MAX_SESSION_IDS,
        )
        self.dispatcher = Dispatcher(
            router=spec.name,
            fleet=self.fleet,
            ledger=self.ledger,
            policy=open_policy(spec.policy),
            views=self._views,
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
    ) -> Job:
        """The work that a turn asks for, due `request_deadline` from now."""
        geometries = set(self.fleet.geometries.values())
        return Job(
            trace_id=trace_id,
            tenant=turn.session.tenant,
            ids=turn.ids,
            sampling=sampling,
            grammar=grammar,
            grammar_required=grammar_required,
            session=turn.session.id,
            owners=turn.session.owners,
            keys={geometry: self.sessions.keys(turn, geometry) for geometry in geometries},
            deadline_s=clock.now_s() + self.spec.request_deadline,
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
                self.sessions.end(turn, output, owners=plan.workers, keys=job.keys)

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
            now_s=clock.now_s(),
        )

    def _workers_changed(self) -> None:
        self.readiness.wake()
        self.parking.look()

    async def probe(self) -> None:
        """Let a worker generate one id for `/readyz`; raises what a client would get."""
        ids = tuple(self.vocabulary.encode_text("Is anybody there?"))
        job = Job(
            trace_id="readyz",
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

    def _views(self, job: Job, now_s: float) -> list[WorkerView]:
        geometries = {
            name: geometry
            for name, geometry in self.fleet.geometries.items()
            if geometry in job.keys  # a worker that appeared since has nothing cached for it
        }
        cached, pooled = self.feeds.cached_tokens(geometries, job.keys, self.fleet.nodes)
        return self.fleet.views(cached, pooled, now_s=now_s)


@asynccontextmanager
async def open_router(spec: RouterSpec, vocabulary: Vocabulary) -> AsyncIterator[Router]:
    """A router that follows its workers and pools until the block ends.

    Raises ConfigError if the call key can't be read.
    """
    call_key = read_call_key(spec.call_key)
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as tasks,
    ):
        router = Router(spec, vocabulary, http=http, call_key=call_key, tasks=tasks)
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
        ]
        if spec.fleet is not None:
            membership = Membership(
                router.fleet,
                router.feeds,
                router.ledger,
                tasks,
                lambda name, url: PeerClient(http, name, url, call_key),
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
