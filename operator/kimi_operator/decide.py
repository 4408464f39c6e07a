"""From a resource and what is observed to everything one pass should bring about. Pure.

`kimistack plan` and the operator call the same `Decider`. The only thing it keeps from one call to
the next is the history that a planner of mode Managed smooths over.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.load import validated
from kimi_operator.api.roles import RoleName
from kimi_operator.changes import Delete, deletion
from kimi_operator.daemons import next_daemon, pool_peers, pool_urls, until_known_s
from kimi_operator.desired.effective import Effective, GetPreset, resolve
from kimi_operator.desired.render import Rendered, render, revision_of
from kimi_operator.desired.revision import Revision
from kimi_operator.instances import instance_id
from kimi_operator.observed import InstanceId, Manifest, ObjectKey, Observed
from kimi_operator.preflight.verdict import Preflight, preflight_of
from kimi_operator.presets.preset import load_preset
from kimi_operator.revisions import (
    FAILED,
    numbered,
    remembered,
    shape_of,
)
from kimi_operator.rollout import Revisions, RolloutView, Step, next_step, view_of
from kimi_operator.scale import seeded, workers_status
from kimi_operator.scaling import History, Targets, seed, targets
from kimi_operator.status import selector_of_role
from kimi_operator.verdicts import Facts, Problem
from kimi_runtime.errors import CapacityError, ConfigError


class NotDecided(Exception):
    """The spec cannot run, whatever is observed: a condition for its author, not a failure."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Decision:
    """What one pass brings about.

    `wanted` are children in apply order; `kept` are children that are neither wanted nor pruned;
    `once` are created by POST alone; `seeds` are what an object is created as where that differs
    from what is applied; `scales` are the replicas the planner wants by KimiWorkers; `drain` are
    the instances whose pods are marked; `renewed` are pods to be deleted, so that they are made
    anew. With `hands_off` only the status is written.
    """

    wanted: tuple[Manifest, ...]
    kept: frozenset[ObjectKey]
    once: tuple[Manifest, ...]
    seeds: Mapping[ObjectKey, Manifest]
    scales: Mapping[ObjectKey, int]
    drain: frozenset[InstanceId]
    workers_status: Mapping[ObjectKey, Mapping[str, Any]]
    facts: Facts
    wait_s: float | None
    hands_off: bool
    renewed: tuple[Delete, ...] = ()


@dataclass
class Decider:
    """Decides, deployment by deployment."""

    get_preset: GetPreset = load_preset
    _histories: dict[str, History] = field(default_factory=dict)
    _resolved: dict[str, tuple[Any, Effective]] = field(default_factory=dict)

    def __call__(self, resource: Manifest, observed: Observed, now_s: float) -> Decision:
        """The decision. Raises NotDecided where the spec cannot run."""
        uid = resource["metadata"]["uid"]
        history = self._histories.get(uid, History())
        with as_not_decided():
            effective = self._effective(resource)
            decision, self._histories[uid] = decide(effective, observed, history, now_s)
        return decision

    def forget(self, uid: str) -> None:
        """Of a deployment that is gone."""
        self._histories.pop(uid, None)
        self._resolved.pop(uid, None)

    def _effective(self, resource: Manifest) -> Effective:
        """The effective deployment; resolved once as long as nothing it depends on changes."""
        metadata = resource["metadata"]
        version = (metadata["generation"], metadata.get("annotations"), metadata.get("labels"))
        known = self._resolved.get(metadata["uid"])
        if known is not None and known[0] == version:
            return known[1]
        found = effective_of(resource, self.get_preset)
        self._resolved[metadata["uid"]] = (version, found)
        return found


@contextmanager
def as_not_decided() -> Iterator[None]:
    """ConfigError and CapacityError become NotDecided, with the condition's reason."""
    try:
        yield
    except CapacityError as exc:
        raise NotDecided("DoesNotFit", str(exc)) from exc
    except ConfigError as exc:
        raise NotDecided("InvalidSpec", str(exc)) from exc


@dataclass(frozen=True)
class Prospect:
    """All that the next step is chosen from, and every later one until something changes.

    `now_s` is Unix time; `stored` are the kept revisions, oldest first, `update` what the spec asks
    for; `view`,
    `revisions` and `counts.by_role` are what `rollout.next_step` and `all_steps` take.
    """

    effective: Effective
    observed: Observed
    now_s: float
    stored: tuple[Revision, ...]
    update: Revision
    counts: Targets
    view: RolloutView
    revisions: Revisions
    preflight: Preflight

    @property
    def known(self) -> dict[str, Revision]:
        """Revisions by name, the update included."""
        return {revision.name: revision for revision in (*self.stored, self.update)}


