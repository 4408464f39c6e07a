"""What holds of everything that is rendered, whatever the deployment says."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_operator.changes import stamped
from kimi_operator.desired.effective import Effective, resolve
from kimi_operator.desired.engines.base import PORT_VARIABLES
from kimi_operator.desired.labels import Owner
from kimi_operator.desired.render import (
    Rendered,
    instances_of,
    render,
    render_all,
    revision_of,
)
from kimi_operator.desired.revision import (
    Revision,
    from_controller_revision,
    to_controller_revision,
)
from kimi_operator.observed import K8S_1_20, K8S_CURRENT, InstanceId, Manifest, ObjectKey
from kimi_operator.presets.preset import load_preset
from kimi_runtime.errors import ConfigError
from render_cases import HOST_MODEL, K26, MULTUS, UID, deployment

NANO: dict[str, Any] = {"preset": "kimi-nano/cpu", "prefill": {}, "decode": {}}
ENGINES = ("kimistack", "sglang", "vllm", "atom")
IMAGE = "example/engine@sha256:" + "1" * 64
RDMA: dict[str, dict[str, Any]] = {
    "multus": MULTUS,
    "devicePlugin": {"mode": "devicePlugin", "resource": "rdma/hca"},
    "hostNetwork": {"mode": "hostNetwork", "gidIndex": 3},
    "hostDevice": {"mode": "hostDevice", "devices": ["rdma0"]},
    "none": {"mode": "none", "allowTCP": True},
}
DNS_LABEL = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Specs of every engine and RDMA mode, with roles of several shapes."""
    engine = draw(st.sampled_from(ENGINES))
    mode = draw(st.sampled_from(sorted(RDMA)))
    decode: dict[str, Any] = {"replicas": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        decode["placement"] = {
            "nodeSelector": {"pool": "serving"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "spread": draw(st.sampled_from(["none", "host"])),
        }
    if draw(st.booleans()):
        decode["podTemplate"] = {
            "metadata": {"annotations": {"a": "b"}},
            "spec": {"containers": [{"name": "engine", "env": [{"name": "X", "value": "1"}]}]},
        }
    if draw(st.booleans()):
        decode["podLabels"] = {"team": "a", "kimistack.dev/role": "taken"}
    spec: dict[str, Any] = {
        "preset": K26,
        "engine": engine,
        "model": HOST_MODEL,
        "decode": decode,
        "rdma": RDMA[mode],
        "security": {
            "profile": "Privileged",
            "networkPolicy": draw(st.sampled_from(["Enabled", "Disabled"])),
        },
        "router": {
            "replicas": draw(st.integers(0, 3)),
            "policy": draw(st.sampled_from(["longest_prefix", "cost"])),
        },
    }
    if engine != "kimistack":
        spec["image"] = IMAGE
    if draw(st.booleans()):
        spec["prefill"] = {"replicas": draw(st.integers(1, 2))}
    if draw(st.booleans()):
        spec["kvPool"] = {"enabled": draw(st.booleans()), "hugepages": "None"}
    return spec


servers = st.sampled_from([K8S_1_20, K8S_CURRENT])
few = settings(max_examples=40, deadline=None)


def effective(spec: dict[str, Any]) -> Effective:
    return resolve(deployment(spec), load_preset, "kimi.yaml")


def rendered(spec: dict[str, Any], **more: Any) -> Rendered:
    resolved = effective(spec)
    revision = revision_of(resolved)
    arguments: dict[str, Any] = {
        "revisions": {revision.name: revision},
        "instances": instances_of(resolved.deployment.spec, revision.name),
        "capabilities": K8S_CURRENT,
    }
    return render(resolved, **(arguments | more))


def of_kind(result: Rendered, kind: str) -> list[Manifest]:
    return [manifest for manifest in result.manifests if manifest["kind"] == kind]


@few
@given(specs(), servers)
def test_equal_input_renders_to_equal_text(spec: dict[str, Any], server: Any):
    first, second = (
        json.dumps(render_all(deployment(spec), server), sort_keys=False) for _ in range(2)
    )
    assert first == second


@few
@given(specs(), servers)
def test_every_object_names_its_owner_and_no_two_are_the_same(spec: dict[str, Any], server: Any):
    manifests = render_all(deployment(spec), server)
    for manifest in manifests:
        metadata = manifest["metadata"]
        assert metadata["labels"]["kimistack.dev/owner-uid"] == UID
        assert metadata["labels"]["kimistack.dev/deployment"] == "kimi"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "kimi-operator"
        (owner,) = metadata["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (UID, True)
        assert metadata["namespace"] == "llm"
    keys = [ObjectKey.of(manifest) for manifest in manifests]
    assert len(set(keys)) == len(keys)


def test_the_longest_names_are_dns_labels_and_fit_labels_of_63_characters():
    metadata = {"name": "k" + "x" * 29, "namespace": "llm", "uid": UID}
    spec = {**NANO, "decode": {"replicas": 200}}
    for manifest in render_all(deployment(spec, metadata), K8S_CURRENT):
        name = manifest["metadata"]["name"]
        assert DNS_LABEL.match(name)
        # Kubernetes adds -<hash of ten> for its own revision label, and -<ordinal> for pods
        assert len(name) + 11 <= 63
        for value in manifest["metadata"]["labels"].values():
            assert len(value) <= 63


@few
@given(specs())
def test_a_workload_selects_exactly_its_own_pods(spec: dict[str, Any]):
    result = rendered(spec)
    workloads = [
        m for m in result.manifests if m["kind"] in ("StatefulSet", "DaemonSet", "Deployment")
    ]
    pods = [(m["metadata"]["name"], m["spec"]["template"]["metadata"]["labels"]) for m in workloads]
    for workload in workloads:
        selector = workload["spec"]["selector"]["matchLabels"].items()
        chosen = [name for name, labels in pods if selector <= labels.items()]
        assert chosen == [workload["metadata"]["name"]]


@few
@given(specs())
def test_every_mount_has_its_volume_and_every_volume_a_mount(spec: dict[str, Any]):
    for manifest in rendered(spec).manifests:
        pod = manifest.get("spec", {}).get("template", {}).get("spec")
        if pod is None:
            continue
        volumes = [volume["name"] for volume in pod["volumes"]]
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        mounted = {mount["name"] for c in containers for mount in c.get("volumeMounts", [])}
        assert len(set(volumes)) == len(volumes)
        assert set(volumes) == mounted
        for container in containers:
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(set(names)) == len(names)


@few
@given(specs())
def test_a_revision_comes_back_from_its_controller_revision_as_it_went(spec: dict[str, Any]):
    resolved = effective(spec)
    revision = revision_of(resolved)
    owner = Owner.of(resolved.deployment)
    stored = json.loads(json.dumps(to_controller_revision(revision, 1, owner)))
    back = from_controller_revision(stored)
    assert (back.name, back.digest) == (revision.name, revision.digest)
    more = {"revisions": {back.name: back}}
    assert rendered(spec, **more).manifests == rendered(spec).manifests


@few
@given(
    st.sampled_from(["shm", "tcp", "verbs"]),
    st.sampled_from(sorted(RDMA)),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1024, 65535).filter(lambda port: port != 8000),
)
def test_ports_of_a_pod_and_of_a_host_never_collide(
    backend: str, mode: str, prefill: int, decode: int, port: int
):
    if backend == "verbs" and mode == "none":
        mode = "multus"
    spec: dict[str, Any] = {
        "preset": "kimi-nano/cpu",
        "prefill": {"replicas": prefill},
        "decode": {"replicas": decode},
        "transfer": {"backend": backend, "ports": {"transfer": port}},
        "rdma": RDMA[mode],
        "security": {"profile": "Privileged"},
    }
    of_hosts: list[int] = []
    for manifest in of_kind(rendered(spec), "StatefulSet"):
        (engine,) = manifest["spec"]["template"]["spec"]["containers"]
        numbers = [one["containerPort"] for one in engine["ports"]]
        assert len(set(numbers)) == len(numbers) == (1 if backend == "shm" else 2)
        variables = {v["name"]: v.get("value") for v in engine["env"]}
        named = [int(variables[PORT_VARIABLES[one["name"]]]) for one in engine["ports"]]
        assert named == numbers
        of_hosts += [one["hostPort"] for one in engine["ports"] if "hostPort" in one]
    assert len(set(of_hosts)) == len(of_hosts)


def turned(value: Any) -> Any:
    """The same data, its mappings in the opposite order."""
    if isinstance(value, dict):
        return {name: turned(value[name]) for name in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


@few
@given(specs())
def test_what_a_stored_revision_renders_to_does_not_depend_on_the_order_it_came_back_in(
    spec: dict[str, Any],
):
    written = revision_of(effective(spec))
    stored = json.loads(json.dumps(to_controller_revision(written, 1, Owner("kimi", "llm", UID))))
    expected = [stamped(manifest) for manifest in rendered(spec).manifests]
    for kept in (stored, turned(stored)):
        read = {written.name: from_controller_revision(kept)}
        assert [stamped(m) for m in rendered(spec, revisions=read).manifests] == expected


@few
@given(specs())
def test_pods_of_both_legs_have_the_same_rdma_wiring(spec: dict[str, Any]):
    spec = {**spec, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    wired = []
    for manifest in of_kind(rendered(spec), "StatefulSet"):
        template = manifest["spec"]["template"]
        (engine,) = template["spec"]["containers"]
        env = {v["name"]: v.get("value") for v in engine["env"]}
        prefixes = ("MORI_", "MC_", "NCCL_", "RDMAV_")
        wired.append(
            (
                template["metadata"].get("annotations", {}).get("k8s.v1.cni.cncf.io/networks"),
                {k: v for k, v in env.items() if k.startswith(prefixes)},
                template["spec"].get("hostNetwork"),
                engine["securityContext"],
                {k: v for k, v in engine["resources"]["limits"].items() if "/" in k},
            )
        )
    prefill, decode = wired
    assert prefill == decode


def test_selectors_of_what_outlives_a_revision_do_not_name_it():
    before = rendered(NANO)
    after = rendered({**NANO, "restartToken": "again", "router": {"thinking": False}})
    for kind in ("Deployment", "DaemonSet", "Service", "NetworkPolicy", "PodDisruptionBudget"):
        selectors = [
            {
                m["metadata"]["name"]: m["spec"].get("selector", m["spec"].get("podSelector"))
                for m in of_kind(result, kind)
                if "kimistack.dev/instance" not in m["metadata"]["labels"]
            }
            for result in (before, after)
        ]
        assert selectors[0] == selectors[1]
        assert "kimistack.dev/revision" not in json.dumps(selectors)


def test_two_revisions_are_rendered_side_by_side():
    old = revision_of(effective(NANO))
    resolved = effective({**NANO, "restartToken": "again"})
    new = revision_of(resolved)
    instances = [InstanceId("prefill", old.name, 0), InstanceId("decode", new.name, 0)]
    result = render(
        resolved,
        revisions={old.name: old, new.name: new},
        instances=instances,
        capabilities=K8S_CURRENT,
        update=new.name,
    )
    names = [m["metadata"]["name"] for m in of_kind(result, "StatefulSet")]
    assert names == [f"kimi-d-{new.name}-0", f"kimi-p-{old.name}-0"]
    assert len(of_kind(result, "ControllerRevision")) == 2


def test_an_instance_of_a_revision_that_is_not_kept_is_an_error():
    with pytest.raises(ConfigError, match="revision 000000 of decode 0 is not kept"):
        rendered(NANO, instances=[InstanceId("decode", "000000", 0)])


def revisions_of(spec: dict[str, Any], change: dict[str, Any]) -> tuple[Revision, Revision]:
    return revision_of(effective(spec)), revision_of(effective({**spec, **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"decode": {"replicas": 7}},
        {"rollout": {"paused": True}},
        {"budget": {"maxGPUs": 100}},
        {"suspend": "Scale"},
        {"observability": {"dashboard": "Disabled"}},
        {"router": {"replicas": 5, "service": {"port": 8080}}},
        {"security": {"networkPolicy": "Disabled"}},
        {"rollout": {"revisionHistoryLimit": 9}},
    ],
    ids=str,
)
def test_what_no_pod_contains_makes_no_revision(change: dict[str, Any]):
    before, after = revisions_of(NANO, change)
    assert before.digest == after.digest


def test_a_change_of_the_router_alone_replaces_no_engine():
    before, after = revisions_of(NANO, {"router": {"thinking": False}})
    assert before.name == after.name
    assert before.digest != after.digest


def test_a_token_restarts_the_engines_and_nothing_else():
    before, after = revisions_of(NANO, {"restartToken": "again"})
    assert before.name != after.name
    for component in ("router", "umbp"):
        assert before.templates[component].content == after.templates[component].content


def aged(revision: Revision) -> Revision:
    """The revision as an operator that renders otherwise would have left it."""
    manifest = to_controller_revision(revision, 1, Owner("kimi", "llm", UID))
    stored = json.loads(json.dumps(manifest))
    for part in stored["data"]["templates"].values():
        part["pod"]["metadata"]["annotations"] = {"rendered-by": "older"}
    stored["data"]["name"] = "0a0a0a"
    return from_controller_revision(stored)


def test_an_operator_that_renders_otherwise_keeps_the_pods_of_an_unchanged_spec():
    old = aged(revision_of(effective(NANO)))
    now = revision_of(effective({**NANO, "decode": {"replicas": 3}}), old)
    for component, part in old.templates.items():
        assert now.templates[component] is part


def unmarked(revision: Revision) -> Revision:
    """The revision as an operator left it that put no mark on the pool's daemons."""
    manifest = to_controller_revision(revision, 1, Owner("kimi", "llm", UID))
    stored = json.loads(json.dumps(manifest))
    stored["data"]["templates"]["umbp"]["pod"]["metadata"] = {}
    return from_controller_revision(stored)


def test_daemons_that_bear_no_mark_get_none_with_a_change_of_the_engines_alone():
    old = unmarked(revision_of(effective(NANO)))
    environment = {"decode": {"env": [{"name": "A", "value": "b"}]}}
    now = revision_of(effective({**NANO, **environment}), kept=[old])
    assert now.name != old.name
    assert now.templates["umbp"].content == old.templates["umbp"].content
    assert now.templates["umbp"].inputs != old.templates["umbp"].inputs
    larger = {"kvPool": {"dram": "1GiB"}}
    now = revision_of(effective({**NANO, **environment, **larger}), kept=[old])
    assert now.templates["umbp"].pod["metadata"]["annotations"]


def test_writing_down_the_roles_of_the_preset_changes_nothing():
    old = aged(revision_of(effective({"preset": "kimi-nano/cpu"})))
    assert revision_of(effective(NANO), old).digest == old.digest


def test_only_the_changed_component_is_rendered_anew():
    old = aged(revision_of(effective(NANO)))
    now = revision_of(effective({**NANO, "router": {"thinking": False}}), old)
    for component in ("prefill", "decode", "umbp"):
        assert now.templates[component] is old.templates[component]
    assert now.templates["router"] != old.templates["router"]


def test_roles_are_kept_together_or_rendered_anew_together():
    old = aged(revision_of(effective(NANO)))
    change = {"decode": {"limits": {"maxRunning": 5}}}
    now = revision_of(effective({**NANO, **change}), old)
    assert (
        now.templates["prefill"] == revision_of(effective({**NANO, **change})).templates["prefill"]
    )
    assert now.templates["prefill"] != old.templates["prefill"]
    back = revision_of(effective(NANO), now, kept=[old, now])
    assert all(back.templates[role] is old.templates[role] for role in ("prefill", "decode"))


def test_going_back_to_an_older_spec_goes_back_to_its_pods():
    first = aged(revision_of(effective(NANO)))
    second = revision_of(effective({**NANO, "restartToken": "again"}), first)
    back = revision_of(effective(NANO), kept=[first, second])
    assert back.digest == first.digest


def test_a_field_only_a_newer_operator_knows_stays_out_of_a_routers_file():
    revision = revision_of(effective(NANO))
    manifest = to_controller_revision(revision, 1, Owner("kimi", "llm", UID))
    files = manifest["data"]["templates"]["router"]["configs"]["kimi-router"]
    older = json.loads(files["router.json"])
    del older["drain"]
    files["router.json"] = json.dumps(older)
    kept = from_controller_revision(manifest)
    result = rendered(NANO, revisions={kept.name: kept})
    (file,) = [m for m in of_kind(result, "ConfigMap") if m["metadata"]["name"] == "kimi-router"]
    assert "drain" not in file["data"]["router.json"]


@pytest.mark.parametrize("damage", ["data", "annotations"])
def test_a_damaged_controller_revision_is_refused(damage: str):
    manifest = to_controller_revision(revision_of(effective(NANO)), 1, Owner("kimi", "llm", UID))
    (manifest if damage == "data" else manifest["metadata"])[damage] = {}
    with pytest.raises(ValueError, match="keeps no revision"):
        from_controller_revision(manifest)
