"""How a deployment bears load: the simulator over rising concurrency. Pure."""

from collections.abc import Callable

from kimi_runtime.sim.calibration import LEAST_REQUESTS, ROUNDS, point_of
from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.published import Point
from kimi_runtime.sim.workload import closed_loop
from kimi_runtime.sim.world import World
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.capacity import K31_PRO, CapacitySpec, Holding, holdings, model_of
from kimi_runtime.spec.published import K3
from kimi_runtime.spec.router import LeastLoad
from kimi_runtime.spec.worker import Role


class Loaded(SpecModel):
    """Under one concurrency, shared by all instances. Tokens per second, seconds."""

    concurrency: int
    total_tokens_per_s_per_gpu: float
    """Input and output."""
    output_tokens_per_s_per_gpu: float
    ttft_s: float
    itl_s: float


class Capacity(SpecModel):
    """What a spec can do."""

    spec: CapacitySpec
    holdings: tuple[Holding, ...]
    loads: tuple[Loaded, ...]
    notes: tuple[str, ...]


def capacity(spec: CapacitySpec, *, told: Callable[[int], None] = lambda done: None) -> Capacity:
    """Memory from sizes, load from the simulator. Errors as `spec.capacity.holdings`."""
    held = holdings(spec)
    _, assumed = model_of(spec.model)
    notes = [assumed] if assumed else []
    if spec.model == K31_PRO:
        notes.append("timed as K3, whose trunk it has: what its indexers save and cost is left out")
    if spec.context_ranks > 1:
        notes.append("timed as if every rank read a sequence's whole KV")
    loads: list[Loaded] = []
    why = _untimed(spec)
    if why is not None:
        return Capacity(spec=spec, holdings=held, loads=(), notes=(*notes, why))
    for lanes in spec.concurrency:
        loads.append(_loaded(spec, held, lanes))
        told(len(loads))
    return Capacity(spec=spec, holdings=held, loads=tuple(loads), notes=tuple(notes))


def _untimed(spec: CapacitySpec) -> str | None:
    """Why the simulator has no figures for it; None: it has."""
    first = spec.shapes[0]
    if any(shape.expert > 1 for shape in spec.shapes):
        return "load is not simulated: the timing model has no expert parallelism"
    if any(shape.tensor != first.tensor for shape in spec.shapes):
        return "load is not simulated: the roles have different tensor sizes"
    return None


def _loaded(spec: CapacitySpec, held: tuple[Holding, ...], lanes: int) -> Loaded:
    cluster = _cluster(spec, held)
    count = max(ROUNDS * lanes, LEAST_REQUESTS)
    workload = closed_loop(lanes, count, 1, inputs=spec.input, outputs=spec.output)
    point: Point = point_of(lanes, World(cluster, workload, LeastLoad(), seed=1).run().records)
    outputs = sum(spec.output) / (sum(spec.input) + sum(spec.output))
    per_gpu = point.total_tokens_per_s / cluster.gpus
    return Loaded(
        concurrency=lanes,
        total_tokens_per_s_per_gpu=per_gpu,
        output_tokens_per_s_per_gpu=per_gpu * outputs,
        ttft_s=point.ttft_s,
        itl_s=point.tpot_s,
    )


def _cluster(spec: CapacitySpec, held: tuple[Holding, ...]) -> ClusterSpec:
    counts = dict.fromkeys(Role, 0)
    for shape in spec.shapes:
        counts[shape.role] += shape.replicas
    return ClusterSpec(
        model=K3.name if spec.model == K31_PRO else spec.model,
        gpu=spec.gpu,
        tensor=spec.shapes[0].tensor,
        workers=counts[Role.BOTH],
        prefill=counts[Role.PREFILL],
        decode=counts[Role.DECODE],
        hbm_tokens=min(int(one.kv_memory / one.token_bytes) for one in held),
        pool=0,
        peers=False,
        speed_spread=0.0,
        max_running=min(shape.max_running for shape in spec.shapes),
        max_waiting=max(1024, *spec.concurrency),
        step_tokens=min(shape.step_tokens for shape in spec.shapes),
    )
