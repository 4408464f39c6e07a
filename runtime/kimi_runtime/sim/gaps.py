"""What the simulated router does while a session's tool runs or a person thinks. Pure.

It learns how long gaps last, and decides with production's cores: whether KV stays in GPU memory
(`router.tool_gap`), is read back early, or moves with its session (`sim.moving`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kimi_runtime.router.cost.planner import Planner
from kimi_runtime.router.estimate.gaps import Curve, Gaps
from kimi_runtime.router.tool_gap import Action, Gap, TierPrice, verdict
from kimi_runtime.sim.cluster import Cluster
from kimi_runtime.sim.content import Content
from kimi_runtime.sim.copying import Copies, Copy
from kimi_runtime.sim.features import Features
from kimi_runtime.sim.pool import SimPool
from kimi_runtime.sim.router import SimRouter
from kimi_runtime.sim.timeline import Timer
from kimi_runtime.sim.worker import SimWorker

GPU = 0
POOL = 1
LEAST_ASK_S = 0.05


@dataclass(slots=True, eq=False)
class Away:
    """A session between two turns. `own_from` is the first of its blocks that no other shares."""

    session: bytes
    tenant: str
    tool: str
    content: Content
    own_from: int
    worker: str
    since_s: float
    turns: int
    moved_s: float | None
    moved: Callable[[str], None]
    """Told when the session has another owner."""
    expected_s: float | None = None
    timer: Timer | None = None
    fetch: Copy | None = None

    @property
    def own_keys(self) -> list[bytes]:
        """Of the blocks that only this session has."""
        return self.content.keys[self.own_from :]


@dataclass(slots=True)
class GapKeeper:
    """Decides for every session that is away. Does nothing for policies without a planner."""

    cluster: Cluster
    router: SimRouter
    copies: Copies
    features: Features
    gaps: Gaps = field(default_factory=Gaps)
    away: dict[bytes, Away] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)

    def pause(self, away: Away) -> None:
        """The session's turn is over."""
        self.away[away.session] = away
        if self.features.demote or self.features.prefetch:
            self._look(away)

    def watch(self, away: Away) -> None:
        """The same, but what it has stays as it is; only the gap is learned."""
        self.away[away.session] = away

    def back(self, session: bytes) -> None:
        """Its next turn is there."""
        away = self.away.pop(session, None)
        if away is None:
            return
        seconds = self.cluster.timeline.now_s - away.since_s
        self.gaps.observe(away.tenant, away.tool, seconds, ended=True)
        self._leave(away)

    def ended(self, away: Away) -> None:
        """The session is over: nobody comes back for what only it has."""
        planner = self.router.insight.planner
        if self.features.demote and planner is not None and away.worker:
            self._forget(away)
            self._count(Action.DROP)

    def curve(self, away: Away) -> Curve:
        """How long this gap is likely to be."""
        return self.gaps.curve(away.tenant, away.tool, expected_s=away.expected_s)

    def release(self, away: Away, worker: SimWorker) -> None:
        """Give up what the session alone has in the worker's memory."""
        worker.touch()
        worker.blocks.forget(away.own_keys)
        worker.give_back(())

    def _look(self, away: Away) -> None:
        """Decide, and ask again when the answer may be another."""
        away.timer = None
        planner, worker = self.router.insight.planner, self.cluster.workers.get(away.worker)
        if planner is None or worker is None or worker.failed:
            return
        now_s = self.cluster.timeline.now_s
        since_s, keys = now_s - away.since_s, away.content.keys
        pool = self.cluster.pools.get(worker.node)
        here = worker.blocks.held(keys) > away.own_from
        pooled = pool is not None and pool.held(keys) >= worker.blocks.held(keys)
        if not here and not pooled:
            return
        tiers = self._tiers(planner, away, worker, pool if pooled else None)
        said = verdict(
            Gap(self.curve(away), since_s, away.expected_s),
            tiers,
            GPU if here else POOL,
            recompute_s=self._recompute_s(planner, away, worker),
            idle_link_share=float(not self.cluster.links.busy(f"{worker.name}/host")),
        )
        self._count(said.action)
        if said.action in (Action.DEMOTE, Action.DROP):
            if self.features.demote:
                self._forget(away)
            if said.action is Action.DROP or not self.features.prefetch:
                return
            self._again(away, LEAST_ASK_S)
        elif said.action is Action.PREFETCH:
            if self.features.prefetch and pool is not None:
                away.fetch = self.copies.start(pool.name, worker, keys, lambda _all: None)
        else:
            self._again(away, said.ask_again_s - since_s)

    def _again(self, away: Away, after_s: float) -> None:
        if after_s < 3600.0:
            act = partial(self._look, away)
            away.timer = self.cluster.timeline.after(max(after_s, LEAST_ASK_S), act)

    def _tiers(
        self, planner: Planner, away: Away, worker: SimWorker, pool: SimPool | None
    ) -> list[TierPrice]:
        now_s, spec = self.cluster.timeline.now_s, self.cluster.spec
        space_s = len(away.own_keys) * self.router.insight.space.per_block_second_s(
            worker.name, blocks=worker.blocks.total, now_s=now_s
        )
        tiers = [TierPrice("hbm", 0.0, space_s)]
        if pool is not None:
            size = len(away.own_keys) * spec.block_tokens * self.cluster.timing.kv_token_bytes
            took = planner.flows.seconds((f"{worker.name}/host",), size)
            reload_s = size * pool.load_s_per_byte if took is None else took.mean
            tiers.append(TierPrice("dram", reload_s, 0.0))
        return tiers

    def _recompute_s(self, planner: Planner, away: Away, worker: SimWorker) -> float:
        curves = planner.models.speeds(self.router.kind(worker)).curves(
            now_s=self.cluster.timeline.now_s
        )
        fixed_s, token_s, pair_s = curves.prefill.coefficients
        tokens = away.content.tokens
        new = tokens - away.own_from * self.cluster.spec.block_tokens
        return float(fixed_s + new * (token_s + pair_s * (tokens - new / 2)))

    def _forget(self, away: Away) -> None:
        worker = self.cluster.workers.get(away.worker)
        if worker is not None and not worker.failed:
            self.release(away, worker)

    def _leave(self, away: Away) -> None:
        if away.timer is not None:
            away.timer.cancel()
        if away.fetch is not None:
            self.copies.cancel(away.fetch)

    def _count(self, action: Action) -> None:
        self.actions[action.value] = self.actions.get(action.value, 0) + 1
