"""A newer operator over what an older one made: an unchanged spec replaces no pod."""

import copy
import hashlib
import json

import pytest

from kimi_operator.api.defaults import stored
from kimi_operator.decide import decide, effective_of
from kimi_operator.desired.render import render, revision_of
from kimi_operator.observed import (
    K8S_1_20,
    K8S_CURRENT,
    InstanceId,
    InstanceView,
    Observed,
    Signals,
)
from kimi_operator.revisions import remembered
from kimi_operator.scaling import History
from previous_cases import WITH_PODS, Previous, previous_cases

NOW_S = 1_900_000_000.0
CASES = previous_cases()
RUNNING = [
    (v, c) for v, c in CASES if "nano" in c.name or c.resource["spec"]["engine"] != "kimistack"
]
"""Our own engine runs on one device, so that larger ones are refused whatever is observed."""


def instances_of(case: Previous) -> list[InstanceId]:
    """As the names of the StatefulSets tell: `kimi-d-REVISION-INDEX`."""
    found = []
    for name in case.pods:
        kind, _, name = name.partition(" ")
        if kind == "StatefulSet":
            _, role, revision, index = name.rsplit("-", 3)
            role = {"p": "prefill", "d": "decode"}[role]
            found.append(InstanceId(role, revision, int(index)))
    return found


def observed(case: Previous) -> Observed:
    """What the newer operator finds: everything in service, nothing remembered but revisions."""
    return Observed(
        children={},
        instances=tuple(
            InstanceView(
                id=one,
                pods_desired=1,
                pods_ready=1,
                serving=True,
                created_s=NOW_S - 7200,
                ready_since_s=NOW_S - 3600,
                pods_scheduled=1,
                nodes=("node-1",),
            )
            for one in instances_of(case)
        ),
        revisions=tuple(case.revisions),
        nodes=None,
        signals=Signals(),
        workers_replicas={},
        capabilities=K8S_1_20 if case.served == "1.20" else K8S_CURRENT,
    )


def hashes(manifests):
    """Of the pod templates, by child."""
    return {
        f"{m['kind']} {m['metadata']['name']}": hashlib.sha256(
            json.dumps(m["spec"]["template"], sort_keys=True).encode()
        ).hexdigest()
        for m in manifests
        if m["kind"] in WITH_PODS
    }


def decided(resource, seen):
    return decide(effective_of(resource), seen, History(), NOW_S)[0]


def of(cases, name):
    return next(case for _, case in cases if case.name == name)


@pytest.mark.parametrize(
    ("version", "case"), CASES, ids=[f"{version}: {case.name}" for version, case in CASES]
)
def test_an_unchanged_spec_keeps_the_revision_and_the_pods_of_the_older_operator(version, case):
    """The resource as today's API server hands it out, new defaults filled in."""
    del version
    effective, seen = effective_of(stored(case.resource)), observed(case)
    kept = remembered(seen.revisions)
    revision = revision_of(effective, kept=kept)
    assert (revision.name, revision.digest) == (kept[-1].name, kept[-1].digest)
    result = render(
        effective,
        revisions={revision.name: revision},
        instances=instances_of(case),
        capabilities=seen.capabilities,
        history=kept,
    )
    assert hashes(result.manifests) == case.pods


@pytest.mark.parametrize(
    ("version", "case"), RUNNING, ids=[f"{version}: {case.name}" for version, case in RUNNING]
)
def test_an_unchanged_spec_moves_no_instance(version, case):
    del version
    decision = decided(stored(case.resource), observed(case))
    assert hashes(decision.wanted) == case.pods
    assert not decision.drain
    assert decision.facts.step.done
    assert [r["metadata"]["name"] for r in case.revisions] == [
        m["metadata"]["name"] for m in decision.wanted if m["kind"] == "ControllerRevision"
    ]


def test_every_preset_of_today_was_tested_by_an_older_version_or_is_new():
    names = {case.name for _, case in CASES}
    assert {
        "preset kimi-k2.6-mxfp4/mi355x",
        "preset kimi-k2.7-code-mxfp4/mi355x",
        "preset kimi-k3/mi355x",
        "preset kimi-k3.1-pro/mi355x",
        "preset kimi-nano/cpu",
    } <= names


def test_a_changed_spec_is_rendered_by_the_newer_operator():
    """The tests above would pass if nothing were ever rendered anew."""
    case = of(CASES, "preset kimi-nano/cpu")
    changed = copy.deepcopy(case.resource)
    changed["spec"]["restartToken"] = "now"
    changed["metadata"]["generation"] = 2
    decision = decided(stored(changed), observed(case))
    assert not decision.facts.step.done
    assert decision.facts.update_revision not in {one.revision for one in instances_of(case)}
