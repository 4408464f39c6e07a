"""The simulated machines: which workers, pools and links there are, and how large. Pure."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic import Field, NonNegativeInt, PositiveInt

from kimi_runtime.engine.checkpoint_policy import CheckpointPolicy
from kimi_runtime.engine.scheduler import SchedulerLimits
from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.chance import stream
from kimi_runtime.sim.fit import fitted_constants
from kimi_runtime.sim.links import Links
from kimi_runtime.sim.measured import MeasuredStep, measured_timing
from kimi_runtime.sim.pool import SimPool
from kimi_runtime.sim.ssd import READ, WRITE
from kimi_runtime.sim.timeline import Timeline
from kimi_runtime.sim.timing import StepTiming, timing_of
from kimi_runtime.sim.worker import SimWorker
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.hardware import NodeSpec
from kimi_runtime.spec.parallel import Sharding, kv_tokens
from kimi_runtime.spec.sizes import state_bytes
from kimi_runtime.spec.worker import Role
from kimi_runtime.units import Bytes

REVISION, LAYOUT = "sim", "sim"


class ClusterSpec(SpecModel):
    """Workers of one model on one kind of node; the ones of a node share its pool."""

    model: str = "kimi-k2.6"
    gpu: str = "MI355X"
    tensor: PositiveInt = 4
    workers: NonNegativeInt = Field(4, description="That serve whole requests.")
    prefill: NonNegativeInt = 0
    decode: NonNegativeInt = 0
    block_tokens: PositiveInt = Field(256, description="Larger blocks simulate sooner.")
    hbm_tokens: PositiveInt | None = Field(None, description="KV of a worker; None: what is left.")
    pool: Annotated[Bytes, Ge(0)] = Field(10**12, description="Of each node; 0: there is none.")
    ssd: Annotated[Bytes, Ge(0)] = Field(0, description="Behind each node's pool; 0: none.")
    remote_pools: bool = Field(True, description="Workers can read other nodes' pools.")
    peers: bool = Field(True, description="Workers can read each other's memory when told to.")
    streams: PositiveInt = Field(1, description="Layer groups that reads and computing overlap in.")
    max_running: PositiveInt = 256
    max_waiting: PositiveInt = 1024
    step_tokens: PositiveInt = 8192
    max_context_tokens: PositiveInt = 262_144
    load_interval_s: Annotated[float, Gt(0)] = 0.2
    speed_spread: Annotated[float, Ge(0)] = Field(
        0.02, description="Standard deviation of how fast equal workers are, as a share."
    )
    fast: bool = Field(True, description="Fast-forward unchanged decode batches.")
    measured: MeasuredStep | None = Field(
        None, description="Step times of this machine; None: those of published tables."
    )
    workers_per_node: PositiveInt | None = Field(
        None, description="None: as many as a node's GPUs are enough for."
    )

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.tensor * (self.workers + self.prefill + self.decode)


EventKind = Literal["fail", "recover", "drain", "resume", "add", "remove", "link"]


class ClusterEvent(SpecModel):
    """Something that happens to the cluster.

    A worker fails (all it holds is lost) and recovers empty, drains and resumes, is added (under a
    new name, of a role) or removed; a link's rate is multiplied with `factor` from now on.
    """

    at_s: Annotated[float, Ge(0)]
    kind: EventKind
    target: str = Field(description="A worker, or a link such as `w0/in`.")
    role: Role = Role.BOTH
    factor: Annotated[float, Ge(0)] = 1.0


@dataclass(slots=True)
class Cluster:
    """What there is now. Workers are w0, w1, or p0 and d0; nodes n0; pools are named like nodes."""

    spec: ClusterSpec
    timeline: Timeline
    seed: int
    timing: StepTiming = field(init=False)
    links: Links = field(init=False)
    total_blocks: int = field(init=False)
    workers: dict[str, SimWorker] = field(default_factory=dict)
    pools: dict[str, SimPool] = field(default_factory=dict)
    retired: list[SimWorker] = field(default_factory=list)
    """Processes that are gone; what they did counts."""
    _nominal: dict[str, float] = field(default_factory=dict)
    _places: int = 0
    _epoch: int = 0

    def __post_init__(self) -> None:
        """Start everything."""
        spec = self.spec
        self.timing = _timing(spec)
        node = self.node_spec
        if spec.tensor > node.gpus or node.gpus % spec.tensor:
            raise ConfigError(
                f"tensor: {spec.tensor} GPUs a worker do not divide a node's {node.gpus}; "
                "use a divisor"
            )
        self.links = Links(self.timeline)
        self.total_blocks = self._kv_tokens() // spec.block_tokens
        for role, count, letter in (
            (Role.BOTH, spec.workers, "w"),
            (Role.PREFILL, spec.prefill, "p"),
            (Role.DECODE, spec.decode, "d"),
        ):
            for number in range(count):
                self.add(f"{letter}{number}", role)
        if not self.workers:
            raise ConfigError("a cluster of no workers; set workers, or prefill and decode")

    @property
    def node_spec(self) -> NodeSpec:
        """What a node of it is."""
        return self.timing.node

    @property
    def state_bytes(self) -> int:
        """Of one state checkpoint; 0 for a model without linear attention."""
        return state_bytes(self.timing.model)

    def add(self, name: str, role: Role) -> SimWorker:
        """A worker comes, on the node where there is room next."""
        if name in self.workers:
            raise ConfigError(f"worker {name} is there already; choose another name")
        per_node = self.spec.workers_per_node or max(self.node_spec.gpus // self.spec.tensor, 1)
        node = f"n{self._places // per_node}"
        self._places += 1
        return self._start(name, role, node)

    def restart(self, name: str) -> SimWorker:
        """A worker that failed is back, and holds nothing."""
        old = self.workers.pop(name)
        self.retired.append(old)
        return self._start(name, old.role, old.node)

    def remove(self, name: str) -> None:
        """A worker is gone for good."""
        self.retired.append(self.workers.pop(name))

    def scale_link(self, link: str, factor: float) -> None:
        """The link is `factor` times what it is by data sheet."""
        if link not in self._nominal:
            raise ConfigError(f"no link {link!r}; there are {', '.join(sorted(self._nominal))}")
        self.links.set_rate(link, factor * self._nominal[link])

    def copies_link(self, worker: SimWorker, share: float) -> str:
        """What copies into a worker's memory pass besides: a share of its network link."""
        name = f"{worker.name}/copies"
        self._have(name, share * self.node_spec.nic.sustained_rate)
        return name

    def copies_rate(self, worker: SimWorker) -> float:
        """Bytes per second that copies into the worker get at most."""
        return self.links.rates[f"{worker.name}/copies"]

    def route(self, source: str, worker: SimWorker) -> tuple[str, ...]:
        """The links from a worker's or a pool's memory into a worker's."""
        pool = self.pools.get(source)
        if pool is not None:
            if pool.node == worker.node:
                return (f"{worker.name}/host",)
            return (f"{pool.node}/net", f"{worker.name}/in")
        other = self.workers[source]
        if other.node == worker.node:
            return (f"{other.name}/peer", f"{worker.name}/peer")
        return (f"{other.name}/out", f"{worker.name}/in")

    def _start(self, name: str, role: Role, node: str) -> SimWorker:
        spec, machine = self.spec, self.node_spec
        self._epoch += 1
        self._have(f"{name}/in", machine.nic.sustained_rate)
        self._have(f"{name}/out", machine.nic.sustained_rate)
        self._have(f"{name}/host", machine.host_link.sustained_rate)
        self._have(f"{name}/peer", machine.gpu_link.sustained_rate)
        self._have(f"{node}/net", machine.nic.sustained_rate * machine.nics / spec.tensor)
        size = spec.block_tokens * self.timing.kv_token_bytes
        if spec.pool and node not in self.pools:
            load_s = 1 / machine.host_link.sustained_rate
            drive = machine.drive
            self._have(f"{node}/{READ}", drive.sustained_rate)
            self._have(f"{node}/{WRITE}", drive.write_rate or drive.sustained_rate)
            self.pools[node] = SimPool(
                *(node, node, max(spec.pool // size, 1), size, load_s),
                ssd_blocks=spec.ssd // size,
                links=self.links,
                state_bytes=self.state_bytes,
            )
        chance = stream(self.seed, "speed", name)
        worker = SimWorker(
            name,
            self.timing,
            self._limits(),
            self.total_blocks,
            role=role,
            node=node,
            timeline=self.timeline,
            links=self.links,
            pool=self.pools.get(node),
            slowness=max(1 + spec.speed_spread * chance.gauss(0.0, 1.0), 0.5),
            fast=spec.fast,
            epoch=self._epoch,
        )
        self.workers[name] = worker
        return worker

    def _limits(self) -> SchedulerLimits:
        spec = self.spec
        return SchedulerLimits(
            spec.block_tokens,
            spec.step_tokens,
            spec.max_running,
            spec.max_waiting,
            spec.max_context_tokens,
            CheckpointPolicy(spec.block_tokens) if self.state_bytes else None,
        )

    def _have(self, link: str, rate: float) -> None:
        if link not in self._nominal:
            self._nominal[link] = self.links.rates[link] = rate

    def _kv_tokens(self) -> int:
        spec = self.spec
        if spec.hbm_tokens is not None:
            return spec.hbm_tokens
        sharding = Sharding(tensor=spec.tensor)
        return kv_tokens(self.timing.model, self.node_spec.gpu, sharding, dtype="fp8")


def _timing(spec: ClusterSpec) -> StepTiming:
    if spec.measured is not None:
        return measured_timing(spec.model, spec.gpu, tensor=spec.tensor, step=spec.measured)
    return timing_of(spec.model, spec.gpu, tensor=spec.tensor, constants=fitted_constants())
