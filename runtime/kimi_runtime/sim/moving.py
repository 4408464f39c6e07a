"""Sessions that move with their KV to another worker while they are away. Pure.

Production's order of steps (`router.moves`), over the simulated links: PREPARE is the room that a
copy reserves, VERIFY costs no time, the owner is swapped only if nobody served the session since,
and RELEASE gives the source's space back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kimi_runtime.router.cost.planner import Planner
from kimi_runtime.router.moves import Move, Offer, Owners, Step, may_start, worth_moving
from kimi_runtime.router.plan import Mode
from kimi_runtime.router.view import KvSource, RequestView, WorkerView
from kimi_runtime.sim.cluster import Cluster
from kimi_runtime.sim.copying import Copies, Copy
from kimi_runtime.sim.features import Features
from kimi_runtime.sim.gaps import Away, GapKeeper
from kimi_runtime.sim.router import SimRouter

USUAL_APPEND_TOKENS = 900
LEAST_LEAD = 2
"""Requests more in flight than elsewhere, before a move is looked into at all."""
MAX_TURNS_LEFT = 3.0
"""What one worker has to do more than another now, says nothing of the turns after these."""
MOVE_AGAIN_S = 30.0
DEADLINE_S = 10.0


@dataclass(slots=True, eq=False)
class _Moving:
    away: Away
    move: Move
    here_s: float
    copy: Copy | None = None
    ends_s: float = 0.0
    waits: Callable[[], None] | None = None


@dataclass(slots=True)
class Mover:
    """Moves of sessions between workers that serve whole requests."""

    cluster: Cluster
    router: SimRouter
    copies: Copies
    keeper: GapKeeper
    features: Features
    owners: Owners = field(default_factory=Owners)
    done: int = 0
    aborted: int = 0
    _moving: dict[bytes, _Moving] = field(default_factory=dict)
    _tokens: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    """Of every session that goes on: its owner and how long its context is."""

    def served(self, session: bytes, worker: str, tokens: int) -> None:
        """A worker has answered the session's turn."""
        self.owners.claim(session, worker)
        self._tokens[session] = worker, tokens

    def ended(self, session: bytes) -> None:
        """The session is over."""
        self._tokens.pop(session, None)

    def paused(self, away: Away) -> None:
        """The session waits for its tool: move it if that pays."""
        planner, owner = self.router.insight.planner, self.owners.of(away.session)
        source = self.cluster.workers.get(away.worker)
        if planner is None or owner is None or source is None or source.failed:
            return
        now_s = self.cluster.timeline.now_s
        leaving = source.draining
        if not leaving and not self._may_move(away, now_s):
            return
        found = self._target(planner, away, leaving=leaving)
        if found is None:
            return
        target, offer, here_s = found
        gap = self.keeper.curve(away)
        if not worth_moving(offer, gap, since_s=now_s - away.since_s, draining=leaving):
            return
        if not may_start((one.move for one in self._moving.values()), source.name, target):
            return
        move = Move(away.session, owner, target, now_s=now_s, deadline_s=DEADLINE_S)
        moving = self._moving[away.session] = _Moving(away, move, here_s)
        moving.ends_s = now_s + offer.copy_s
        self._copy(moving)

    def asked(self, session: bytes, go: Callable[[], None]) -> None:
        """The session's next turn is there: `go` is called now, or when its move is over."""
        moving = self._moving.get(session)
        if moving is None:
            go()
            return
        now_s = self.cluster.timeline.now_s
        left_s = max(moving.ends_s - now_s, 0.0)
        if moving.move.asked(there_s=left_s, here_s=moving.here_s, now_s=now_s):
            moving.waits = go
            return
        self._over(moving)
        go()

    def drained(self, worker: str) -> None:
        """The worker has to go: sessions that are away leave it, one after the other."""
        for away in list(self.keeper.away.values()):
            if away.worker == worker:
                self.paused(away)

    def lost(self, worker: str) -> None:
        """The worker is gone with what it had."""
        self.owners.lose(worker)

    def _may_move(self, away: Away, now_s: float) -> bool:
        if away.moved_s is not None and now_s - away.moved_s < MOVE_AGAIN_S:
            return False
        ledger = self.router.ledger
        loads = [ledger.in_flight(name) for name in self.cluster.workers]
        return ledger.in_flight(away.worker) >= min(loads) + LEAST_LEAD

    def _target(
        self, planner: Planner, away: Away, *, leaving: bool
    ) -> tuple[str, Offer, float] | None:
        """The best other worker, as the planner prices the next turn if its context were there."""
        tokens = away.content.tokens
        asked = RequestView(tokens + USUAL_APPEND_TOKENS, 4096, away.session, tenant=away.tenant)
        _, views = self.router.look(asked, away.content.keys)
        here = next(view for view in views if view.name == away.worker)
        held = here.cached_tokens
        if not held:
            return None
        alike = [replace(one, cached_tokens=held, draining=False) for one in views if one.ready]
        usable = {one.name for one in views if one.usable}
        now_s = self.cluster.timeline.now_s
        decided = planner.plan(asked, alike, now_s=now_s, exhaustive=True)
        priced = {
            one.decode: one
            for one in sorted(decided.explanation.candidates, key=lambda one: -one.cost_s)
            if one.mode is Mode.EXTEND
        }
        others = [one for name, one in priced.items() if name in usable - {here.name}]
        if here.name not in priced or not others:
            return None
        there = min(others, key=lambda one: (one.cost_s, one.decode))
        target = next(view for view in views if view.name == there.decode)
        cost_here = priced[here.name]
        links = planner.routes.to_worker(KvSource(here.name, here.node, "hbm", held), target)
        size = (held - target.cached_tokens) * self.cluster.timing.kv_token_bytes
        took = planner.flows.seconds(links, max(size, 0))
        if took is None:
            return None
        turns = min(float(away.turns), MAX_TURNS_LEFT)
        var = cost_here.first_token_var + there.first_token_var
        offer = Offer(
            turns_left=turns,
            saved_s_per_turn=cost_here.cost_s - there.cost_s,
            copy_s=took.mean if self.features.moves_keep_context else 0.0,
            link_delay_s=planner.flows.delay_s(links, max(size, 0)),
            risk_s=turns * math.sqrt(var),
            load_here_s=self._load(here),
            load_there_s=self._load(target),
            session_load_s=float(tokens),
        )
        return target.name, offer, cost_here.terms.first_token_s

    def _load(self, worker: WorkerView) -> float:
        """Context tokens of the sessions that are at home there: what its turns will want."""
        return float(sum(tokens for owner, tokens in self._tokens.values() if owner == worker.name))

    def _copy(self, moving: _Moving) -> None:
        move, away = moving.move, moving.away
        now_s = self.cluster.timeline.now_s
        move.finished(Step.PREPARE, now_s=now_s)
        target = self.cluster.workers[move.target]
        keys = away.content.keys
        if not self.features.moves_keep_context or target.blocks.held(keys) == len(keys):
            self._copied(moving, True)
            return
        copy = self.copies.start(
            move.source.worker, target, keys, lambda complete: self._copied(moving, complete)
        )
        if copy is None:
            move.abort("there is no room for it, or nothing to copy")
            self._over(moving)
            return
        moving.copy = copy
        moving.ends_s = now_s + copy.size_bytes / self.cluster.copies_rate(target)

    def _copied(self, moving: _Moving, complete: bool) -> None:
        move, away, now_s = moving.move, moving.away, self.cluster.timeline.now_s
        if not complete:
            move.abort("a worker is gone")
        move.finished(Step.COPY, now_s=now_s)
        move.finished(Step.VERIFY, now_s=now_s)
        if move.swap(self.owners, now_s=now_s):
            source = self.cluster.workers.get(move.source.worker)
            if source is not None and not source.failed:
                self.keeper.release(away, source)
            move.finished(Step.RELEASE, now_s=now_s)
            away.worker, away.moved_s = move.target, now_s
            self._tokens[away.session] = move.target, away.content.tokens
            away.moved(move.target)
        self._over(moving)

    def _over(self, moving: _Moving) -> None:
        self._moving.pop(moving.away.session, None)
        if moving.move.drop_copy:
            self.aborted += 1
            if moving.copy is not None:
                self.copies.cancel(moving.copy)
        else:
            self.done += 1
            source = self.cluster.workers.get(moving.move.source.worker)
            if source is not None and source.draining:
                self.drained(source.name)
        waits, moving.waits = moving.waits, None
        if waits is not None:
            waits()
