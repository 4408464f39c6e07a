"""What the conditions say: of each part, of all together, and why.

`Reconciling` and `Stalled` are kstatus' own: the first holds while anything is under way, the
second when nothing moves until a person changes something. `Ready` needs all of it: every wanted
instance serving at the revision the spec asks for, none of an older one left, a router and the
pool. No message says how long something has lasted, only since when: one that changed by itself
would be written again at every pass, and every write wakes the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kimi_operator.api.deployment import KimiDeployment
from kimi_operator.api.roles import RoleName
from kimi_operator.conditions import Condition
from kimi_operator.daemons import next_daemon, outdated_daemons, routers_are_current
from kimi_operator.eligibility import nodes_eligible
from kimi_operator.instances import pod_failures
from kimi_operator.observed import InstanceView, LostPod, Manifest, Observed
from kimi_operator.rollout.view import Step
from kimi_operator.stamps import rfc3339

CONNECTED_ENGINES = frozenset({"kimistack"})
"""Engines with an adapter to the router. Any other is rendered, and never Ready."""


@dataclass(frozen=True)
class Problem:
    """Something that only a person, or time, can change. `stalled`: nothing is tried meanwhile."""

    reason: str
    message: str
    stalled: bool = True


@dataclass(frozen=True)
class Facts:
    """What a status is made from. `update_revision` is what the spec asks for.

    `left_out` says, one line each, what the cluster does not serve; `load_s` how long an instance
    of a role took to become ready the last time, where one did.
    """

    deployment: KimiDeployment
    observed: Observed
    step: Step
    targets: Mapping[RoleName, int]
    scaling_reason: str
    update_revision: str
    left_out: Sequence[str] = ()
    problems: Sequence[Problem] = ()
    recommendation: str | None = None
    further: Sequence[Condition] = ()
    scaling_stale: bool = False


def conditions_of(
    facts: Facts, router: Manifest | None, pool: Manifest | None
) -> tuple[Condition, ...]:
    """Every condition, Ready first."""
    spec = facts.deployment.spec
    parts = {name: _role_condition(facts, name) for name, _ in spec.roles()}
    parts_list = [*parts.values(), _router_condition(facts, router)]
    if spec.kv_pool.enabled:
        parts_list.append(_pool_condition(facts, pool))
    progress = _progress(facts)
    stalled = _stalled(facts)
    degraded = _degraded(facts)
    ready = _ready(facts, parts_list, progress, stalled)
    waits = ready.holds is False and stalled.holds is False and ready.reason != "Suspended"
    working = progress.holds is True or waits
    reconciling = Condition(
        "Reconciling",
        working and stalled.holds is False,
        ready.reason if working else "Settled",
        ready.message if working else "",
    )
    return (
        ready,
        _available(facts, router),
        progress,
        reconciling,
        stalled,
        degraded,
        *parts_list,
        _model_condition(facts),
        _scaling(facts),
        nodes_eligible(spec, facts.targets, facts.observed.nodes),
        _support(facts),
        *facts.further,
    )


def _ready(
    facts: Facts, parts: Sequence[Condition], progress: Condition, stalled: Condition
) -> Condition:
    engine = facts.deployment.spec.engine
    if stalled.holds:
        return Condition("Ready", False, stalled.reason, stalled.message)
    if engine not in CONNECTED_ENGINES:
        return Condition(
            "Ready",
            False,
            "EngineNotConnected",
            f"engine {engine} is rendered and started, but the router cannot use it yet",
        )
    if facts.deployment.spec.suspend == "Scale":
        return Condition("Ready", False, "Suspended", "spec.suspend is Scale: no instance runs")
    missing = [part for part in parts if not part.holds]
    if missing and facts.deployment.spec.suspend == "Reconcile":
        why = "spec.suspend is Reconcile: nothing is changed"
        return Condition("Ready", False, "Suspended", f"{missing[0].message}; {why}")
    if missing:
        return Condition("Ready", False, missing[0].reason, missing[0].message)
    if progress.holds:
        return Condition("Ready", False, progress.reason, progress.message)
    return Condition("Ready", True, "Serving", f"requests are served at {url_of(facts.deployment)}")


def _available(facts: Facts, router: Manifest | None) -> Condition:
    serving = _serving_by_revision(facts)
    roles = [name for name, _ in facts.deployment.spec.roles()]
    complete = [rev for rev, have in sorted(serving.items()) if all(have.get(r) for r in roles)]
    if complete and count(router, "readyReplicas"):
        return Condition("Available", True, "Serving", f"revision {', '.join(complete)} serves")
    what = "no router is ready" if complete else "no revision has an instance of every role serving"
    return Condition("Available", False, "NotServing", what)


def _serving_by_revision(facts: Facts) -> dict[str, dict[RoleName, int]]:
    found: dict[str, dict[RoleName, int]] = {}
    for instance in facts.observed.instances:
        if instance.serving:
            have = found.setdefault(instance.id.revision, {})
            have[instance.id.role] = have.get(instance.id.role, 0) + 1
    return found


def _progress(facts: Facts) -> Condition:
    step = facts.step
    if facts.deployment.spec.suspend == "Reconcile" and not step.done:
        return Condition("Progressing", False, "Suspended", "spec.suspend is Reconcile")
    if facts.deployment.spec.rollout.paused and not step.done:
        return Condition("Progressing", False, "Paused", "spec.rollout.paused is true")
    if not step.done:
        waiting = f": {step.waiting_for}" if step.waiting_for else ""
        return Condition(
            "Progressing",
            True,
            "RollingOut",
            f"step {step.step} of {step.total_steps} to revision {step.target_revision}{waiting}",
        )
    asked = facts.update_revision
    if step.target_revision == asked:
        return Condition("Progressing", False, "Complete", f"revision {asked}")
    why = f"revision {step.target_revision} instead of {asked}, which the rest of the spec asks for"
    return Condition("Progressing", False, "Complete", why)


def _stalled(facts: Facts) -> Condition:
    for problem in facts.problems:
        if problem.stalled:
            return Condition("Stalled", True, problem.reason, problem.message)
    step = facts.step
    if step.failed is not None:
        return Condition(
            "Stalled",
            True,
            "ProgressDeadlineExceeded",
            f"revision {step.failed} did not get ready within rollout.progressDeadline: "
            f"{step.waiting_for or 'see the instances'}; correct the spec",
        )
    if _rolled_back(facts):
        return Condition(
            "Stalled",
            True,
            "RolledBack",
            f"revision {facts.update_revision}, which the spec asks for, did not get ready within "
            f"rollout.progressDeadline; {step.target_revision} runs again. Correct the spec, or "
            f"keep that one by rollout.toRevision: {step.target_revision}",
        )
    if step.outage is not None and not facts.deployment.spec.rollout.allow_outage:
        return Condition(
            "Stalled",
            True,
            "OutageNeeded",
            f"{step.outage}; allow it with rollout.allowOutage: true",
        )
    return Condition("Stalled", False, "Moving")


def _rolled_back(facts: Facts) -> bool:
    """Whether another revision is wanted than the spec's, though nobody said so."""
    said_so = facts.deployment.spec.rollout.to_revision is not None
    return not said_so and facts.step.target_revision not in ("", facts.update_revision)


