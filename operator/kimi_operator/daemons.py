"""The pool's daemons as their pods show them: where each is, and which is replaced next. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kimi_operator.desired.labels import COMPONENT_LABEL
from kimi_operator.desired.pool_files import POOL_PORT
from kimi_operator.desired.umbp import DAEMON_ANNOTATION
from kimi_operator.nodes import lets_in_daemons
from kimi_operator.observed import InstanceView, Manifest, NodeView, ObjectKey
from kimi_operator.stamps import ready_since_s

Children = Mapping[ObjectKey, Manifest]
KNOWN_S = 20.0
"""From when a daemon is ready until its peers surely follow it. Their list has it within a pass,
their kubelets bring the list at once (`fleet_marks`), and they look at it every half second."""


def pool_urls(children: Children) -> dict[str, str]:
    """Where the pool's ready daemons are, by node: each with the scheme that it speaks itself."""
    return {node: url for node, url, leaving in _reachable(children) if not leaving}


def pool_peers(children: Children) -> dict[str, str]:
    """The same, and those that leave: what they have moves to the others, who must know them."""
    ordered = sorted(_reachable(children), key=lambda one: not one[2])
    return {node: url for node, url, _ in ordered}


def outdated_daemons(children: Children) -> tuple[ObjectKey, ...]:
    """Pods made from another template than the DaemonSet has by now, by node."""
    pool = _pool(children)
    return () if pool is None else tuple(key for _, key in _older(children, pool))


def nodes_to_renew(children: Children, wanted: Iterable[Manifest]) -> tuple[str, ...]:
    """Nodes whose daemon was made from another template than the pool has in `wanted`."""
    for manifest in wanted:
        if manifest["kind"] == "DaemonSet" and _is_pool(manifest):
            return tuple(node for node, _ in _older(children, manifest) if node)
    return ()


class Turn(NamedTuple):
    """The daemon's pod that is replaced next; without one, what the others of old wait for."""

    pod: ObjectKey | None
    waits_for: str = ""


def next_daemon(
    children: Children,
    instances: Iterable[InstanceView],
    nodes: Iterable[NodeView] | None,
    target_revision: str,
) -> Turn:
    """The pod to delete, so that its DaemonSet makes it anew.

    Routers go first: they then know by what authority daemons are to be trusted, and what is wrong
    with it stops the new ones, while the old ones go on serving. Then one node at a time: every
    other daemon is there and ready, but for those of nodes that are lost. A node's turn comes once
    no engine there is still to be replaced, so that it goes along with the drain of the last one.
    A daemon that does not work is of no use to any: it is first in line. One whose node would not
    let its successor in stays as it is.
    """
    pool = _pool(children)
    outdated = outdated_daemons(children)
    if pool is None or not outdated:
        return Turn(None)
    if not _settled(pool, children):
        return Turn(None, "the DaemonSet to have a pod on every node")
    if not routers_are_current(children):
        return Turn(None, "the routers to be replaced")
    lost = {node.name for node in nodes or () if not node.ready}
    here = {key: pod for key, pod in _pods(children) if _node(pod) not in lost}
    if leaving := sorted(_node(pod) for pod in here.values() if _leaves(pod)):
        return Turn(None, f"the daemon of {leaving[0] or 'a node'} to end")
    new = (pod for key, pod in here.items() if key not in outdated)
    if unready := sorted(_node(pod) for pod in new if not _is_ready(pod)):
        return Turn(None, f"the new daemon of {unready[0] or 'a node'} to be ready")
    in_use = {
        node
        for one in instances
        if one.id.revision != target_revision and not (one.draining or one.terminating)
        for node in one.nodes
    }
    tolerations = (pool["spec"]["template"].get("spec") or {}).get("tolerations") or ()
    closed = {one.name for one in nodes or () if not lets_in_daemons(one, tolerations)}
    may_go = [key for key in outdated if key in here and _node(here[key]) not in closed]
    broken = [key for key in may_go if not _is_ready(here[key])]
    idle = [key for key in may_go if _node(here[key]) not in in_use]
    if first := next(iter([*broken, *idle]), None):
        return Turn(first)
    if may_go:
        return Turn(None, f"the engines of {_node(here[may_go[0]])} to be replaced")
    names = ", ".join(_node(children[key]) for key in outdated[:2])
    more = f" and {len(outdated) - 2} more" if len(outdated) > 2 else ""
    return Turn(None, f"{names}{more} to come back, or to let a new daemon in (see its taints)")


