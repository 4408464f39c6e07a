"""What a step waits for, in words."""

from collections.abc import Sequence

from kimi_operator.observed import InstanceId, InstanceView
from kimi_operator.rollout.fleet import Fleet


def name_of(instance: InstanceId) -> str:
    """`prefill-1a2b3c-0`, as the instance's children are called after the deployment's name."""
    return f"{instance.role}-{instance.revision}-{instance.index}"


def waits_for(
    fleet: Fleet,
    leaving: Sequence[InstanceView],
    created: Sequence[InstanceId],
    short_of_gpus: int,
) -> str | None:
    """What the next move needs, the slowest first; None where there is nothing to wait for.

    `leaving` drain or begin to, `created` begin to load with this pass.
    """
    busy = [instance for instance in leaving if instance.in_flight]
    if busy:
        requests = sum(instance.in_flight or 0 for instance in busy)
        return f"{requests} request(s) in flight on {_listed([i.id for i in busy])}"
    pending = fleet.pending()
    broken = [instance for instance in pending if instance.failures]
    if broken:
        return f"{_listed([i.id for i in broken])}: {broken[0].failures[0]}"
    loading = [*(instance.id for instance in pending), *created]
    if loading:
        return f"{_listed(loading)} to become ready"
    if leaving:
        return f"routers to leave {_listed([i.id for i in leaving])}"
    if fleet.terminating:
        return f"the pods of {_listed([i.id for i in fleet.terminating])} to end"
    if short_of_gpus:
        budget = fleet.view.max_gpus
        return f"{short_of_gpus} more GPUs within budget.maxGPUs {budget} ({fleet.gpus} in use)"
    return None


def _listed(instances: Sequence[InstanceId]) -> str:
    more = f" and {len(instances) - 2} more" if len(instances) > 2 else ""
    return ", ".join(name_of(instance) for instance in instances[:2]) + more
