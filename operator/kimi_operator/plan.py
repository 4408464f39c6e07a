"""What a spec would change in a cluster, before anything is written. Pure.

The same decision that a pass of the operator makes is rolled forward to the end of the rollout:
`changes` is the way from the objects there are to those that are there then, `stages` the passes
in between.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kimi_operator.api.base import API_VERSION
from kimi_operator.api.defaults import stored
from kimi_operator.api.deployment import DeploymentSpec, KimiDeployment
from kimi_operator.api.load import validated
from kimi_operator.changes import Changes, changes
from kimi_operator.conditions import Condition
from kimi_operator.daemons import nodes_to_renew
from kimi_operator.decide import (
    NotDecided,
    Prospect,
    as_not_decided,
    decided,
    effective_of,
    prospect_of,
)
from kimi_operator.desired.effective import GetPreset
from kimi_operator.field_changes import FieldChange, differences, field_changes, value_changes
from kimi_operator.observed import InstanceId, Manifest, ObjectKey, Observed
from kimi_operator.presets.preset import load_preset
from kimi_operator.rollout import Stage, Step, all_steps, next_step
from kimi_operator.scaling import History
from kimi_operator.verdicts import conditions_of

TOLD = ("NodesEligible", "FullySupported", "PreflightPassed")
"""Conditions that can be told of a spec before it runs."""


@dataclass(frozen=True)
class ObjectChange:
    """One object. `repair`: somebody changed what is ours of it."""

    action: Literal["create", "change", "repair", "delete"]
    key: ObjectKey
    fields: tuple[FieldChange, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a spec is refused, as the condition of the resource would say it."""

    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What applying a spec leads to.

    `spec` are the changed fields of the KimiDeployment itself; `once` are objects made by creation
    alone and never read. `outage` names an interruption that the rollout needs, `waits` what it
    stops at before it is done. `daemons` are the nodes whose pool daemon is of an earlier spec
    then, `daemons_by` who replaces it. `warnings` are conditions that would not hold. `refusal`:
    nothing of the spec would be brought about.
    """

    namespace: str
    name: str
    exists: bool
    spec: tuple[FieldChange, ...] = ()
    changes: tuple[ObjectChange, ...] = ()
    once: tuple[ObjectKey, ...] = ()
    taken: tuple[ObjectKey, ...] = ()
    stages: tuple[Stage, ...] = ()
    daemons: tuple[str, ...] = ()
    daemons_by: Literal["operator", "user"] = "operator"
    current_revision: str | None = None
    update_revision: str | None = None
    outage: str | None = None
    waits: str | None = None
    warnings: tuple[Condition, ...] = ()
    refusal: Refusal | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing would change."""
        return not (self.spec or self.changes or self.refusal or self.taken or not self.exists)


def resource_of(deployment: KimiDeployment, namespace: str, live: Manifest | None) -> Manifest:
    """The resource as applying the deployment would write it, over the one there is."""
    resource: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": "KimiDeployment",
        "metadata": {
            "name": deployment.name,
            "namespace": namespace,
            "labels": dict(deployment.metadata.labels),
            "annotations": dict(deployment.metadata.annotations),
            "generation": 1,
        },
        "spec": deployment.written(),
    }
    if live is not None:
        metadata = live["metadata"]
        there = {name: metadata[name] for name in ("uid", "generation") if name in metadata}
        # kubectl's apply leaves what others annotated
        theirs = {**metadata.get("annotations", {}), **resource["metadata"]["annotations"]}
        resource["metadata"] = {**resource["metadata"], **there, "annotations": theirs}
    return resource


def plan_of(
    resource: Manifest,
    live: Manifest | None,
    observed: Observed,
    now_s: float,
    *,
    taken: Collection[ObjectKey] = (),
    get_preset: GetPreset = load_preset,
) -> Plan:
    """The plan for a resource (`resource_of`), with `live` as it is now.

    `taken` are names of objects to be created that others have already.
    """
    metadata = resource["metadata"]
    plan = Plan(metadata["namespace"], metadata["name"], live is not None)
    try:
        with as_not_decided():
            if live is not None:
                plan = replace(plan, spec=_spec_changes(resource, live))
                _check_update(resource, live)
            effective = effective_of(stored(resource), get_preset)
            prospect = prospect_of(effective, observed, History(), now_s)
            return _planned(plan, prospect, metadata.get("uid", ""), now_s, taken)
    except NotDecided as exc:
        return replace(plan, refusal=Refusal(exc.reason, str(exc)))


def wanted_keys(plan: Plan) -> tuple[ObjectKey, ...]:
    """Names of the objects to be created, which somebody else's object may have."""
    return tuple(change.key for change in plan.changes if change.action == "create")