def _degraded(facts: Facts) -> Condition:
    lost = _lost_nodes(facts)
    found = [*lost, *(f"{p.reason}: {p.message}" for p in facts.problems if not p.stalled)]
    failing = [i for i in facts.observed.instances if i.failures and not i.terminating]
    found += [f"{name_of(i)}: {i.failures[0]}" for i in failing[:5]]
    if len(failing) > 5:
        found.append(f"and {len(failing) - 5} instances more")
    if not found:
        return Condition("Degraded", False, "AsWanted")
    soft = [*(["NodeLost"] if lost else []), *(p.reason for p in facts.problems if not p.stalled)]
    return Condition("Degraded", True, soft[0] if soft else "InstancesFail", "; ".join(found))


def _scaling(facts: Facts) -> Condition:
    if not facts.scaling_stale:
        return Condition("ScalingReady", True, "Scaling", facts.scaling_reason)
    why = f"{facts.scaling_reason}; the routers' GET /signals must reach the operator"
    return Condition("ScalingReady", False, "MetricsStale", why)


def _lost_nodes(facts: Facts) -> list[str]:
    """A line per node that does not answer: since when, which pods are there, what comes next."""
    nodes: dict[str, list[LostPod]] = {}
    for lost in facts.observed.lost:
        nodes.setdefault(lost.node, []).append(lost)
    return [
        f"NodeLost: node {node} {_since(pods[0])} with {', '.join(one.pod for one in pods[:5])}"
        f"{f' and {len(pods) - 5} more' if len(pods) > 5 else ''}; {_next_of(pods)}"
        for node, pods in sorted(nodes.items())
    ]


