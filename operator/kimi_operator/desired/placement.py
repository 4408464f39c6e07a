"""Which nodes pods go to: the user's choice, AMD's validation labels, and instances apart."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.pods import Placement, Toleration
from kimi_operator.api.roles import Role
from kimi_operator.observed import DEPLOYMENT_LABEL, REVISION_LABEL, Manifest

HOST = "kubernetes.io/hostname"
PRODUCT_LABEL = "amd.com/gpu.product-name"
PARTITION_LABELS = ("amd.com/compute-memory-partition", "amd.com/gpu.compute-memory-partition")
"""Documentation of the labeller has the first, its code writes the second."""
GPU_NODE: tuple[Manifest, ...] = (
    {"key": "amd.com/gpu.device-id", "operator": "Exists"},
    {"key": "beta.amd.com/gpu.device-id", "operator": "Exists"},
    {"key": "feature.node.kubernetes.io/amd-gpu", "operator": "In", "values": ["true"]},
)
"""Any of these marks a node with AMD GPUs."""
GPU_CHECKS = (
    "amd.com/gpu-hw-acceptance",
    "amd.com/gpu-mesh-validation",
    "amd.com/cluster-validation-status",
)
NIC_CHECKS = ("amd.com/nic-health", "amd.com/rail-bandwidth")
Term = dict[str, Any]
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"

NODE_TROUBLES = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
LEAVES_S = 20


def place(spec: DeploymentSpec, role: Role) -> Manifest:
    """Pod spec fields that place a role's pods."""
    placement = role.placement
    fields = _plain(placement)
    affinity = dict(placement.affinity or {})
    node = node_affinity(spec, role)
    if node:
        affinity["nodeAffinity"] = node
    if affinity:
        fields["affinity"] = affinity
    return fields


def place_router(spec: DeploymentSpec, selector: Mapping[str, str]) -> Manifest:
    """Pod spec fields that place the router's pods: on different hosts where there are some.

    Where it reads the vocabulary from a folder of the node, and the user places it nowhere else, it
    goes where engines go, which have that folder. It leaves a node that does not answer soon: it
    holds nothing that another one lacks, and the front door should not stay shut for the five
    minutes that are Kubernetes' default.
    """
    placement = spec.router.placement
    fields = _plain(placement)
    own = fields.setdefault("tolerations", [])
    own += [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LEAVES_S}
        for key in NODE_TROUBLES
        if all(one.get("key") != key for one in own)
    ]
    affinity: Manifest = {
        "podAntiAffinity": {_PREFERRED: [{"weight": 100, "podAffinityTerm": _pods(HOST, selector)}]}
    }
    free = placement.node_selector is None and placement.affinity is None
    if spec.model.source == "hostPath" and free:
        beside = place_pool(spec, [role for _, role in spec.roles()])
        affinity |= beside.get("affinity", {})
        own += [one for one in beside.get("tolerations", []) if one not in own]
    fields["affinity"] = affinity | dict(placement.affinity or {})
    return fields


def _plain(placement: Placement) -> Manifest:
    fields: Manifest = {}
    if placement.node_selector:
        fields["nodeSelector"] = dict(placement.node_selector)
    if placement.tolerations:
        fields["tolerations"] = [_toleration(t) for t in placement.tolerations]
    return fields


def _toleration(toleration: Toleration) -> Manifest:
    data: Manifest = toleration.model_dump(mode="json", exclude_none=True)
    return data


def node_affinity(spec: DeploymentSpec, role: Role) -> Manifest:
    """The user's node affinity, and with every term of it what the role's GPUs need."""
    placement = role.placement
    affinity = dict((placement.affinity or {}).get("nodeAffinity", {}))
    terms: list[Term] = affinity.get(_REQUIRED, {}).get("nodeSelectorTerms", []) or [{}]
    always = _expressions(spec, role)
    either: Sequence[Sequence[Manifest]] = [[]]
    if role.gpu.partition is not None:
        either = [[_in(label, role.gpu.partition)] for label in PARTITION_LABELS]
    merged = [
        {**term, "matchExpressions": [*term.get("matchExpressions", []), *always, *one]}
        for term, one in product(terms, either)
    ]
    if any(term["matchExpressions"] or len(term) > 1 for term in merged):
        affinity[_REQUIRED] = {"nodeSelectorTerms": merged}
    wanted = _preferences(spec, role)
    if wanted:
        affinity[_PREFERRED] = [*affinity.get(_PREFERRED, []), *wanted]
    return affinity


