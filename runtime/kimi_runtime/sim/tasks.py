"""One simulation as a value: what is simulated, under which policy, with which seed. Pure."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, PositiveInt

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.cluster import ClusterEvent, ClusterSpec
from kimi_runtime.sim.features import Features
from kimi_runtime.sim.report import Summary, rows, summary
from kimi_runtime.sim.sessions import Workload
from kimi_runtime.sim.traces import MOONCAKE_BLOCK_TOKENS, Format, read_trace
from kimi_runtime.sim.workload import AgentMix, agents
from kimi_runtime.sim.world import World
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.router import (
    CacheAware,
    Cost,
    DynamoCost,
    InferaCost,
    LeastLoad,
    LlmdFilter,
    LongestPrefix,
    PolicySpec,
    PowerOfTwo,
    RoundRobin,
)

BASELINES: dict[str, PolicySpec] = {
    "round_robin": RoundRobin(),
    "least_load": LeastLoad(),
    "power_of_two": PowerOfTwo(),
    "longest_prefix": LongestPrefix(),
    "cache_aware": CacheAware(),
    "dynamo": DynamoCost(),
    "dynamo_agents": DynamoCost(
        overlap_credit=2.0, prefill_load_scale=4.0, active_request_weight=64.0
    ),
    "llm_d": LlmdFilter(),
    "infera": InferaCost(),
}
OURS = "cost"


class TraceFile(SpecModel):
    """A recorded workload."""

    path: Path
    format: Format = "mooncake"
    block_tokens: PositiveInt = Field(
        MOONCAKE_BLOCK_TOKENS, description="What one of Mooncake's hash ids stands for."
    )


class Task(SpecModel):
    """Everything a run depends on: equal tasks give equal runs."""

    policy: str = OURS
    seed: int = 1
    cluster: ClusterSpec = ClusterSpec()
    sessions: PositiveInt = 128
    mix: AgentMix = AgentMix()
    trace: TraceFile | None = Field(None, description="In place of drawn sessions.")
    lanes: PositiveInt | None = None
    events: tuple[ClusterEvent, ...] = ()
    features: Features = Field(Features(), description="What the router does besides choosing.")


class Outcome(NamedTuple):
    """What a run brought: figures, and every request if they were asked for."""

    summary: Summary
    requests: list[dict[str, Any]]


def policy_of(name: str, cluster: ClusterSpec) -> PolicySpec:
    """A policy by name, ours for the cluster's model; ConfigError naming those there are."""
    if name == OURS:
        return Cost(model=cluster.model, gpu=cluster.gpu, tensor=cluster.tensor)
    if name not in BASELINES:
        known = ", ".join((OURS, *BASELINES))
        raise ConfigError(f"policy {name!r} is not one of {known}")
    return BASELINES[name]


def workload_of(task: Task) -> Workload:
    """The task's sessions. ConfigError for a trace that cannot be read."""
    if task.trace is None:
        return agents(task.sessions, task.seed, task.mix, lanes=task.lanes)
    try:
        with task.trace.path.open(encoding="utf-8") as lines:
            return read_trace(
                lines,
                task.trace.format,
                name=str(task.trace.path),
                limit=task.sessions,
                gap_cap_s=task.mix.gap_cap_s,
                block_tokens=task.trace.block_tokens,
            )
    except OSError as exc:
        raise ConfigError(f"the trace {task.trace.path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"the trace {task.trace.path} is no UTF-8 text ({exc.reason}, byte {exc.start} of what "
            "was read): give JSON lines"
        ) from exc


def simulate(
    task: Task, *, keep: bool = False, progress: Callable[[int], None] | None = None
) -> Outcome:
    """Run a task; `keep` every request."""
    world = World(
        task.cluster,
        workload_of(task),
        policy_of(task.policy, task.cluster),
        seed=task.seed,
        events=task.events,
        features=task.features,
    )
    run = world.run(progress=progress)
    return Outcome(
        summary(run, policy=task.policy, seed=task.seed), rows(run.records) if keep else []
    )