def _spec_changes(resource: Manifest, live: Manifest) -> tuple[FieldChange, ...]:
    """Only what differs in meaning: a default that is written out is no change, nor is an object
    of nothing but defaults, which is what a pause that was taken back leaves. Where the live spec
    breaks a rule, which a server without CEL lets in, all that differs may be its repair.
    """
    read = _read(resource)
    after = {"spec": _read(stored(resource)).written()}
    try:
        before = {"spec": _read(stored(live)).written()}
    except NotDecided:
        return value_changes({"spec": live["spec"]}, after)
    full = {"spec": read.spec.model_dump(mode="json", exclude_none=True)}
    unlike = [change.path for change in differences(before, full)]
    gone = [
        change
        for change in value_changes(before, after)
        if change.after is None and any(_is_at(change.path, path) for path in unlike)
    ]
    return (*differences({"spec": read.written()}, before), *gone)


def _is_at(path: str, other: str) -> bool:
    """Whether `other` is the field or lies below it."""
    return other == path or other.startswith((f"{path}.", f"{path}["))


def _read(resource: Mapping[str, Any]) -> KimiDeployment:
    document = {
        "apiVersion": API_VERSION,
        "kind": "KimiDeployment",
        "metadata": {"name": resource["metadata"]["name"]},
        "spec": resource["spec"],
    }
    with as_not_decided():
        return validated(document, resource["metadata"]["name"])


def _check_update(resource: Manifest, live: Manifest) -> None:
    """Raise NotDecided for a change that the API server refuses."""
    name = resource["metadata"]["name"]
    if "deletionTimestamp" in live["metadata"]:
        raise NotDecided("Deleting", f"{name} is being deleted; apply it once it is gone")
    new = _read(resource).spec
    try:
        old = _read(live).spec
    except NotDecided:
        return  # what is there cannot be read: this change may be its repair
    for rule in DeploymentSpec.update_rules:
        if not rule.holds(old, new):
            raise NotDecided("InvalidSpec", f"{name}: spec: {rule.message}")


def _planned(
    plan: Plan, prospect: Prospect, uid: str, now_s: float, taken: Collection[ObjectKey]
) -> Plan:
    observed, counts = prospect.observed, prospect.counts.by_role
    first = next_step(prospect.view, observed.instances, prospect.revisions, counts, now_s)
    decision = decided(prospect, _at_the_end(prospect, first, now_s))
    conditions = conditions_of(replace(decision.facts, step=first), None, None)
    plan = replace(
        plan,
        current_revision=first.serving_revision if observed.instances else None,
        update_revision=first.target_revision,
        warnings=tuple(c for c in conditions if c.type in TOLD and c.holds is False),
    )
    if decision.hands_off:
        return replace(plan, waits="spec.suspend is Reconcile: nothing is changed")
    stages = all_steps(prospect.view, observed.instances, prospect.revisions, counts, now_s)
    daemons = nodes_to_renew(observed.children, decision.wanted)
    difference = changes(decision.wanted, observed.children, uid, kept=decision.kept)
    return replace(
        plan,
        changes=_object_changes(difference, observed.children),
        once=tuple(map(ObjectKey.of, decision.once)) if not plan.exists else (),
        taken=tuple(sorted({*difference.foreign, *taken})),
        stages=stages,
        daemons=daemons,
        daemons_by=_replaces_daemons(prospect),
        outage=next((stage.outage for stage in stages if stage.outage), None),
        waits=_waits(stages, prospect, daemons),
    )


def _replaces_daemons(prospect: Prospect) -> Literal["operator", "user"]:
    strategy = prospect.effective.deployment.spec.kv_pool.update_strategy
    return "operator" if strategy == "Coordinated" else "user"


def _waits(stages: tuple[Stage, ...], prospect: Prospect, daemons: tuple[str, ...]) -> str | None:
    """What it stops at, or is held by before it begins."""
    hold, starts = prospect.preflight.hold, any(stage.created for stage in stages)
    if hold is not None and starts:
        return hold
    if not stages[-1].done:
        return stages[-1].waiting_for
    # the steps are those of engines, of which none may change
    held = daemons and prospect.view.paused and _replaces_daemons(prospect) == "operator"
    return "rollout.paused is true" if held else None


def _at_the_end(prospect: Prospect, first: Step, now_s: float) -> Step:
    """The step that leaves nothing to do: what a person is waited for is taken as said."""
    view = replace(prospect.view, allow_outage=True, paused=False, canary=None)
    there = prospect.observed.instances
    left: set[InstanceId] = {i.id for i in there if not (i.terminating or i.draining)}
    for stage in all_steps(view, there, prospect.revisions, prospect.counts.by_role, now_s):
        left = (left | set(stage.created) | set(stage.kept_again)) - set(stage.drained)
    return replace(
        first,
        instances=frozenset(left),
        drain=frozenset(),
        serving_revision=first.target_revision,
        routed=frozenset({first.target_revision}),
        done=True,
        failed=None,
    )


def _object_changes(
    difference: Changes, children: Mapping[ObjectKey, Manifest]
) -> tuple[ObjectChange, ...]:
    found: list[ObjectChange] = []
    for apply in difference.applies:
        if apply.reason == "create":
            found.append(ObjectChange("create", apply.key))
            continue
        fields = field_changes(apply.manifest, children[apply.key])
        action: Literal["change", "repair"] = "change" if apply.reason == "change" else "repair"
        found.append(ObjectChange(action, apply.key, fields))
    found += [ObjectChange("delete", delete.key) for delete in difference.deletes]
    return tuple(found)
