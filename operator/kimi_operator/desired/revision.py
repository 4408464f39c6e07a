"""A revision: the pods as they were rendered, frozen, so that only a changed spec changes them.

What is rendered from a spec is kept in a ControllerRevision with a fingerprint of the fields it was
rendered from. While those fields stay, pods are made from what is kept, never rendered anew: a
newer operator, or a newer preset, restarts nothing. Replica counts and other fields that no pod
contains are not part of the fingerprint.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from kimi_operator.api.deployment import ROLES
from kimi_operator.api.roles import RoleName
from kimi_operator.desired.labels import Owner, metadata_of
from kimi_operator.desired.merge import Tree
from kimi_operator.desired.names import digest_of, revision_object_name
from kimi_operator.observed import REVISION_LABEL, Manifest

REVISION_DIGITS = 6
INPUTS_ANNOTATION = "kimistack.dev/inputs"
"""Fingerprints by component, beside the data: what is kept may have come from several specs, and
the data of a ControllerRevision never changes."""
NOT_IN_PODS = ("rollout", "budget", "suspend", "observability", "preflight")
"""Fields of the spec that no pod's template is made from; of `observability`, logLevel is."""
NOT_IN_ROLE_PODS = ("replicas", "scaling")
POOL_ALONE = (
    "peers",
    "evacuation",
    "keepArena",
    "numaNodes",
    "tenants",
    "tenantDefault",
)
"""Fields of `kvPool` that no engine's or router's pod is made from."""
NOT_IN_ROUTER_PODS = ("replicas", "service", "gateway", "canary")


@dataclass(frozen=True)
class Frozen:
    """The pods of one component: what a template needs, and what goes beside it.

    `pod` is a pod template without the labels that tell deployments and instances apart. `configs`
    are ConfigMaps by name. `ports` are by name; where `host_network`, each instance gets its own
    block instead. `spread` is the topology key that instances of a revision are kept apart by.
    """

    inputs: str
    pod: Manifest
    configs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    nodes: int = 1
    host_network: bool = False
    spread: str | None = None

    def __post_init__(self) -> None:
        # lists are made of these, and a server gives a stored mapping back in an order of its own
        object.__setattr__(self, "configs", dict(sorted(self.configs.items())))
        object.__setattr__(self, "ports", dict(sorted(self.ports.items())))

    @property
    def content(self) -> dict[str, Any]:
        """All but the fingerprint of what it was rendered from."""
        return {name: value for name, value in vars(self).items() if name != "inputs"}


@dataclass(frozen=True)
class Revision:
    """What one spec was rendered to. `templates` by component: prefill, decode, router, umbp.

    `name` is six hex digits of the hash of the engines' templates: a change of the router alone
    makes a new Revision of the same name, and replaces no engine.
    """

    name: str
    templates: Mapping[str, Frozen]
    image: str
    """Of the engine pods; empty where the spec names none."""

    @cached_property
    def digest(self) -> str:
        """Hash of everything in it but the fingerprints, as 64 hex digits."""
        return digest_of({name: part.content for name, part in sorted(self.templates.items())})

    def role(self, name: RoleName) -> Frozen:
        """The engine pods of a role; KeyError if this revision does not have the role."""
        return self.templates[name]


def named(templates: Mapping[str, Frozen], image: str) -> Revision:
    """The Revision of these templates, named by the engines' part of them."""
    engines = {name: part.content for name, part in sorted(templates.items()) if name in ROLES}
    name = digest_of(engines)[:REVISION_DIGITS]
    return Revision(name, MappingProxyType(dict(templates)), image)


def fingerprint(written: Tree, component: str, roles: Collection[str]) -> str:
    """Hash of what the user wrote that the pods of a component are made from.

    `roles` are the roles the deployment has, whether the user or a preset says so.
    """
    return _fingerprint(written, component, roles, ("networkPolicy", "tlsSecretName"))


def former_fingerprint(written: Tree, component: str, roles: Collection[str]) -> str:
    """The same as operators up to 0.3 wrote it of engines.

    The Secret's name was among their fields, though nothing was made from it.
    """
    return _fingerprint(written, component, roles, ("networkPolicy",))


def _fingerprint(
    written: Tree, component: str, roles: Collection[str], not_in_pods: tuple[str, ...]
) -> str:
    others = (*NOT_IN_PODS, *ROLES, "router", "security")
    shared = {key: value for key, value in written.items() if key not in others}
    secured = written.get("security", {})
    shared["security"] = _without(secured, not_in_pods)
    if component not in ROLES and secured.get("tlsSecretName"):
        shared["poolTls"] = secured["tlsSecretName"]
    shared["logLevel"] = written.get("observability", {}).get("logLevel")
    if component != "umbp" and "kvPool" in shared:
        shared["kvPool"] = _without(shared["kvPool"], POOL_ALONE)
    own: Tree
    if component in ROLES:
        own = _without(written.get(component, {}), NOT_IN_ROLE_PODS)
    else:
        # the token restarts engines alone
        shared.pop("restartToken", None)
        # pool and router go where engines go
        own = {role: _without(written.get(role, {}), NOT_IN_ROLE_PODS) for role in sorted(roles)}
        if component == "router":
            own["router"] = _without(written.get("router", {}), NOT_IN_ROUTER_PODS)
        else:
            own["image"] = written.get("router", {}).get("image")
    return digest_of([component, shared, sorted(roles), own])[:16]


def _without(tree: Tree, fields: tuple[str, ...]) -> Tree:
    return {key: value for key, value in tree.items() if key not in fields}


def to_controller_revision(revision: Revision, n: int, owner: Owner) -> Manifest:
    """The ControllerRevision that keeps a Revision; `n` orders them, from 1."""
    name = revision_object_name(owner.name, revision.digest)
    parts = sorted(revision.templates.items())
    inputs = {component: part.inputs for component, part in parts}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": metadata_of(
            owner,
            name,
            "deployment",
            labels={REVISION_LABEL: revision.name},
            annotations={INPUTS_ANNOTATION: json.dumps(inputs, sort_keys=True)},
        ),
        "revision": n,
        "data": {
            "name": revision.name,
            "image": revision.image,
            "templates": {component: part.content for component, part in parts},
        },
    }


def from_controller_revision(manifest: Manifest) -> Revision:
    """The Revision a ControllerRevision keeps. Raises ValueError if it is not one of ours."""
    try:
        data = manifest["data"]
        inputs = json.loads(manifest["metadata"]["annotations"][INPUTS_ANNOTATION])
        templates = {
            component: Frozen(inputs=inputs.get(component, ""), **part)
            for component, part in data["templates"].items()
        }
        return Revision(data["name"], MappingProxyType(templates), data["image"])
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        name = manifest.get("metadata", {}).get("name")
        raise ValueError(f"ControllerRevision {name} keeps no revision: {exc!r}") from exc
