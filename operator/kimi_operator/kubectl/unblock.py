"""`kubectl kimi unblock`: let a deletion end that waits for an operator which is gone.

The finalizer holds a KimiDeployment until an operator has taken its children down in order. Without
one it would wait for ever. Taking the finalizer off leaves the rest to garbage collection, which
deletes every child by its owner reference, all at once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kimi_operator.changes import is_owned
from kimi_operator.kube import Kube
from kimi_operator.kubectl.actions import Tell
from kimi_operator.kubectl.sight import Sight, key_of
from kimi_operator.observed import Manifest, ObjectKey
from kimi_operator.stamps import seconds
from kimi_operator.teardown import FINALIZER
from kimi_runtime.errors import ClusterConflict, ClusterError, ConfigError

LEASE_KIND = "coordination.k8s.io/v1/Lease"
LEASE_NAME = "kimi-operator"
FRESH_DURATIONS = 4.0
"""Clocks of this machine and of the operator's may differ by some durations of the Lease."""


@dataclass(frozen=True)
class Holder:
    """An operator that renewed its Lease not long ago."""

    namespace: str
    identity: str
    renewed_ago_s: float


async def live_operators(kube: Kube, namespaces: Sequence[str], now_s: float) -> tuple[Holder, ...]:
    """Operators at work: everywhere, or in these namespaces where not all may be read."""
    try:
        leases = await kube.list(LEASE_KIND, None)
    except ClusterError as exc:
        if exc.code != 403:
            raise
        leases = await _readable(kube, namespaces)
    return tuple(
        holder
        for lease in leases
        if lease["metadata"]["name"] == LEASE_NAME
        if (holder := _holder(lease, now_s)) is not None
    )


async def _readable(kube: Kube, namespaces: Sequence[str]) -> list[Manifest]:
    found = []
    for namespace in dict.fromkeys(namespaces):
        lease = await kube.get(ObjectKey("coordination.k8s.io/v1", "Lease", namespace, LEASE_NAME))
        if lease is not None:
            found.append(lease)
    return found


def _holder(lease: Manifest, now_s: float) -> Holder | None:
    spec = lease["spec"]
    identity = spec.get("holderIdentity") or ""
    ago_s = now_s - seconds(spec.get("renewTime"))
    fresh_s = FRESH_DURATIONS * float(spec.get("leaseDurationSeconds") or 15)
    if not identity or ago_s > fresh_s:
        return None
    return Holder(lease["metadata"]["namespace"], identity, max(ago_s, 0.0))


def what_is_left(sight: Sight) -> Mapping[str, int]:
    """Children by kind; each goes with its owner."""
    assert sight.resource is not None
    uid = sight.resource["metadata"]["uid"]
    return Counter(at.kind for at, child in sorted(sight.children.items()) if is_owned(child, uid))


async def unblock(
    kube: Kube, sight: Sight, operators: Sequence[Holder], *, force: bool, tell: Tell
) -> None:
    """Take our finalizer off a deployment that is being deleted.

    Raises ConfigError where it is not being deleted, or where an operator is at work and `force`
    is not given.
    """
    assert sight.resource is not None
    metadata = sight.resource["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    finalizers = list(metadata.get("finalizers") or ())
    if "deletionTimestamp" not in metadata:
        raise ConfigError(
            f"{name} is not being deleted; ask for that first: kubectl -n {namespace} delete "
            f"kimideployment {name} --wait=false"
        )
    others = [one for one in finalizers if one != FINALIZER]
    if FINALIZER not in finalizers:
        held = f"others hold it: {', '.join(others)}" if others else "nothing holds it"
        tell(f"{name}: {FINALIZER} is not there; {held}")
        return
    if operators and not force:
        raise ConfigError(f"{_at_work(operators)}: it takes {name} down in order; {_FORCE}")
    left = what_is_left(sight)
    # the resourceVersion is a precondition: what else was written to the list must not be lost
    patch = {"metadata": {"finalizers": others, "resourceVersion": metadata["resourceVersion"]}}
    try:
        answer = await kube.merge(key_of(namespace, name), patch)
    except ClusterConflict as exc:
        raise ClusterConflict(f"{name} was changed meanwhile; run it again", code=409) from exc
    tell(f"{name}: {FINALIZER} is taken off")
    if answer is not None and others:
        tell(f"{name}: it stays until these are gone too: {', '.join(others)}")
    if left:
        listed = ", ".join(f"{count} {kind}" for kind, count in left.items())
        tell(f"{name}: garbage collection deletes what it owns: {listed}")


_FORCE = "wait for it, or, if it does not watch that namespace, use --force"


def _at_work(operators: Sequence[Holder]) -> str:
    first = operators[0]
    return (
        f"an operator is at work in namespace {first.namespace} ({first.identity}, its Lease was "
        f"renewed {first.renewed_ago_s:.0f}s ago)"
    )
