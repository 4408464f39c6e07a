"""The deployment of the end-to-end tests: where it is, what is said of it, how it is asked."""

from typing import Any

import openai

from kimi_operator.kinds import CHILDREN
from kimi_operator.observed import DEPLOYMENT_LABEL, ObjectKey
from nodes import Manifest, Nodes

READY_S = 180.0
ROLES = ("prefill", "decode")
NAMESPACE = "kimistack"
NAME = "kimi-nano"
DEPLOYMENT = ObjectKey("kimistack.dev/v1alpha1", "KimiDeployment", NAMESPACE, NAME)
OWNED = f"{DEPLOYMENT_LABEL}%3D{NAME}"
ENGINES = f"{OWNED},app.kubernetes.io/component%3Dengine"
ROUTERS = f"{OWNED},app.kubernetes.io/component%3Drouter"
POOLS = f"{OWNED},app.kubernetes.io/component%3Dumbp"
PREFLIGHTS = f"{OWNED},app.kubernetes.io/component%3Dpreflight"


def condition(obj: Manifest | None, name: str) -> Manifest:
    """A condition of the status; an empty one if it is not there."""
    conditions = (obj or {}).get("status", {}).get("conditions", ())
    return next((dict(one) for one in conditions if one["type"] == name), {})


def ready(obj: Manifest | None) -> bool:
    """Whether the deployment serves as its spec says now."""
    seen = (obj or {}).get("status", {}).get("observedGeneration")
    current = obj is not None and seen == obj["metadata"]["generation"]
    return current and condition(obj, "Ready").get("status") == "True"


def serving(obj: Manifest | None, **counts: int) -> bool:
    """Whether it is ready with so many instances of each role, and no more."""
    pools = (obj or {}).get("status", {}).get("pools", {})
    found = {role: pools.get(role, {}) for role in counts}
    return ready(obj) and all(
        found[role].get("ready") == found[role].get("desired") == count
        for role, count in counts.items()
    )


def children(nodes: Nodes) -> dict[ObjectKey, Manifest]:
    """What the operator made for it."""
    found = (nodes.list(kind.id, NAMESPACE, OWNED) for kind in CHILDREN)
    return {ObjectKey.of(obj): obj for objects in found for obj in objects}


def owned(nodes: Nodes) -> dict[ObjectKey, Manifest]:
    """Of these, what belongs to the deployment itself and not to one of its children."""
    return {
        key: obj
        for key, obj in children(nodes).items()
        for owner in obj["metadata"].get("ownerReferences", ())
        if owner["kind"] == DEPLOYMENT.kind
    }


def engines(nodes: Nodes) -> dict[str, Manifest]:
    """Pods of engines by uid."""
    return {pod["metadata"]["uid"]: pod for pod in nodes.list("v1/Pod", NAMESPACE, ENGINES)}


def staying(nodes: Nodes, labels: str) -> dict[str, Manifest]:
    """Pods by uid, but those that leave."""
    pods = nodes.list("v1/Pod", NAMESPACE, labels)
    return {p["metadata"]["uid"]: p for p in pods if "deletionTimestamp" not in p["metadata"]}


def restarts(pods: dict[str, Manifest]) -> dict[str, int]:
    """How often the containers of each pod were restarted."""
    return {
        uid: sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ()))
        for uid, pod in pods.items()
    }


def kimi(nodes: Nodes, command: str, *arguments: str, within_s: float = 60) -> str:
    """What `kubectl kimi COMMAND kimi-nano …` prints."""
    words = ("kimi", command, NAME, *arguments, "-n", NAMESPACE)
    return nodes.kubectl(*words, within_s=within_s)


def scale(nodes: Nodes, replicas: int) -> None:
    """So many instances of both roles, by KimiWorkers, to which the spec leaves their number."""
    external = {role: {"replicas": None, "scaling": {"mode": "External"}} for role in ROLES}
    nodes.merge(DEPLOYMENT, {"spec": external})
    for role in ROLES:
        key = ObjectKey("kimistack.dev/v1alpha1", "KimiWorkers", NAMESPACE, f"{NAME}-{role}")
        nodes.until(key, lambda now: now is not None, READY_S, "created")
        wanted = ("scale", "kimiworkers", key.name, f"--replicas={replicas}", "-n", NAMESPACE)
        nodes.kubectl(*wanted)
    nodes.until(
        DEPLOYMENT,
        lambda now: serving(now, prefill=replicas, decode=replicas),
        READY_S,
        f"{replicas}+{replicas} and Ready",
    )


def router_url(nodes: Nodes) -> str:
    """The OpenAI API at the router's Service."""
    service = nodes.get(ObjectKey("v1", "Service", NAMESPACE, f"{NAME}-router"))
    assert service is not None
    return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}/v1"


def ask(client: openai.OpenAI, text: str = "Hello", **options: Any) -> Any:
    """A chat completion of a few tokens."""
    asked = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return client.chat.completions.create(**asked | options)
