"""When an instance that drains may go."""

from kimi_operator.observed import InstanceView
from kimi_operator.rollout.view import RolloutView


def drains_until_s(instance: InstanceView, view: RolloutView) -> tuple[float, float] | tuple[()]:
    """When routers have stopped planning onto it, and when its requests have had their time."""
    if instance.draining_since_s is None:
        return ()
    settled_s = instance.draining_since_s + view.settle_s.get(instance.id.role, 0.0)
    return settled_s, settled_s + view.drain_s.get(instance.id.role, 0.0)


def drained(instance: InstanceView, view: RolloutView, now_s: float) -> bool:
    """Whether deleting it costs no request that more waiting would save.

    Nothing in flight means something only after every router has heard of the drain. Where nobody
    reports what is in flight, the pod's own grace period covers the rest.
    """
    if instance.pods_ready == 0:
        return True
    if not instance.draining:
        return False
    until = drains_until_s(instance, view)
    if not until:
        return False
    settled_s, over_s = until
    return now_s >= over_s or (now_s >= settled_s and not instance.in_flight)
