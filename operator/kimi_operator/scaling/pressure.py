"""How short or idle a role is, from what the routers and workers report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import Role, RoleName
from kimi_operator.api.scaling import Metric
from kimi_operator.observed import InstanceView, Observed, Signals

QUEUE_GOAL_S = 2.0
"""Time in the queue that is aimed at where no time to the first token is given."""
QUEUE_SHARE_OF_TTFT = 0.5
"""The rest of the time to the first token is the prefill itself."""
KV_GOAL = 0.85
"""Share of KV memory in use beyond which requests are preempted."""
BACKLOG_GOAL_S = 1.0
"""Hand-offs that wait longer find no room on the decode side."""
TOLERANCE = 0.1
COMFORT = 0.8
"""What is left after a removal must be below this part of the goal."""
MOST_GROWTH = 2.0
"""Latency does not fall in proportion to instances, so one decision at most doubles them."""


@dataclass(frozen=True)
class Pressure:
    """A signal over its goal: above 1 the role is short."""

    value: float
    why: str
    short: str
    """The same without the value of the moment, for texts that stand as long as it lasts."""


def pressures(
    name: RoleName, spec: DeploymentSpec, observed: Observed, serving: Sequence[InstanceView]
) -> list[Pressure]:
    """What presses on a role. Without prefill instances everything presses on decode.

    A backlog of hand-offs means that decode has no room; the time to the first token grows with
    it, so that says nothing of prefill then.
    """
    signals, role = observed.signals, dict(spec.roles())[name]
    alone = spec.prefill is None
    found: list[Pressure] = []
    backlog = signals.transfer_backlog_s or 0.0
    if name == "prefill" or alone:
        found += _waiting(signals, role, blame_ttft=alone or backlog <= BACKLOG_GOAL_S)
    if name == "decode":
        found += _decoding(signals, role)
    instances = max(len(serving), 1)
    found += [p for m in role.scaling.metrics for p in _metric(m, signals, serving, instances)]
    return found


def _waiting(signals: Signals, role: Role, *, blame_ttft: bool) -> Iterator[Pressure]:
    goal_s = role.scaling.targets.ttft if role.scaling.targets else None
    queue_goal_s = QUEUE_GOAL_S if goal_s is None else goal_s * QUEUE_SHARE_OF_TTFT
    if signals.queue_s is not None:
        why = f"requests queue {signals.queue_s:.1f}s, aimed at {queue_goal_s:g}s"
        short = f"requests queue longer than {queue_goal_s:g}s"
        yield Pressure(signals.queue_s / queue_goal_s, why, short)
    if signals.ttft_p95_s is not None and goal_s is not None and blame_ttft:
        why = f"time to first token {signals.ttft_p95_s:.2f}s, aimed at {goal_s:g}s"
        short = f"the time to first token is above {goal_s:g}s"
        yield Pressure(signals.ttft_p95_s / goal_s, why, short)


def _decoding(signals: Signals, role: Role) -> Iterator[Pressure]:
    goal_s = role.scaling.targets.itl if role.scaling.targets else None
    if signals.itl_p95_s is not None and goal_s is not None:
        why = f"time between tokens {signals.itl_p95_s * 1e3:.0f}ms, aimed at {goal_s * 1e3:g}ms"
        short = f"the time between tokens is above {goal_s * 1e3:g}ms"
        yield Pressure(signals.itl_p95_s / goal_s, why, short)
    if signals.kv_use is not None:
        why = f"{signals.kv_use:.0%} of the KV memory in use, aimed at {KV_GOAL:.0%}"
        short = f"more than {KV_GOAL:.0%} of the KV memory is in use"
        yield Pressure(signals.kv_use / KV_GOAL, why, short)
    if signals.transfer_backlog_s is not None:
        why = f"hand-offs wait {signals.transfer_backlog_s:.1f}s, aimed at {BACKLOG_GOAL_S:g}s"
        short = f"hand-offs wait longer than {BACKLOG_GOAL_S:g}s"
        yield Pressure(signals.transfer_backlog_s / BACKLOG_GOAL_S, why, short)


def _metric(
    metric: Metric, signals: Signals, serving: Sequence[InstanceView], instances: int
) -> Iterator[Pressure]:
    """A metric of the spec, averaged over the instances; none where it was not reported."""
    value: float | None
    match metric.type:
        case "QueueDepth":
            value = _per(signals.waiting_requests, instances)
        case "QueuedTokens":
            value = _per(signals.waiting_tokens, instances)
        case "KvUsage":
            value = None if signals.kv_use is None else signals.kv_use * 100
        case "RunningRequests":
            known = [i.in_flight for i in serving if i.in_flight is not None]
            value = _per(sum(known), len(known)) if known else None
    if value is not None:
        why = f"{metric.type} {value:.1f}, aimed at {metric.target}"
        yield Pressure(value / metric.target, why, f"{metric.type} is above {metric.target}")


def _per(total: float | None, instances: int) -> float | None:
    return None if total is None else total / instances


def idle(observed: Observed) -> bool:
    """Whether nothing waits and nothing runs, all of it known."""
    signals = observed.signals
    waits = signals.waiting_requests if signals.waiting_requests is not None else signals.queue_s
    running = [i.in_flight for i in observed.instances if i.serving]
    return waits == 0 and not signals.queue_s and all(count == 0 for count in running)


def asked_for(observed: Observed) -> bool:
    """Whether a request waits."""
    return bool(observed.signals.waiting_requests or observed.signals.queue_s)
