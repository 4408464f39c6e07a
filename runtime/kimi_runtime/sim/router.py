"""The simulated router: production's index, ledger, insight and decisions over virtual time. Pure.

It knows the workers as a real one does: by their feeds, by load reports that come every
`load_interval_s`, and by what it sent itself. Nothing here knows which policy decides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kimi_runtime.router.decisions import Decision, Decisions
from kimi_runtime.router.insight import Front, Insight, kind_of
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.policies import open_policy, planner_of
from kimi_runtime.router.sight import Sight
from kimi_runtime.router.view import KvSource, RequestView, WorkerView
from kimi_runtime.sim.cluster import LAYOUT, REVISION, Cluster
from kimi_runtime.sim.features import Features
from kimi_runtime.sim.timeline import Timer
from kimi_runtime.sim.work import Work
from kimi_runtime.sim.worker import SimWorker
from kimi_runtime.spec.router import PolicySpec
from kimi_runtime.spec.worker import Capabilities, Role, WorkerInfo
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.index import Index

ROUTER = "router"
STALE_INTERVALS = 5
FEED_INTERVAL_S = 0.05
"""How late changes are heard of, at most, as in production."""


@dataclass(slots=True)
class Answer:
    """Whose tokens come, who is to hear of more than the first, and how many were told."""

    work: Work
    sampled: Callable[[int], None]
    told: int = 0


@dataclass(slots=True)
class Known:
    """What the router keeps of one worker process."""

    sight: Sight
    answers: dict[str, Answer] = field(default_factory=dict)
    """Those on their way, by name."""
    timer: Timer | None = None
    """When its next load report comes; None while it has nothing to do and would say the same."""


class SimRouter:
    """Decides for requests, and keeps what it knows up to date."""

    def __init__(self, cluster: Cluster, policy: PolicySpec, features: Features) -> None:
        self._cluster, self._timeline = cluster, cluster.timeline
        self._interval_s = cluster.spec.load_interval_s
        self.features = features
        self.policy = open_policy(policy)
        self.insight = Insight(planner_of(self.policy), load_interval_s=self._interval_s)
        self.decisions = Decisions(self.policy, self.insight)
        self.ledger = Ledger(ROUTER, stale_after_s=STALE_INTERVALS * self._interval_s)
        self.index = Index(max_owners=8192)
        self.decided = 0
        self._known: dict[str, Known] = {}
        self._sources: dict[str, KvSource] = {}
        """What was last found in each pool."""
        self._held: dict[str, int] = {}
        """Blocks that workers hold, where their feeds can be trusted: as of the newest round."""
        self._lost: set[str] = set()
        self._followed_s = float("-inf")

    def decide(
        self,
        name: str,
        request: RequestView,
        keys: Sequence[bytes],
        *,
        attempt: int = 0,
        fronts: Sequence[Front] = (),
    ) -> Decision:
        """Plan a request whose prompt's full blocks have these keys; DEFER is a plan too.

        Raises what the policy raises: Unavailable, Overloaded.
        """
        now_s = self._timeline.now_s
        asked, views = self.look(request, keys, fronts)
        self.decided += 1
        return self.decisions.decide(
            name, asked, views, attempt=attempt, fronts=fronts, now_s=now_s
        )

    def look(
        self, request: RequestView, keys: Sequence[bytes], fronts: Sequence[Front] = ()
    ) -> tuple[RequestView, list[WorkerView]]:
        """The request, and all workers for it, as they are known now."""
        now_s = self._timeline.now_s
        self._follow_all(now_s)
        held, states = self.index.prefix_runs(keys), self._states(keys)
        workers, size = self._cluster.workers, self._cluster.spec.block_tokens
        cached = {name: held.get(name, 0) * size for name in workers}
        if self.features.siblings:
            self.insight.promised(fronts, cached, now_s=now_s)
        need_tokens = request.prompt_tokens + request.max_tokens
        views = self._views(cached, held, states, need_tokens)
        if self.features.replication:
            request = self.insight.request(request, fronts, cached, now_s=now_s)
        return self._with_sources(request, held, states), views

    def _states(self, keys: Sequence[bytes]) -> dict[str, tuple[int, ...]] | None:
        """Positions of state checkpoints by owner; None if the model has no states."""
        pools, size = self._cluster.pools, self._cluster.spec.block_tokens
        pieces = next((pool.state_pieces for pool in pools.values()), 0)
        if not self._cluster.state_bytes:
            return None
        behind = self.index.checkpoints(keys, pieces) if pieces else {}
        return {name: tuple(count * size for count in counts) for name, counts in behind.items()}

    def sent(self, worker: SimWorker) -> None:
        """A request is about to go to `worker`: from now on it reports again."""
        known = self._of(worker)
        if known.timer is None:
            self._report(worker)

    def answering(
        self,
        worker: SimWorker,
        name: str,
        work: Work,
        sampled: Callable[[int], None],
    ) -> None:
        """An answer has begun there: `sampled` is told of what comes after its first token."""
        self._of(worker).answers[name] = Answer(work, sampled)

    def answered(self, worker: SimWorker, name: str) -> int:
        """The answer ended; how many of its tokens were already heard of."""
        answer = self._of(worker).answers.pop(name, None)
        return 0 if answer is None else answer.told

    def lose(self, worker: str) -> None:
        """A request found the worker dead, or it left."""
        self._lost.add(worker)
        known = self._known.pop(worker, None)
        if known is not None and known.timer is not None:
            known.timer.cancel()
        self.ledger.lost(worker)
        self.index.forget(worker)
        self._held.pop(worker, None)
        self.insight.gone(worker)

    def find(self, worker: str) -> None:
        """A worker is there, new or again."""
        self._lost.discard(worker)
        self._known.pop(worker, None)  # it is another process

    def kind(self, worker: SimWorker) -> str:
        """The kind of workers whose speeds it has."""
        return kind_of(self._of(worker).sight.info)

    # load reports

    def _of(self, worker: SimWorker) -> Known:
        known = self._known.get(worker.name)
        if known is None:
            info, streams = _info(worker, self._cluster), self._cluster.spec.streams
            sight = Sight(worker.name, info, reads_pools=True, streams=streams)
            known = self._known[worker.name] = Known(sight)
        return known

    def _report(self, worker: SimWorker) -> None:
        """A load report comes, and the next one is due unless it would say the same."""
        known, now_s = self._of(worker), self._timeline.now_s
        known.timer = None
        if worker.failed or self._cluster.workers.get(worker.name) is not worker:
            return
        worker.sync()
        for answer in known.answers.values():  # production hears of each as it comes
            made = answer.work.made - 1
            if made != answer.told:
                answer.sampled(made - answer.told)
                answer.told = made
        report = worker.report()
        if self.ledger.report(worker.name, report, now_s=now_s):
            self.insight.reported(known.sight.info, report, now_s=now_s)
        known.timer = self._timeline.after(self._interval_s, partial(self._due, worker))

    def _due(self, worker: SimWorker) -> None:
        if worker.work or self.ledger.in_flight(worker.name):
            self._report(worker)
            return
        known = self._of(worker)
        self._report(worker)
        if known.timer is not None:
            known.timer.cancel()
            known.timer = None

    # feeds

    def _follow_all(self, now_s: float) -> None:
        if now_s < self._followed_s + FEED_INTERVAL_S:
            return  # an owner sends what changed within the interval at its end
        self._followed_s = now_s
        for worker in self._cluster.workers.values():
            if worker.failed:
                continue
            worker.sync()
            self._follow(worker.name, worker.feed, now_s)
            known = self._of(worker)
            if known.timer is None:
                # idle: what it said last still holds, as the reports that are left out would say
                report = worker.report()
                self.ledger.report(worker.name, report, now_s=now_s)
                self.insight.reported(known.sight.info, report, now_s=now_s)
        for pool in self._cluster.pools.values():
            self._follow(pool.name, pool.feed, now_s)

    def _follow(self, owner: str, feed: FeedLog, now_s: float) -> None:
        epoch, after = self.index.resume_point(owner)
        if epoch == feed.epoch and after == feed.seq:
            return
        if not feed.resumes(epoch, after):
            self.index.apply(owner, feed.hello())
            for page in feed.snapshot():
                self.index.apply(owner, page)
            after = feed.seq
        learns = self.insight.planner is not None and owner in self._cluster.workers
        while after < feed.seq:
            changes = feed.changes_after(after)
            if changes is None or not self.index.take(owner, changes):
                break
            after += len(changes.events)
            if learns and (gone := changes.removed):
                self.insight.evicted(owner, gone, now_s=now_s)
        held = self.index.held(owner)
        if held is None:
            self._held.pop(owner, None)
        else:
            self._held[owner] = held

    # views

    def _with_sources(
        self,
        request: RequestView,
        held: Mapping[str, int],
        states: Mapping[str, tuple[int, ...]] | None,
    ) -> RequestView:
        spec, pools = self._cluster.spec, self._cluster.pools
        if not spec.remote_pools or not pools:
            return request
        sources = []
        for name, pool in pools.items():
            if blocks := held.get(name):
                tokens = blocks * spec.block_tokens
                at = None if states is None else states.get(name, ())
                last = self._sources.get(name)
                if last is None or last.tokens != tokens or last.checkpoints != at:
                    last = self._sources[name] = KvSource(name, pool.node, "dram", tokens, at)
                sources.append(last)
        return replace(request, sources=tuple(sources)) if sources else request

    def _views(
        self,
        cached: Mapping[str, int],
        held: Mapping[str, int],
        states: Mapping[str, tuple[int, ...]] | None,
        need_tokens: int,
    ) -> list[WorkerView]:
        now_s, size = self._timeline.now_s, self._cluster.spec.block_tokens
        workers = self._cluster.workers
        loads = self.ledger.loads(workers, now_s=now_s)
        all_known = self._known
        known = [all_known.get(name) or self._of(worker) for name, worker in workers.items()]
        facts = self.insight.all_facts(
            [(one.sight.info, loads[one.sight.info.name]) for one in known],
            held=self._held.get,
            need_tokens=need_tokens,
            now_s=now_s,
        )
        views = []
        for (name, worker), one, told in zip(workers.items(), known, facts, strict=True):
            load = loads[name]
            views.append(
                one.sight.of(
                    load,
                    told,
                    cached[name],
                    held.get(worker.node, 0) * size,
                    None if states is None else states.get(name, ()),
                    not worker.failed and name not in self._lost,
                    load.draining or worker.draining,
                )
            )
        return views


def _roles(worker: SimWorker) -> tuple[Role, ...]:
    return (worker.role,) if worker.role is not Role.BOTH else tuple(Role)


def _info(worker: SimWorker, cluster: Cluster) -> WorkerInfo:
    """What the worker would tell of itself."""
    spec = cluster.spec
    able = Capabilities(
        roles=_roles(worker),
        per_request_roles=worker.role is Role.BOTH,
        fetch_source=spec.peers,
        layer_streaming=spec.streams > 1,
        mid_decode_move=False,
        grammar=True,
        logprobs=True,
    )
    return WorkerInfo(
        name=worker.name,
        role=worker.role,
        engine="sim",
        epoch=worker.epoch,
        revision=REVISION,
        node=worker.node,
        model=spec.model,
        model_digest="sim",
        layout=LAYOUT,
        vocabulary_digest="sim",
        block_tokens=spec.block_tokens,
        block_bytes=spec.block_tokens * cluster.timing.kv_token_bytes,
        max_context_tokens=spec.max_context_tokens,
        total_blocks=cluster.total_blocks,
        state_bytes=cluster.state_bytes,
        max_running=spec.max_running,
        capabilities=able,
    )
