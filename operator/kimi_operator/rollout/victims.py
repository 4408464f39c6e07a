"""Which instances go first: those whose loss costs least."""

import math
from collections.abc import Iterable

from kimi_operator.observed import InstanceId, InstanceView

Cost = tuple[bool, bool, float, float, float, InstanceId]


def cost_of_losing(instance: InstanceView) -> Cost:
    """An order: what does not serve, least in flight, coldest cache, youngest.

    An instance that serves without a load report may be busy and warm, so it counts as both.
    """
    unknown = math.inf if instance.serving else 0.0
    return (
        instance.serving,
        not instance.draining,
        unknown if instance.in_flight is None else instance.in_flight,
        unknown if instance.cached_tokens is None else instance.cached_tokens,
        -instance.created_s,
        instance.id,
    )


def choose_victims(instances: Iterable[InstanceView], count: int) -> list[InstanceView]:
    """The `count` instances to give up, cheapest first; all of them if there are fewer."""
    return sorted(instances, key=cost_of_losing)[: max(count, 0)]
