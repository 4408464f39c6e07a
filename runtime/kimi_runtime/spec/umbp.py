"""The KV-cache pool daemon's file, and the feed's wire format.

A daemon has one feed, of tier `dram`: it names what the daemon serves, from memory or, where there
is one, from its SSD. A block that moves between the two changes nothing for those who follow.

The feed is a stream of JSON lines (`GET /feed?epoch=E&after=S`), the same from a pool daemon and
from a worker. To who asks with `sum=xxh3` each line is the XXH3-64 of its JSON (16 hexadecimal
digits), a space and the JSON; a line that is not what was sent ends the stream. It starts with a
`FeedHello`. If the follower's `(epoch, after)` is still in the owner's log, `FeedBatch` lines
follow from `after + 1`; otherwise the snapshot comes first, in `FeedSnapshotPage` lines, and the
batches continue from its `seq`.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Gt, Le
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.request import BlockKeyHex
from kimi_runtime.spec.router import PoolEndpoint
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.spec.tls import TlsFiles
from kimi_runtime.spec.transfer import TransferChaos, TransferNetwork
from kimi_runtime.units import Bytes, Rate, Seconds

TierName = Literal["hbm", "dram", "ssd"]


class TenantTerms(SpecModel):
    """What a tenant is granted of a node's memory.

    Its share is `weight`'s part among the tenants that use the memory now: what is above a
    tenant's share makes room for others' puts, what is within it does not.
    """

    weight: Annotated[float, Gt(0)] = 1.0
    quota: Annotated[Bytes, Gt(0)] | None = Field(
        None, description="The most it may use, whatever is free; none: all of it."
    )


class UmbpSpec(SpecModel):
    """The file a pool daemon starts from."""

    name: str
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)]
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="Where peers' and operators' calls are answered; 0: any port that is free."
    )
    socket: Path = Field(description="Unix socket engines of this node connect to.")
    arena: Path = Field(
        description="The shared memory file; its folder should be tmpfs or hugetlbfs."
    )
    dram_bytes: Annotated[Bytes, Gt(0)]
    page_bytes: Annotated[Bytes, Gt(0)] = 4096
    ssd: SsdSpec | None = Field(None, description="The log on SSD behind the memory; none: none.")
    ssd_after_uses: PositiveInt = Field(
        2,
        description="A block goes to SSD once it was used this often; its put is the first use.",
    )
    ssd_write_rate: Annotated[Rate, Gt(0)] | None = Field(
        None, description="The most that is written to SSD; none: as much as it takes."
    )
    tenants: dict[str, TenantTerms] = Field({}, description="By tenant; others have the default.")
    tenant_default: TenantTerms = TenantTerms()
    evict_above: Annotated[float, Gt(0), Le(1)] = Field(
        0.98, description="Share of the memory in use above which it is evicted from."
    )
    evict_to: Annotated[float, Gt(0), Le(1)] = Field(
        0.95, description="Share of the memory in use down to which that is."
    )
    recompute_rate: Annotated[Rate, Gt(0)] = Field(
        1e9, description="KV an engine computes a second: what losing a block costs."
    )
    keep_arena: bool = Field(
        False,
        description="Leave the memory file on a stop in order, for the daemon that comes next. "
        "After a crash it is taken over in any case. Whoever sets it removes the file in the end.",
    )
    numa_nodes: tuple[NonNegativeInt, ...] = Field(
        (), description="Memory in equal parts on these nodes; none: where the system puts it."
    )
    call_key: Path
    tls: TlsFiles | None = Field(
        None,
        description="Encrypts HTTP and gRPC; peers must show certificates of the same CA. None: "
        "neither is encrypted.",
    )
    reservation_ttl: Annotated[Seconds, Gt(0)] = 30.0
    pin_lease: Annotated[Seconds, Gt(0)] = 10.0
    feed_interval: Annotated[Seconds, Gt(0)] = 0.02
    peers: tuple[PoolEndpoint, ...] = Field(
        (),
        description="Daemons of this deployment to fetch from what this one lacks. The one that "
        "has this daemon's name is passed over.",
    )
    peers_file: Path | None = Field(
        None,
        description="A FleetSpec whose pools are the peers instead. It is read again when it "
        "changes, so whoever writes it replaces it as a whole.",
    )
    peers_within: Seconds = Field(
        10.0, description="Until it is ready, a start waits so long to know what peers hold."
    )
    lends: bool = Field(
        False, description="Whether others may fetch from here also where no peers are named."
    )
    transfer: Literal["tcp", "verbs"] = Field("tcp", description="How peers copy from here.")
    chaos: TransferChaos | None = Field(
        None, description="For tests alone, as a worker's: reads from peers fail on purpose."
    )
    network: TransferNetwork = TransferNetwork()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def control_socket(self) -> Path:
        """Unix socket for `kimistack umbp` on this node."""
        return self.socket.with_name(f"{self.socket.name}.control")

    @property
    def has_peers(self) -> bool:
        """Whether there are, or may come to be, daemons to fetch from."""
        return bool(self.peers) or self.peers_file is not None

    @model_validator(mode="after")
    def _peers_are_told_once(self) -> Self:
        if self.peers and self.peers_file is not None:
            raise ValueError("peers and peers_file both say who the peers are: leave one out")
        if len({peer.name for peer in self.peers}) < len(self.peers):
            raise ValueError("two peers have one name, by which they are told apart: rename one")
        if self.tls is None and any(peer.url.startswith("https:") for peer in self.peers):
            raise ValueError("a peer is called by https, and tls names no certificate to show it")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        transfers = self.network.port if self.has_peers or self.lends else 0
        for name, port in (("grpc_port", self.grpc_port), ("network.port", transfers)):
            if port and port == self.port:
                raise ValueError(
                    f"{name}: {port} is the port of the daemon's HTTP face; it needs another one, "
                    "or 0 for any that is free"
                )
        if transfers and transfers == self.grpc_port:
            raise ValueError(
                f"network.port: {transfers} is the port of the daemon's gRPC; peers' transfers "
                "need another one, or 0 for any that is free"
            )
        return self

    @model_validator(mode="after")
    def _evicts_downwards(self) -> Self:
        if self.evict_to > self.evict_above:
            raise ValueError(
                f"evict_to is {self.evict_to}, above evict_above ({self.evict_above}): lower it"
            )
        return self


class HintRequest(SpecModel):
    """`POST /hint`: where a session stands, from whoever knows (a router, as a rule).

    `keys` are the session's blocks in order: all it has now (active, paused; none: those told
    before), those it gives up (compacted), or those that `child` goes on from (forked; none: all).
    """

    session: BlockKeyHex
    kind: Literal["active", "paused", "ended", "compacted", "forked"]
    keys: tuple[BlockKeyHex, ...] = ()
    expected: Seconds | None = Field(None, description="How long a pause is likely to take.")
    child: BlockKeyHex | None = None
    tenant: str = "default"

    @model_validator(mode="after")
    def _a_fork_has_a_child(self) -> Self:
        if (self.child is None) != (self.kind != "forked"):
            raise ValueError("a fork, and nothing else, names its child")
        return self


class HintBatch(SpecModel):
    """`POST /hint` with what is to be told of several sessions, in this order."""

    hints: tuple[HintRequest, ...]


class FeedHello(SpecModel):
    """The first line of a feed."""

    kind: Literal["hello"] = "hello"
    owner: str
    epoch: NonNegativeInt
    seq: NonNegativeInt
    tier: TierName
    block_tokens: NonNegativeInt = Field(description="0 when the owner does not know it.")


class FeedSnapshotPage(SpecModel):
    """Some of the owner's keys as of `seq`. `last` ends the snapshot."""

    kind: Literal["snapshot"] = "snapshot"
    epoch: NonNegativeInt
    seq: NonNegativeInt
    page: NonNegativeInt
    last: bool
    keys: tuple[BlockKeyHex, ...]


class FeedEvent(SpecModel):
    """One change; `clear` forgets every key of the owner in that tier."""

    op: Literal["add", "remove", "clear"]
    key: BlockKeyHex | None = None

    @model_validator(mode="after")
    def _names_a_key_unless_all(self) -> Self:
        if (self.key is None) != (self.op == "clear"):
            raise ValueError("'add' and 'remove' need their key, and 'clear' has none")
        return self


class FeedBatch(SpecModel):
    """Changes `first_seq ...` in order, one sequence number each. Empty: a heartbeat."""

    kind: Literal["batch"] = "batch"
    epoch: NonNegativeInt
    first_seq: PositiveInt
    events: tuple[FeedEvent, ...]


FeedLine = Annotated[FeedHello | FeedSnapshotPage | FeedBatch, Field(discriminator="kind")]