def _since(lost: LostPod) -> str:
    if lost.since_s is None:
        return "is gone"
    return f"is not ready since {rfc3339(lost.since_s)}"


def _next_of(pods: Sequence[LostPod]) -> str:
    if all(one.expired for one in pods):
        return "the workers' leases have ended: the pods are taken away and made again elsewhere"
    waits = next(one.waits_for for one in pods if not one.expired)
    return f"pods are made again elsewhere once that is safe: {waits}"


def _support(facts: Facts) -> Condition:
    if not facts.left_out:
        return Condition("FullySupported", True, "AllServed", "the cluster serves all that is used")
    return Condition("FullySupported", False, "NotServed", "; ".join(facts.left_out))


def _role_condition(facts: Facts, name: RoleName) -> Condition:
    kind = f"{name.capitalize()}Ready"
    want = facts.targets.get(name, 0)
    mine = [i for i in facts.observed.instances if i.id.role == name]
    serving = sum(1 for i in mine if i.serving)
    if serving >= want:
        return Condition(kind, True, "Serving", f"{serving} of {want} instances serve")
    reason, _, why = blocked(facts, name).partition(": ")
    return Condition(kind, False, reason, f"{serving} of {want} instances serve; {why}")


def blocked(facts: Facts, name: RoleName) -> str:
    """What the role's slowest instance waits for, as `Reason: text`."""
    mine = [i for i in facts.observed.instances if i.id.role == name and not i.terminating]
    waiting = sorted((i for i in mine if not i.ready), key=lambda i: i.created_s)
    if not waiting:
        why = facts.step.waiting_for or "instances are about to be created"
        return f"Creating: {why}"
    gone = {lost.instance: lost for lost in facts.observed.lost}
    slowest = next((i for i in waiting if i.id in gone), waiting[0])
    if slowest.id in gone:
        lost = gone[slowest.id]
        return f"NodeLost: pod {lost.pod} is on node {lost.node}, which {_since(lost)}"
    since = rfc3339(slowest.created_s) if slowest.created_s else "just now"
    if slowest.failures:
        return f"{slowest.failures[0]} (instance {name_of(slowest)}, since {since})"
    if slowest.pods_made < slowest.pods_desired:
        return (
            f"Creating: instance {name_of(slowest)} has {slowest.pods_made} of "
            f"{slowest.pods_desired} pods, since {since}; where it stays so, kubectl describe "
            f"statefulset says what refuses them (a quota, an admission webhook)"
        )
    if slowest.pods_scheduled < slowest.pods_desired:
        return (
            f"Scheduling: instance {name_of(slowest)} has {slowest.pods_scheduled} of "
            f"{slowest.pods_desired} pods on a node, since {since}"
        )
    if slowest.pods_not_started:
        return (
            f"Starting: pod {slowest.pods_not_started[0]} has no container started, since {since}; "
            "it pulls the image or waits for a volume, kubectl describe pod says for which"
        )
    role = next(role for role_name, role in facts.deployment.spec.roles() if role_name == name)
    took = [i.ready_since_s - i.created_s for i in mine if i.ready_since_s and i.created_s]
    expected = (
        f"the last one took {_ago(took[-1])}"
        if took
        else f"it has {_ago(role.probes.startup_timeout)} for it"
    )
    return f"Loading: instance {name_of(slowest)} loads the model, since {since}; {expected}"


def _router_condition(facts: Facts, router: Manifest | None) -> Condition:
    ready, want = count(router, "readyReplicas"), facts.deployment.spec.router.replicas
    text = f"{ready} of {want} routers are ready"
    if router is not None and ready >= want:
        return Condition("RouterReady", True, "Serving", text)
    why = _refused_pods(router) or _failure_of(facts.observed, "router")
    return Condition("RouterReady", False, "RouterNotReady", f"{text}{why}")


