"""Privilege of pods, accounts without rights, and the Secret of the call key.

No pod of a deployment talks to the API server: the router's list of workers is a file. So there is
an account per component, for image pulls and policies to refer to, without a token and without a
Role.
"""

from typing import Any

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.desired.labels import Component, Owner, metadata_of
from kimi_operator.desired.names import call_key_name, engine_name, pool_name, router_name
from kimi_operator.observed import Manifest

UID = 65532
"""User of our images."""
VIDEO_GIDS = (44, 109, 992)
"""Groups that own /dev/kfd and /dev/dri on common hosts: video, and render of Debian's and Ubuntu's
releases. Another host's is added by podTemplate."""
CREATE_ONLY = "kimistack.dev/create-only"
"""Annotation of an object that is created once and never applied over: its data is not rendered."""
CALL_KEY = "call-key"
CALL_KEY_DIR = "/etc/kimistack-keys"


def pod_uid(spec: DeploymentSpec) -> int:
    """User of the processes that share a node's folder: engines of kimistack and the pool.

    Kubernetes hands added capabilities to root's processes only, so where a profile adds one the
    user is root, with every other capability dropped. All that share a socket are the same user.
    """
    return UID if spec.security.profile == "Restricted" else 0


def pod_security(spec: DeploymentSpec, *, own_image: bool, gpus: bool) -> Manifest:
    """Security context of an engine or pool pod; other engines' images choose their own user."""
    context: Manifest = {"seccompProfile": {"type": spec.security.seccomp}}
    if own_image:
        uid = pod_uid(spec)
        context |= {"runAsUser": uid, "runAsGroup": uid, "fsGroup": uid}
        if uid:
            context["runAsNonRoot"] = True
    if gpus:
        context["supplementalGroups"] = list(VIDEO_GIDS)
    return context


def container_security(spec: DeploymentSpec, *, own_image: bool, devices: bool) -> Manifest:
    """Security context of an engine or pool container; `devices`: it reaches RDMA or host devices.

    The profile must cover what is asked for; the API's rules see to that.
    """
    profile = spec.security.profile
    if devices and profile == "Privileged":
        return {"privileged": True}
    context: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if devices and profile == "RDMA":
        # registered memory is locked memory
        context["capabilities"]["add"] = ["IPC_LOCK"]
    if own_image:
        context["readOnlyRootFilesystem"] = True
    return context


def router_security() -> tuple[Manifest, Manifest]:
    """Security contexts of the router's pod and container: it needs nothing of the host."""
    pod = {
        "runAsUser": UID,
        "runAsGroup": UID,
        "fsGroup": UID,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    return pod, container


def service_accounts(owner: Owner, spec: DeploymentSpec, *, pool: bool) -> list[Manifest]:
    """An account for each component that names none of its own."""
    wanted: list[tuple[str, Component]] = [(router_name(owner.name), "router")]
    if spec.security.service_account_name is None:
        wanted.append((engine_name(owner.name), "engine"))
    if pool:
        wanted.append((pool_name(owner.name), "umbp"))
    secrets = [{"name": secret} for secret in spec.image_pull_secrets]
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata_of(owner, name, component),
            "automountServiceAccountToken": False,
            **({"imagePullSecrets": secrets} if secrets else {}),
        }
        for name, component in sorted(wanted)
    ]


def call_key_secret(owner: Owner) -> Manifest:
    """The Secret of the call key, without the key: whoever creates it adds one, `with_call_key`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata_of(
            owner, call_key_name(owner.name), "deployment", annotations={CREATE_ONLY: "true"}
        ),
    }


def with_call_key(secret: Manifest, key: str) -> Manifest:
    """The Secret with a key (64 hex digits of a random source) to be created by POST alone."""
    return {**secret, "stringData": {CALL_KEY: key + "\n"}}


def call_key_volume(owner_name: str) -> dict[str, Any]:
    """Volume `call-key`, readable by the pod's group and nobody else."""
    return {
        "name": "call-key",
        "secret": {"secretName": call_key_name(owner_name), "defaultMode": 0o440},
    }
