"""What the simulated router does around and between the turns of sessions. Pure.

Before a turn: is there room for its session (`admission`), is it on the move (`moving`)? After it:
keep, demote, fetch early (`gaps`) or move. Every part can be left out (`features`).
"""

from collections.abc import Callable

from kimi_runtime.router.session_queue import Turn
from kimi_runtime.router.view import RequestClass
from kimi_runtime.sim.admission import Admission
from kimi_runtime.sim.cluster import Cluster
from kimi_runtime.sim.copying import Copies
from kimi_runtime.sim.features import Features
from kimi_runtime.sim.gaps import Away, GapKeeper
from kimi_runtime.sim.moving import Mover
from kimi_runtime.sim.router import SimRouter
from kimi_runtime.spec.worker import Role


class Between:
    """Told of every turn's arrival and end."""

    def __init__(self, cluster: Cluster, router: SimRouter, features: Features) -> None:
        self._cluster, self._features = cluster, features
        self.copies = Copies(cluster)
        self.keeper = GapKeeper(cluster, router, self.copies, features)
        self.mover = Mover(cluster, router, self.copies, self.keeper, features)
        self.admission: Admission | None = None
        if features.admission:
            self.admission = Admission(
                cluster.timeline, round(features.oversubscribe * self._capacity()), features.hold_s
            )

    def asked(
        self,
        session: bytes,
        tenant: str,
        *,
        tokens: int,
        urgency: RequestClass,
        continues: bool,
        go: Callable[[], None],
    ) -> None:
        """A turn arrived, after which its session has `tokens`; `go` is called when it may run."""
        self.keeper.back(session)

        def admitted() -> None:
            self.mover.asked(session, go)

        if self.admission is None:
            admitted()
        else:
            turn = Turn(session, tenant, tokens, urgency, continues=continues)
            self.admission.ask(turn, admitted)

    def paused(self, away: Away, *, shared: bool) -> None:
        """A turn ended and another will come. `shared`: its subagents use its KV meanwhile."""
        if away.worker:
            self.mover.served(away.session, away.worker, away.content.tokens)
        if self.admission is not None:
            gap = self.keeper.curve(away)
            self.admission.pause(away.session, away.content.tokens, gap)
        if shared or not away.worker:
            self.keeper.watch(away)
            return
        self.keeper.pause(away)
        if self._features.moves:
            self.mover.paused(away)

    def ended(self, away: Away) -> None:
        """A session is over."""
        self.mover.ended(away.session)
        self.keeper.ended(away)
        if self.admission is not None:
            self.admission.end(away.session)

    def drained(self, worker: str) -> None:
        """A worker gets nothing new from now on."""
        if self._features.moves:
            self.mover.drained(worker)

    def lost(self, worker: str) -> None:
        """A worker is gone."""
        self.copies.lost(worker)
        self.mover.lost(worker)

    def close(self) -> None:
        """The run is over."""
        self.copies.close()

    def _capacity(self) -> int:
        """Tokens that workers which answer have KV memory for."""
        answering = [one for one in self._cluster.workers.values() if one.role is not Role.PREFILL]
        return len(answering) * self._cluster.total_blocks * self._cluster.spec.block_tokens