def _expressions(spec: DeploymentSpec, role: Role) -> list[Manifest]:
    wanted = [_in(label, "passed") for label in role.placement.require_labels]
    if role.gpu.product is not None:
        wanted.append(_in(PRODUCT_LABEL, role.gpu.product))
    checks = _checks(spec, role)
    wanted += [
        {"key": check, "operator": "NotIn", "values": ["failed"]}
        for check in checks
        if check not in role.placement.require_labels
    ]
    return wanted


def _preferences(spec: DeploymentSpec, role: Role) -> list[Manifest]:
    return [
        {"weight": 50, "preference": {"matchExpressions": [_in(check, "passed")]}}
        for check in _checks(spec, role)
        if check in NIC_CHECKS and check not in role.placement.require_labels
    ]


def _checks(spec: DeploymentSpec, role: Role) -> tuple[str, ...]:
    gpu = GPU_CHECKS if role.gpus else ()
    return (*gpu, *(NIC_CHECKS if spec.rdma.mode != "none" else ()))


def _in(key: str, value: str) -> Manifest:
    return {"key": key, "operator": "In", "values": [value]}


def place_pool(spec: DeploymentSpec, roles: Sequence[Role]) -> Manifest:
    """Pod spec fields that put the pool's daemon where a pod of any of these roles may run."""
    terms: list[Term] = []
    for role in roles:
        chosen = [
            {"key": k, "operator": "In", "values": [v]}
            for k, v in sorted((role.placement.node_selector or {}).items())
        ]
        affinity = node_affinity(spec, role)
        own = affinity.get(_REQUIRED, {})
        named = chosen or (role.placement.affinity or {}).get("nodeAffinity")
        marks = [[]] if named or not _is_amd(role) else [[mark] for mark in GPU_NODE]
        terms += [
            {**term, "matchExpressions": [*term.get("matchExpressions", []), *chosen, *mark]}
            for term, mark in product(own.get("nodeSelectorTerms", [{}]), marks)
        ]
    unique = [term for index, term in enumerate(terms) if term not in terms[:index]]
    tolerated: list[Manifest] = []
    for role in roles:
        tolerated += [t for t in map(_toleration, role.placement.tolerations) if t not in tolerated]
    fields: Manifest = {}
    if tolerated:
        fields["tolerations"] = tolerated
    if all(term.get("matchExpressions") or term.get("matchFields") for term in unique):
        fields["affinity"] = {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": unique}}}
    return fields


def _is_amd(role: Role) -> bool:
    return role.gpus > 0 and (role.gpu.resource or "").startswith("amd.com/")


def apart(pod: Manifest, topology_key: str, selector: Mapping[str, str], own: Manifest) -> None:
    """Add to `pod` (a pod spec) that pods of `selector` other than its `own` are elsewhere.

    `own` is a label expression that pods of other instances meet.
    """
    term = _pods(topology_key, selector)
    term["labelSelector"]["matchExpressions"] = [own]
    _require(pod, "podAntiAffinity", term)


def together(pod: Manifest, deployment: str, component: Mapping[str, str]) -> None:
    """Add to `pod` that all engines of its revision are on one host, as shared memory needs.

    That is where others of the deployment are if it can be: there is room for them once those are
    gone. Which revision it is only the pods know (`of_revision`): its name is a hash of this.
    """
    engines = {DEPLOYMENT_LABEL: deployment, **component}
    _require(pod, "podAffinity", _pods(HOST, {**engines, REVISION_LABEL: ""}))
    affinity = pod["affinity"]["podAffinity"]
    beside = {"weight": 100, "podAffinityTerm": _pods(HOST, engines)}
    affinity[_PREFERRED] = [*affinity.get(_PREFERRED, []), beside]


def of_revision(pod: Manifest, revision: str) -> None:
    """Say in a pod's affinity which revision it has; what an older operator rendered stays."""
    for term in pod.get("affinity", {}).get("podAffinity", {}).get(_REQUIRED, []):
        labels = term.get("labelSelector", {}).get("matchLabels", {})
        if labels.get(REVISION_LABEL) == "":
            labels[REVISION_LABEL] = revision


def _pods(topology_key: str, selector: Mapping[str, str]) -> Manifest:
    return {"topologyKey": topology_key, "labelSelector": {"matchLabels": dict(selector)}}


def _require(pod: Manifest, kind: str, term: Manifest) -> None:
    affinity = dict(pod.get("affinity", {}))
    part = dict(affinity.get(kind, {}))
    part[_REQUIRED] = [*part.get(_REQUIRED, []), term]
    pod["affinity"] = affinity | {kind: part}
