"""Names of everything that is rendered. They are derived, never generated and never cut.

A deployment's name has at most 30 characters (`api.metadata.NAME_CAP`), so that the longest name
made from it here, plus what Kubernetes adds to a StatefulSet's for its own labels, keeps within the
63 characters of a label.
"""

import hashlib
import json
from collections.abc import Mapping

from kimi_operator.api.roles import RoleName
from kimi_operator.observed import InstanceId

MAX_INSTANCES = 200
"""Of one role: three digits, and a block of ports each on the host's network."""


def instance_name(deployment: str, instance: InstanceId) -> str:
    """Of an instance's StatefulSet and of its headless Service, e.g. `kimi-k26-d-a1b2c3-0`."""
    return f"{deployment}-{instance.role[0]}-{instance.revision}-{instance.index}"


def pod_name(deployment: str, instance: InstanceId, ordinal: int = 0) -> str:
    """Of a pod of an instance; ordinal 0 is the one that serves."""
    return f"{instance_name(deployment, instance)}-{ordinal}"


def pod_host(deployment: str, namespace: str, instance: InstanceId, ordinal: int = 0) -> str:
    """The DNS name of a pod of an instance, the same for as long as the instance is there."""
    service = instance_name(deployment, instance)
    return f"{pod_name(deployment, instance, ordinal)}.{service}.{namespace}.svc"


def router_name(deployment: str) -> str:
    """Of the router's Deployment, Service, ServiceAccount, budget and route."""
    return f"{deployment}-router"


def pool_name(deployment: str) -> str:
    """Of the KV pool's DaemonSet, Service and ServiceAccount."""
    return f"{deployment}-umbp"


def pool_host(deployment: str, namespace: str) -> str:
    """What the certificate of the pool's daemons is made out to: their Service."""
    return f"{pool_name(deployment)}.{namespace}.svc"


def peers_name(deployment: str) -> str:
    """Of the ConfigMap that tells the pool's daemons of each other."""
    return f"{deployment}-umbp-peers"


def engine_name(deployment: str) -> str:
    """Of what engines of both roles share."""
    return f"{deployment}-engine"


def role_name(deployment: str, role: RoleName) -> str:
    """Of a role's KimiWorkers, autoscaler and disruption budget."""
    return f"{deployment}-{role}"


def call_key_name(deployment: str) -> str:
    """Of the Secret with the call key."""
    return f"{deployment}-call-key"


def revision_object_name(deployment: str, digest: str) -> str:
    """Of the ControllerRevision that keeps a rendered revision."""
    return f"{deployment}-{digest[:10]}"


def config_name(deployment: str, component: str, data: Mapping[str, str]) -> str:
    """Of a ConfigMap by what is in it: other content is another object, unseen by old pods."""
    return f"{deployment}-{component}-{digest_of(data)[:6]}"


def digest_of(value: object) -> str:
    """sha256 of plain data in its canonical form (sorted keys, no blanks), as 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