def _pool_condition(facts: Facts, pool: Manifest | None) -> Condition:
    ready, want = count(pool, "numberReady"), count(pool, "desiredNumberScheduled")
    text = f"{ready} of {want} nodes have the pool{_outdated(facts)}"
    if pool is not None and want and ready >= want:
        return Condition("KVPoolReady", True, "Serving", text)
    why = _failure_of(facts.observed, "umbp")
    if not want and pool is not None:
        why = (
            "; where it stays so, no node matches the placement of an engine role: one with GPUs "
            "has the label amd.com/gpu.device-id or feature.node.kubernetes.io/amd-gpu=true"
        )
    return Condition("KVPoolReady", False, "PoolNotReady", f"{text}{why}")


def _outdated(facts: Facts) -> str:
    """How many daemons are still of an earlier spec, and who replaces them."""
    found = len(outdated_daemons(facts.observed.children))
    if not found:
        return ""
    spec = facts.deployment.spec
    if spec.kv_pool.update_strategy == "OnDelete":
        how = "until their pods are deleted"
    elif spec.suspend == "Reconcile":
        how = "while spec.suspend holds them"
    elif spec.rollout.paused:
        how = "while spec.rollout.paused holds them"
    elif spec.preflight == "Require" and not all(one.holds for one in facts.further):
        how = "until preflight passes"
    elif not routers_are_current(facts.observed.children):
        how = f"until the routers are replaced{_failure_of(facts.observed, 'router')}"
    else:
        how = f"and are replaced one node at a time{_turn(facts)}"
    return f"; {found} are of an earlier spec {how}"


def _turn(facts: Facts) -> str:
    observed, target = facts.observed, facts.step.target_revision
    waits_for = next_daemon(observed.children, observed.instances, observed.nodes, target).waits_for
    return f"; the next waits for {waits_for}" if waits_for else ""


def _refused_pods(workload: Manifest | None) -> str:
    """What keeps a Deployment's pods from being made, as its controller says."""
    for condition in ((workload or {}).get("status") or {}).get("conditions") or ():
        if (condition["type"], condition["status"]) == ("ReplicaFailure", "True"):
            return f"; {condition.get('message') or condition.get('reason')}"
    return ""


def _failure_of(observed: Observed, component: str) -> str:
    """The first thing amiss with the component's pods that waiting does not cure."""
    for key, pod in sorted(observed.children.items()):
        labels = pod["metadata"].get("labels") or {}
        ours = key.kind == "Pod" and labels.get("app.kubernetes.io/component") == component
        if ours and "deletionTimestamp" not in pod["metadata"]:
            for failure in pod_failures(pod):
                return f"; {failure}"
    return ""


def _model_condition(facts: Facts) -> Condition:
    loaded = sum(1 for i in facts.observed.instances if i.ready)
    if loaded:
        return Condition("ModelReady", True, "Loaded", f"{loaded} instances have loaded it")
    return Condition("ModelReady", False, "NotLoaded", "no instance has loaded the model")


def url_of(deployment: KimiDeployment) -> str:
    namespace = deployment.metadata.namespace or "default"
    port = deployment.spec.router.service.port
    suffix = "" if port == 80 else f":{port}"
    return f"http://{deployment.name}-router.{namespace}.svc{suffix}/v1"


def workload(observed: Observed, kind: str, component: str) -> Manifest | None:
    for key, child in sorted(observed.children.items()):
        labels = child["metadata"].get("labels") or {}
        if key.kind == kind and labels.get("app.kubernetes.io/component") == component:
            return child
    return None


def count(workload: Manifest | None, field: str) -> int:
    """A number of a workload's status, if that speaks of the spec there is now."""
    if workload is None:
        return 0
    status = workload.get("status") or {}
    if status.get("observedGeneration", 0) < workload["metadata"].get("generation", 0):
        return 0
    return int(status.get(field) or 0)


def name_of(instance: InstanceView) -> str:
    return f"{instance.id.role}-{instance.id.revision}-{instance.id.index}"


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 0):.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
