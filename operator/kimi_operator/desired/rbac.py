"""Rights of the operator and of its users, from the one table of kinds."""

from collections.abc import Iterable
from typing import Any

from kimi_operator.api.base import GROUP
from kimi_operator.kinds import CHILDREN, CLUSTER_WIDE, KINDS, OTHERS, OURS, Kind

PolicyRule = dict[str, list[str]]

ELECTION_KINDS = tuple(kind for kind in OTHERS if kind.kind in ("Lease", "Event"))
"""What the operator writes in its own namespace whichever namespaces it watches."""


def policy_rules(kinds: Iterable[Kind]) -> list[PolicyRule]:
    """Rules that grant exactly the verbs of the kinds, one per API group and set of verbs."""
    granted: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for kind in kinds:
        wanted = [(kind.plural, kind.verbs)]
        wanted += [(f"{kind.plural}/{name}", verbs) for name, verbs in kind.subresources]
        for resource, verbs in wanted:
            granted.setdefault((kind.group, tuple(sorted(verbs))), set()).add(resource)
    return [
        {"apiGroups": [group], "resources": sorted(resources), "verbs": list(verbs)}
        for (group, verbs), resources in sorted(granted.items())
    ]


def operator_rules() -> dict[str, list[PolicyRule]]:
    """What the operator may do: `namespaced` where it watches, `election` where it runs, `nodes`.

    Node eligibility needs the last; without it the condition says so.
    """
    return {
        "namespaced": policy_rules(kind for kind in KINDS if kind.namespaced),
        "election": policy_rules(ELECTION_KINDS),
        "nodes": policy_rules(CLUSTER_WIDE),
    }


def user_rules() -> dict[str, list[PolicyRule]]:
    """What a namespace's `view` and `edit` gain: our resources, and the scale of workers."""
    ours = sorted(kind.plural for kind in (*OURS, *CHILDREN) if kind.group == GROUP)
    status = [f"{plural}/status" for plural in ours]
    view = {
        "apiGroups": [GROUP],
        "resources": sorted([*ours, *status, "kimiworkers/scale"]),
        "verbs": ["get", "list", "watch"],
    }
    edit = {
        "apiGroups": [GROUP],
        "resources": ["kimideployments"],
        "verbs": ["create", "delete", "deletecollection", "patch", "update"],
    }
    scale = {
        "apiGroups": [GROUP],
        "resources": ["kimiworkers/scale"],
        "verbs": ["patch", "update"],
    }
    return {"view": [view], "edit": [edit, scale]}


def crd_rules() -> list[PolicyRule]:
    """What the Job needs that writes the CRDs before an upgrade: those two, and no others."""
    group = ["apiextensions.k8s.io"]
    names = sorted(f"{kind.plural}.{GROUP}" for kind in (*OURS, *CHILDREN) if kind.group == GROUP)
    crds = ["customresourcedefinitions"]
    return [
        {"apiGroups": group, "resources": crds, "verbs": ["create"]},
        {"apiGroups": group, "resources": crds, "resourceNames": names, "verbs": ["get", "patch"]},
    ]


def all_rules() -> dict[str, Any]:
    """Every list of rules, as the Helm chart reads them."""
    return {**operator_rules(), **user_rules(), "crds": crd_rules()}
