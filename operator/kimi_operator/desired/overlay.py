"""The user's `podTemplate` over the rendered pod: Kubernetes' strategic merge, as far as it fits.

Lists of things with a name are merged by it, other lists are replaced, null removes, and
`$patch: delete` removes an element. What the operator decides cannot be merged away.
"""

from collections.abc import Mapping
from typing import Any

from kimi_operator.api.pods import NEVER_TOLERATED
from kimi_operator.observed import Manifest
from kimi_runtime.errors import ConfigError

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Key by which Kubernetes merges a list of a pod; lists without one are replaced."""
ENGINE = "engine"
OURS = "kimistack.dev/"
_PATCH = "$patch"


def merged(below: Any, over: Any, field: str = "") -> Any:
    """`over` merged onto `below`, neither of them changed."""
    if isinstance(over, Mapping) and isinstance(below, Mapping):
        if over.get(_PATCH) == "replace":
            return {key: value for key, value in over.items() if key != _PATCH}
        result = dict(below)
        for key, value in over.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(below.get(key), value, key)
        return result
    key = MERGE_KEYS.get(field)
    if isinstance(over, list) and key is not None:
        return _by_key(below or [], over, key, field)
    return over


def _by_key(below: list[Any], over: list[Any], key: str, field: str) -> list[Any]:
    items = {item[key]: item for item in below}
    for item in over:
        if not isinstance(item, Mapping) or key not in item:
            raise ConfigError(f"podTemplate: every item of {field} needs {key}")
        if item.get(_PATCH) == "delete":
            items.pop(item[key], None)
        else:
            items[item[key]] = merged(items.get(item[key], {}), item)
    return list(items.values())


def with_template(
    pod: Manifest, template: Mapping[str, Any] | None, where: str, *, managed: bool
) -> Manifest:
    """A pod template with the user's merged over it.

    `managed`: the engine's command is ours. Raises ConfigError, `where` first, for an overlay that
    takes the operator's labels, the engine's command, or a taint that is never tolerated.
    """
    if not template:
        return pod
    metadata, spec = template.get("metadata", {}) or {}, template.get("spec", {}) or {}
    unknown = sorted(set(template) - {"metadata", "spec"})
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]}; a pod has metadata and spec")
    for part in ("labels", "annotations"):
        taken = [key for key in metadata.get(part, {}) or {} if key.startswith(OURS)]
        if taken:
            raise ConfigError(f"{where}.metadata.{part}: {taken[0]} is the operator's own")
    for container in spec.get("containers", []) or []:
        ours = isinstance(container, Mapping) and container.get("name") == ENGINE
        changed = sorted({"command", "args", _PATCH} & set(container)) if ours else []
        if managed and changed:
            raise ConfigError(
                f"{where}: container engine: {changed[0]} is the operator's while managedCommand "
                "is true; use engineArgs or env"
            )
    result: Manifest = merged(pod, template)
    for toleration in result["spec"].get("tolerations", []):
        if toleration.get("key") is None or toleration["key"] in NEVER_TOLERATED:
            raise ConfigError(
                f"{where}.spec.tolerations: {' and '.join(NEVER_TOLERATED)} mark nodes that cannot "
                "serve; name the taints you mean by key"
            )
    return result
