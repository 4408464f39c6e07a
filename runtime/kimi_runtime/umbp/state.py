"""What a daemon's HTTP and gRPC faces know of it: how far its start has come, and its parts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kimi_runtime.errors import Unavailable
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.remote.service import Remote
from kimi_runtime.umbp.rpc.tls import Tls
from kimi_runtime.umbp.serve_feed import Pulse


class Phase(StrEnum):
    """How far a daemon has come. It serves engines and peers from PEERS on."""

    ARENA = "arena"
    """The arena's pages are being bound."""
    LOG = "log"
    """The arena is bound; the SSD log is being recovered."""
    PEERS = "peers"
    """The log is recovered; what peers hold is not known of all of them."""
    READY = "ready"
    DRAINED = "drained"
    """It takes no blocks any more, and is about to be stopped."""


_NOT_READY = {
    Phase.ARENA: "the arena is being prepared; try again in a moment",
    Phase.LOG: "the arena is bound and the SSD log is being recovered; try again in a moment",
    Phase.PEERS: "the log is recovered; what these peers hold is not known yet: {awaited}",
    Phase.READY: "the daemon is stopping",
    Phase.DRAINED: "the daemon was drained and takes no blocks any more: stop it",
}


@dataclass(slots=True)
class DaemonState:
    """`clients` is None until the daemon serves, and again when it stops.

    `call_keys` are the deployment's, newest first; the list changes in place when they do.
    """

    name: str
    call_keys: list[bytes]
    phase: Phase = Phase.ARENA
    clients: Clients | None = None
    awaited: Sequence[str] = ()
    """Peers, or the list of them, that phase PEERS waits for."""
    unknown_peers: int = 0
    """Peers that were not known when their time was over, and the daemon got ready without them."""
    refused_calls: int = 0
    """HTTP requests and gRPC calls without a valid signature."""
    reloads: Counter[str] = field(default_factory=Counter)
    """Looks at the daemon's file by what came of them: applied, unchanged, refused."""
    pulse: Pulse = field(default_factory=Pulse)
    tls: Tls | None = None
    """Its certificates, if it encrypts."""

    def refused(self) -> None:
        """Somebody called without a valid signature."""
        self.refused_calls += 1

    def serving(self) -> Clients:
        """The parts of a daemon that serves. Unavailable, saying why."""
        if self.clients is None:
            raise Unavailable(self.not_ready())
        return self.clients

    def not_ready(self) -> str:
        """What a daemon that is not ready is about, and what it waits for."""
        return _NOT_READY[self.phase].format(awaited=", ".join(self.awaited))

    def remote(self) -> Remote | None:
        """Its part among peers, if it has one."""
        return self.serving().remote