def prospect_of(
    effective: Effective, observed: Observed, history: History, now_s: float
) -> Prospect:
    """What a decision is made from. Raises ConfigError and CapacityError."""
    stored = remembered(observed.revisions)
    update = revision_of(effective, kept=stored)
    spec = effective.deployment.spec
    counts = targets(spec, observed, history, now_s)
    resources = {role.gpu.resource or "amd.com/gpu" for _, role in spec.roles()}
    view = view_of(spec, {r.name: shape_of(r, resources) for r in (*stored, update)})
    names = tuple(dict.fromkeys(r.name for r in (*stored, update)))
    failed = frozenset(
        manifest["data"]["name"]
        for manifest in observed.revisions
        if (manifest["metadata"].get("annotations") or {}).get(FAILED) == "true"
    )
    revisions = Revisions(update=update.name, history=names, failed=failed & set(names))
    look = preflight_of(effective, observed)
    return Prospect(effective, observed, now_s, stored, update, counts, view, revisions, look)


def decide(
    effective: Effective, observed: Observed, history: History, now_s: float
) -> tuple[Decision, History]:
    """The decision and the history for the next one.

    Raises ConfigError and CapacityError, and NotDecided where engines cannot serve here at all.
    """
    prospect = prospect_of(effective, observed, history, now_s)
    return decided(prospect, step_of(prospect, now_s)), prospect.counts.history


def step_of(prospect: Prospect, now_s: float) -> Step:
    """The next step; one that starts or replaces nothing does not wait for preflight."""
    there, view = prospect.observed.instances, prospect.view
    rest = (there, prospect.revisions, prospect.counts.by_role, now_s)
    step = next_step(view, *rest)
    hold = prospect.preflight.hold
    moves = step.drain or step.instances - {instance.id for instance in there}
    if hold is None or not moves:
        return step
    return next_step(replace(view, hold=hold), *rest)


def decided(prospect: Prospect, step: Step) -> Decision:
    """What brings the step about. Raises NotDecided where engines cannot serve here at all."""
    effective, observed, stored = prospect.effective, prospect.observed, prospect.stored
    update, known = prospect.update, prospect.known
    rendered = _rendered(effective, observed, stored, update, known, step)
    blocking = [o for o in rendered.obstacles if o.reason != "EngineNotConnected"]
    if blocking:
        raise NotDecided(blocking[0].reason, "; ".join(o.message for o in blocking))
    decision = _decision(effective, observed, rendered, step, update, prospect.counts, known)
    decision = _with_daemons(decision, prospect, step)
    return _with_preflight(decision, prospect.preflight)


def _with_preflight(decision: Decision, preflight: Preflight) -> Decision:
    """With the Jobs that look at nodes, and what they found."""
    if preflight.condition is None:
        return decision
    facts = decision.facts
    problems = [*facts.problems]
    if preflight.failed:
        problems.append(Problem("PreflightFailed", preflight.condition.message))
    return replace(
        decision,
        wanted=(*decision.wanted, *preflight.jobs),
        kept=decision.kept | preflight.kept,
        facts=replace(facts, problems=tuple(problems), further=(preflight.condition,)),
    )


def effective_of(resource: Manifest, get_preset: GetPreset = load_preset) -> Effective:
    """The effective deployment of a stored resource. Raises ConfigError, CapacityError."""
    metadata = {k: v for k, v in resource["metadata"].items() if k != "managedFields"}
    document = {k: v for k, v in resource.items() if k != "status"} | {"metadata": metadata}
    name = resource["metadata"]["name"]
    return resolve(validated(document, name), get_preset, name)


def _rendered(
    effective: Effective,
    observed: Observed,
    stored: tuple[Revision, ...],
    update: Revision,
    known: Mapping[str, Revision],
    step: Step,
) -> Rendered:
    instances = [i for i in step.instances if i.revision in known]
    unrouted = {i for i in instances if i.revision not in step.routed}
    in_use = {i.revision for i in step.instances} | {i.id.revision for i in observed.instances}
    return render(
        effective,
        revisions=known,
        instances=sorted(instances),
        capabilities=observed.capabilities,
        update=step.target_revision if step.target_revision in known else update.name,
        history=_history(effective.deployment.spec, stored, update, in_use),
        pools=pool_urls(observed.children),
        peers=pool_peers(observed.children),
        draining=step.drain | unrouted,
    )


