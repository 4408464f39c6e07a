"""Workers on nodes that are not ready, and when their pods may be taken away. Pure.

Kubernetes never deletes a pod of a StatefulSet whose node does not answer: the process may still
run there. Ours ends by itself: a worker does nothing more once no router has acknowledged a word
of it for its lease. So its pod may be deleted by force when that lease has certainly ended, which
takes all of this, each for the lease and a margin:

- the node has not been ready;
- every router that is there now says that it has heard nothing of the worker, and says so now;
- a router that is there no more went so long ago, of which this operator is sure only after it
  has itself watched for so long: so a restart makes it wait, never hurry.

A router on a lost node cannot be asked and is not waited for: it and the worker reach nobody but
each other. Nothing here is remembered from one pass to the next.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kimi_operator.heard import Answer, Heard, RouterPod, router_pods
from kimi_operator.instances import instance_id
from kimi_operator.observed import LEASE, InstanceId, LostPod, Manifest, NodeView, ObjectKey
from kimi_operator.stamps import rfc3339

MARGIN_S = 15.0
"""For clocks that run apart, and for a word that is on its way."""
ANSWER_FOR_S = 4.0
"""A router's word is of now for so long: less than a fenced worker waits to take work again."""


@dataclass(frozen=True)
class _Case:
    pod: str
    node: str
    bound_s: float
    since_s: float
    islands: frozenset[str]
    """Nodes that have not been ready for as long: nobody outside reaches what runs there."""


def lost_pods(
    children: Mapping[ObjectKey, Manifest],
    nodes: Iterable[NodeView] | None,
    heard: Heard,
    now_s: float,
) -> tuple[LostPod, ...]:
    """Pods of workers on nodes that are not ready or gone; none where nodes may not be listed."""
    if nodes is None:
        return ()
    cluster = _Cluster({node.name: node for node in nodes}, router_pods(children), heard, now_s)
    found = []
    for key, pod in sorted(children.items()):
        instance = instance_id(pod["metadata"].get("labels") or {}) if key.kind == "Pod" else None
        node = pod.get("spec", {}).get("nodeName") if instance is not None else None
        if instance is None or not node or cluster.is_ready(node):
            continue
        found.append(_lost(pod, instance, node, cluster))
    return tuple(found)


@dataclass(frozen=True)
class _Cluster:
    nodes: Mapping[str, NodeView]
    routers: tuple[RouterPod, ...]
    heard: Heard
    now_s: float

    def is_ready(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node].ready

    def unready_for_s(self, node: str) -> float:
        """0 for a node that is ready, or does not say since when it is not."""
        view = self.nodes.get(node)
        since_s = view.unready_since_s if view is not None else None
        return 0.0 if since_s is None else self.now_s - since_s


def _lost(pod: Manifest, instance: InstanceId, node: str, cluster: _Cluster) -> LostPod:
    metadata, view = pod["metadata"], cluster.nodes.get(node)
    since_s = view.unready_since_s if view is not None else None
    lease_s = _lease_s(metadata.get("annotations") or {})
    if view is None:
        waits_for: str | None = "Kubernetes removes the pods of a node that is deleted"
    elif lease_s is None:
        waits_for = (
            "its worker has no lease: when it is sure that the node is off, run kubectl delete "
            f"pod {metadata['name']} --force"
        )
    elif since_s is None:
        waits_for = "the node does not say since when it is not ready"
    else:
        bound_s = lease_s + MARGIN_S
        islands = frozenset(n for n in cluster.nodes if cluster.unready_for_s(n) >= bound_s)
        case = _Case(metadata["name"], node, bound_s, since_s, islands)
        waits_for = _waits_for(case, cluster.routers, cluster.heard, cluster.now_s)
    return LostPod(
        pod=metadata["name"],
        uid=metadata["uid"],
        instance=instance,
        node=node,
        since_s=since_s,
        expired=waits_for is None,
        heals=view is None or (lease_s is not None and since_s is not None),
        waits_for=waits_for or "",
    )


def _lease_s(annotations: Mapping[str, str]) -> float | None:
    text = annotations.get(LEASE, "")
    return float(text) if text.replace(".", "", 1).isdigit() else None


def _waits_for(
    case: _Case, routers: tuple[RouterPod, ...], heard: Heard, now_s: float
) -> str | None:
    """What is still missing; None if the worker's lease has certainly ended."""
    if now_s - case.since_s < case.bound_s:
        return f"its worker's lease ends by {rfc3339(case.since_s + case.bound_s)}"
    if heard.watched_s < case.bound_s:
        return "this operator has just started, and first watches for as long as the lease lasts"
    outside = [router for router in routers if router.node not in case.islands]
    if not outside:
        return "no router runs on another node that could say whether the worker is silent"
    answers = {answer.pod.uid: answer for answer in heard.answers}
    for router in outside:
        problem = _unsure(case, answers.get(router.uid), router)
        if problem is not None:
            return problem
    if any(ago_s < case.bound_s and n not in case.islands for n, ago_s in heard.gone.items()):
        return "a router that could have reached the worker was there until lately"
    return None


def _unsure(case: _Case, answer: Answer | None, router: RouterPod) -> str | None:
    if answer is None or answer.age_s > ANSWER_FOR_S:
        return f"router {router.name} does not answer the operator, and may still reach the worker"
    if answer.told.silent_s(case.pod) < case.bound_s:
        return f"router {router.name} has heard of the worker within its lease"
    return None
