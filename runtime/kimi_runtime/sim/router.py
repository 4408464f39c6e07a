"""The simulated router: production's index, ledger and policy over virtual time. Pure.

It knows the workers as a real one does: by their feeds, by load reports that are up to
`load_interval_s` old, and by what it sent itself. Nothing here knows which policy decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_runtime.router.ledger import Ledger, Load
from kimi_runtime.router.plan import Plan
from kimi_runtime.router.policies import open_policy
from kimi_runtime.router.view import KvSource, RequestView, WorkerView
from kimi_runtime.sim.cluster import LAYOUT, REVISION, Cluster
from kimi_runtime.sim.feedback import feedback_of
from kimi_runtime.sim.worker import SimWorker
from kimi_runtime.spec.router import PolicySpec
from kimi_runtime.spec.worker import Role
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.index import Index

ROUTER = "router"
STALE_INTERVALS = 5


@dataclass(frozen=True, slots=True)
class Seen:
    """One decision: the plan, and what it was made from."""

    plan: Plan
    views: dict[str, WorkerView]


class SimRouter:
    """Decides for requests, and keeps what it knows up to date."""

    def __init__(self, cluster: Cluster, policy: PolicySpec) -> None:
        self._cluster = cluster
        self.policy = open_policy(policy)
        self.feedback = feedback_of(self.policy)
        interval_s = cluster.spec.load_interval_s
        self.ledger = Ledger(ROUTER, stale_after_s=STALE_INTERVALS * interval_s)
        self.index = Index(max_owners=8192)
        self.decisions = 0
        self._reported_s: dict[str, float] = {}
        self._lost: set[str] = set()

    def choose(self, request: RequestView, keys: Sequence[bytes]) -> Seen:
        """Plan a request whose prompt's full blocks have these keys.

        Raises what the policy raises: Unavailable, Overloaded.
        """
        now_s = self._cluster.timeline.now_s
        self._listen(now_s)
        held = self.index.prefix_runs(keys)
        names = list(self._cluster.workers)
        loads = self.ledger.loads(names, now_s=now_s)
        views = {
            name: self._view(self._cluster.workers[name], loads[name], held, now_s)
            for name in names
        }
        plan = self.policy.choose(
            self._with_sources(request, held), list(views.values()), now_s=now_s
        )
        self.decisions += 1
        return Seen(plan, views)

    def lose(self, worker: str) -> None:
        """A request found the worker dead, or it left."""
        self._lost.add(worker)
        self._reported_s.pop(worker, None)
        self.ledger.lost(worker)
        self.index.forget(worker)
        self.feedback.gone(worker)

    def find(self, worker: str) -> None:
        """A worker is there, new or again."""
        self._lost.discard(worker)

    def _with_sources(self, request: RequestView, held: dict[str, int]) -> RequestView:
        spec, pools = self._cluster.spec, self._cluster.pools
        if not spec.remote_pools or not pools:
            return request
        sources = tuple(
            KvSource(name, pool.node, "dram", held[name] * spec.block_tokens)
            for name, pool in pools.items()
            if held.get(name)
        )
        return _replaced(request, sources) if sources else request

    def _listen(self, now_s: float) -> None:
        """Load reports that are due, and what the feeds have told by now."""
        interval_s = self._cluster.spec.load_interval_s
        for name, worker in self._cluster.workers.items():
            if worker.failed:
                continue
            worker.sync()
            self._follow(name, worker.feed)
            if now_s - self._reported_s.get(name, float("-inf")) >= interval_s:
                self._reported_s[name] = now_s
                self.ledger.report(name, worker.report(), now_s=now_s)
        for name, pool in self._cluster.pools.items():
            self._follow(name, pool.feed)

    def _follow(self, owner: str, feed: FeedLog) -> None:
        epoch, after = self.index.resume_point(owner)
        if epoch == feed.epoch and after == feed.seq:
            return
        if not feed.resumes(epoch, after):
            self.index.apply(owner, feed.hello())
            for page in feed.snapshot():
                self.index.apply(owner, page)
            after = feed.seq
        while after < feed.seq:
            batch = feed.batch_after(after)
            if batch is None or not self.index.apply(owner, batch):
                break
            after += len(batch.events)

    def _view(
        self, worker: SimWorker, load: Load, held: dict[str, int], now_s: float
    ) -> WorkerView:
        spec, name = self._cluster.spec, worker.name
        size = spec.block_tokens
        return WorkerView(
            name=name,
            role=worker.role,
            roles=(worker.role,) if worker.role is not Role.BOTH else tuple(Role),
            revision=REVISION,
            layout=LAYOUT,
            ready=not worker.failed and name not in self._lost,
            draining=load.draining or worker.draining,
            certain=load.certain,
            waiting=load.waiting,
            running=load.running,
            queued_tokens=load.queued_tokens,
            free_blocks=load.free_blocks,
            total_blocks=self._cluster.total_blocks,
            block_tokens=size,
            max_context_tokens=spec.max_context_tokens,
            grammar=True,
            logprobs=True,
            cached_tokens=held.get(name, 0) * size,
            pool_tokens=held.get(worker.node, 0) * size,
            node=worker.node,
            age_s=0.0,
            max_running=spec.max_running,
            fetches=spec.peers,
            streams=spec.streams,
        )


def _replaced(request: RequestView, sources: tuple[KvSource, ...]) -> RequestView:
    return RequestView(
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        session=request.session,
        owners=request.owners,
        tenant=request.tenant,
        urgency=request.urgency,
        starts_session=request.starts_session,
        phase=request.phase,
        moved_ago_s=request.moved_ago_s,
        sources=sources,
    )