def _history(
    spec: DeploymentSpec, stored: tuple[Revision, ...], update: Revision, in_use: set[str]
) -> list[Revision]:
    """Revisions to keep, oldest first: in use, the update, and the newest up to the limit."""
    newest: dict[str, Revision] = {}
    last = update.digest
    for revision in stored:
        newest[revision.digest] = revision
    newest.pop(last, None)
    newest[last] = update
    # of several that differ in the router or the pool alone, the last stands for the name
    last_of = {revision.name: digest for digest, revision in newest.items()}
    others = [
        digest
        for digest, revision in newest.items()
        if digest != last and not (revision.name in in_use and last_of[revision.name] == digest)
    ]
    dropped = set(others[: max(0, len(others) - spec.rollout.revision_history_limit)])
    return [revision for digest, revision in newest.items() if digest not in dropped]


def _decision(
    effective: Effective,
    observed: Observed,
    rendered: Rendered,
    step: Step,
    update: Revision,
    counts: Targets,
    known: Mapping[str, Revision],
) -> Decision:
    deployment = effective.deployment
    spec = deployment.spec
    manifests = numbered(rendered.manifests, observed.revisions, step.failed)
    unknown = {i for i in step.instances if i.revision not in known}
    kept = frozenset(
        key
        for key, child in observed.children.items()
        if instance_id(child["metadata"].get("labels") or {}) in unknown
    )
    once = tuple(m for m in manifests if m["kind"] == "Secret")
    workers = {ObjectKey.of(m): m for m in manifests if m["kind"] == "KimiWorkers"}
    roles = dict(spec.roles())
    problems = []
    if spec.suspend == "Reconcile":
        problems.append(
            Problem("Suspended", "spec.suspend is Reconcile: nothing is changed", stalled=False)
        )
    facts = Facts(
        deployment=deployment,
        observed=observed,
        step=step,
        targets=counts.by_role,
        scaling_reason=counts.reason,
        scaling_stale=counts.stale,
        update_revision=update.name,
        left_out=tuple(f"{left.what}: {left.reason}" for left in rendered.left_out),
        problems=tuple(problems),
        recommendation=counts.recommendation,
    )
    waits = [wait for wait in (step.wait_s, counts.wait_s) if wait is not None]
    return Decision(
        wanted=tuple(m for m in manifests if m not in once),
        kept=kept.union(map(ObjectKey.of, once)),
        once=once,
        seeds={
            key: seeded(m, seed(_role(m), roles[_role(m)], observed)) for key, m in workers.items()
        },
        scales=_scales(spec, workers, counts),
        drain=step.drain,
        workers_status={
            key: workers_status(
                observed.children[key],
                observed.instances,
                selector_of_role(deployment.name, _role(m)),
            )
            for key, m in workers.items()
            if key in observed.children
        },
        facts=facts,
        wait_s=min(waits, default=None),
        hands_off=spec.suspend == "Reconcile",
    )


def _with_daemons(decision: Decision, prospect: Prospect, step: Step) -> Decision:
    """With the pool's daemon whose turn it is; none while a rollout is paused or held back."""
    spec, observed = prospect.effective.deployment.spec, prospect.observed
    held = spec.rollout.paused or prospect.preflight.hold is not None
    if spec.kv_pool.update_strategy != "Coordinated" or held:
        return decision
    children = observed.children
    key, _ = next_daemon(children, observed.instances, observed.nodes, step.target_revision)
    if key is None:
        return decision
    wait_s = until_known_s(children, prospect.now_s)
    if wait_s:
        sooner = wait_s if decision.wait_s is None else min(wait_s, decision.wait_s)
        return replace(decision, wait_s=sooner)
    return replace(decision, renewed=(deletion(key, children[key]),))


def _role(workers: Manifest) -> RoleName:
    role: RoleName = workers["spec"]["role"]
    return role


def _scales(
    spec: DeploymentSpec, workers: Mapping[ObjectKey, Manifest], counts: Targets
) -> dict[ObjectKey, int]:
    """Replicas by KimiWorkers of the roles whose number the planner decides."""
    if spec.suspend == "Scale":
        return {}  # the number is what they come back to
    managed = {name for name, role in spec.roles() if role.scaling.mode == "Managed"}
    return {
        key: counts.by_role[_role(manifest)]
        for key, manifest in workers.items()
        if _role(manifest) in managed
    }


__all__ = [
    "Decider",
    "Decision",
    "NotDecided",
    "Prospect",
    "as_not_decided",
    "decide",
    "decided",
    "effective_of",
    "prospect_of",
    "step_of",
]
