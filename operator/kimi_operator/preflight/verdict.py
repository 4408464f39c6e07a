"""What preflight says of a deployment: its Jobs, the condition, and what waits for it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from kimi_operator.changes import is_owned
from kimi_operator.conditions import Condition
from kimi_operator.desired.effective import Effective
from kimi_operator.desired.labels import Owner
from kimi_operator.desired.preflight import FAILED, Target, job_name, preflight_job
from kimi_operator.instances import pod_failures
from kimi_operator.observed import Manifest, ObjectKey, Observed
from kimi_operator.preflight.classes import NodeClass, node_classes
from kimi_operator.preflight.demand import wanted_of
from kimi_operator.preflight.report import Report

KIND = "PreflightPassed"
State = Literal["passed", "failed", "looking", "broken"]
SHOWN = 3


@dataclass(frozen=True)
class Look:
    """One class and what its Job has found so far; `text` says it for people."""

    node_class: NodeClass
    job: Manifest
    state: State
    text: str = ""


@dataclass(frozen=True)
class Preflight:
    """`jobs` are wanted, `kept` are there already and never written again. `condition` is None
    where preflight is disabled; `hold` is why no instance may be started, None where one may.
    """

    jobs: tuple[Manifest, ...] = ()
    kept: frozenset[ObjectKey] = frozenset()
    condition: Condition | None = None
    hold: str | None = None

    @property
    def failed(self) -> bool:
        """Whether only a person can let the deployment go on."""
        return (
            self.hold is not None and self.condition is not None and (self.condition.holds is False)
        )


def preflight_of(effective: Effective, observed: Observed) -> Preflight:
    """Decided anew at every pass: a Job is made once per class and set of checks."""
    spec = effective.deployment.spec
    if spec.preflight == "Disabled":
        return Preflight()
    if observed.nodes is None:
        why = "the operator may not list nodes, so it does not know where to look"
        return _held(spec.preflight, (), Condition(KIND, None, "NodesNotReadable", why))
    looks = tuple(_looks(effective, observed, node_classes(spec, observed.nodes)))
    if not looks:
        why = "no node fits an instance; NodesEligible says why"
        return _held(spec.preflight, (), Condition(KIND, None, "NoNodes", why))
    return _held(spec.preflight, looks, _condition(looks), observed.children)


def _held(
    mode: str,
    looks: Sequence[Look],
    condition: Condition,
    children: Mapping[ObjectKey, Manifest] | None = None,
) -> Preflight:
    there = {ObjectKey.of(look.job) for look in looks} & (children or {}).keys()
    hold = None
    if mode == "Require" and condition.holds is not True:
        hold = f"preflight: {condition.message}"
    return Preflight(
        jobs=tuple(look.job for look in looks if ObjectKey.of(look.job) not in there),
        kept=frozenset(there),
        condition=condition,
        hold=hold,
    )


def _looks(
    effective: Effective, observed: Observed, classes: Sequence[NodeClass]
) -> Iterator[Look]:
    deployment, spec = effective.deployment, effective.deployment.spec
    owner = Owner.of(deployment)
    for node_class in classes:
        wanted = wanted_of(effective, node_class.roles)
        name = job_name(owner, spec, node_class.digest, wanted)
        key = ObjectKey("batch/v1", "Job", owner.namespace, name)
        there = observed.children.get(key)
        target = Target(node_class.digest, node_class.nodes[0], len(node_class.nodes))
        job = preflight_job(owner, spec, target, wanted)
        if there is None or not is_owned(there, owner.uid or ""):
            yield Look(node_class, job, "looking")
        else:
            yield _result(node_class, job, there, observed.children)


def _result(
    node_class: NodeClass, job: Manifest, there: Manifest, children: Mapping[ObjectKey, Manifest]
) -> Look:
    pod = next(
        (
            child
            for at, child in sorted(children.items())
            if at.kind == "Pod" and is_owned(child, there["metadata"]["uid"])
        ),
        None,
    )
    name = there["metadata"]["name"]
    ended = {
        c["type"]: c
        for c in (there.get("status") or {}).get("conditions") or ()
        if c["status"] == "True"
    }
    words = _last_words(pod)
    if words is not None:
        report, code = words
        if report is not None and code == 0:
            return Look(node_class, job, "passed")
        if report is not None and code == FAILED:
            return Look(node_class, job, "failed", _told(report, name))
    if "Complete" in ended:
        return Look(node_class, job, "passed")  # its pod is gone by now, and said so by its exit
    if "Failed" in ended or words is not None:
        why = ended.get("Failed", {}).get("reason") or "its pod ended without a report"
        return Look(
            node_class,
            job,
            "broken",
            f"Job {name} could not look: {why}; delete it to have it look again",
        )
    failures = pod_failures(pod) if pod is not None else ()
    return Look(node_class, job, "looking", failures[0] if failures else "")


def _last_words(pod: Manifest | None) -> tuple[Report | None, int] | None:
    """The report and exit code of a pod that has ended; None while it has not."""
    for container in ((pod or {}).get("status") or {}).get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended is None:
            continue
        try:
            report = Report.model_validate_json(ended.get("message") or "")
        except ValidationError:
            report = None
        return report, int(ended.get("exitCode", FAILED + 1))
    return None


def _told(report: Report, job: str) -> str:
    bad = [finding for finding in report.findings if not finding.ok]
    shown = "; ".join(map(str, bad[:SHOWN]))
    more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"{shown}{more}; then delete Job {job} to have it looked at again"


def _condition(looks: Sequence[Look]) -> Condition:
    for state, reason in (("failed", "ChecksFailed"), ("broken", "CouldNotLook")):
        found = [look for look in looks if look.state == state]
        if found:
            told = "; ".join(f"node {look.node_class}: {look.text}" for look in found[:SHOWN])
            return Condition(KIND, False if state == "failed" else None, reason, told)
    looking = [look for look in looks if look.state == "looking"]
    if looking:
        first = next((look for look in looking if look.text), looking[0])
        why = f": {first.text}" if first.text else ""
        done = len(looks) - len(looking)
        of = f"; {done} of {len(looks)} node classes done" if len(looks) > 1 else ""
        return Condition(KIND, None, "Looking", f"looking at node {first.node_class}{of}{why}")
    nodes = sum(len(look.node_class.nodes) for look in looks)
    one = f"node {looks[0].node_class} has"
    who = one if len(looks) == 1 else f"{len(looks)} node classes of {nodes} nodes have"
    return Condition(KIND, True, "Passed", f"{who} what the spec asks for")