def until_known_s(children: Children, now_s: float) -> float:
    """How long until the newest ready daemon is known to the others; 0: it is.

    One that leaves sooner could not move its blocks there, and of two the second has no other peer.
    """
    ages_s = [
        abs(now_s - since_s)  # kubelets' clocks run apart from ours
        for _, pod in _pods(children)
        if not _leaves(pod) and (since_s := ready_since_s(pod)) is not None
    ]
    return max(0.0, KNOWN_S - min(ages_s, default=KNOWN_S))


def routers_are_current(children: Children) -> bool:
    """Whether every router's pod there is was made from what the spec says now, and one works."""
    for key, child in children.items():
        if key.kind != "Deployment" or _component(child) != "router":
            continue
        status = child.get("status") or {}
        if status.get("observedGeneration", 0) < child["metadata"].get("generation", 0):
            return False
        wanted, updated = child["spec"].get("replicas", 1), status.get("updatedReplicas", 0)
        if updated < wanted or updated < status.get("replicas", 0):
            return False
        # where the old ones went with their node, there may be no other than those that wait
        if wanted and not status.get("availableReplicas", 0):
            return False
    return True


def _older(children: Children, pool: Manifest) -> list[tuple[str, ObjectKey]]:
    wanted = _mark(pool["spec"]["template"])
    return sorted((_node(pod), key) for key, pod in _pods(children) if _mark(pod) != wanted)


def _settled(pool: Manifest, children: Children) -> bool:
    """Whether the DaemonSet's controller has made every pod of the template there is now."""
    status = pool.get("status") or {}
    if status.get("observedGeneration", 0) < pool["metadata"].get("generation", 0):
        return False
    # one that is still where none belongs any more stands in for no other
    counted = ("desiredNumberScheduled", "numberMisscheduled")
    return sum(1 for _ in _pods(children)) >= sum(int(status.get(name) or 0) for name in counted)


def _pool(children: Children) -> Manifest | None:
    found = [child for key, child in children.items() if key.kind == "DaemonSet"]
    return next((one for one in found if _is_pool(one) and not _leaves(one)), None)


def _pods(children: Children) -> Iterator[tuple[ObjectKey, Manifest]]:
    for key, child in children.items():
        if key.kind == "Pod" and _is_pool(child):
            yield key, child


def _reachable(children: Children) -> Iterator[tuple[str, str, bool]]:
    """Node, url, and whether it leaves, of daemons that are ready or leave."""
    for _, pod in _pods(children):
        leaving = _leaves(pod)
        there = _node(pod) and (pod.get("status") or {}).get("podIP")
        if there and (leaving or _is_ready(pod)):
            yield _node(pod), _url(pod), leaving


def _url(pod: Manifest) -> str:
    """While TLS comes or goes, only the pod itself says what its daemon speaks."""
    address = pod["status"]["podIP"]
    host = f"[{address}]" if ":" in address else address
    ports = [port for one in pod["spec"].get("containers") or () for port in one.get("ports") or ()]
    # others may have added a container with an https of its own
    names = [port.get("name") for port in ports if port.get("containerPort") == POOL_PORT]
    encrypted = "https" in names
    return f"{'https' if encrypted else 'http'}://{host}:{POOL_PORT}"


def _is_pool(child: Manifest) -> bool:
    return _component(child) == "umbp"


def _component(child: Manifest) -> str | None:
    return (child["metadata"].get("labels") or {}).get(COMPONENT_LABEL)


def _mark(template: Manifest) -> str | None:
    found = (template.get("metadata") or {}).get("annotations") or {}
    return found.get(DAEMON_ANNOTATION)


def _node(pod: Manifest) -> str:
    """Empty: it is on none yet."""
    return pod["spec"].get("nodeName") or ""


def _leaves(child: Manifest) -> bool:
    return "deletionTimestamp" in child["metadata"]


def _is_ready(pod: Manifest) -> bool:
    return ready_since_s(pod) is not None
