"""Pods, policies, budgets, scale and monitoring: what each says, and what is left out."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

import kimi_runtime
from kimi_operator.desired.effective import resolve
from kimi_operator.desired.labels import Owner
from kimi_operator.desired.render import (
    Rendered,
    instances_of,
    render,
    rendered,
    revision_of,
)
from kimi_operator.desired.security import call_key_secret, with_call_key
from kimi_operator.desired.workers import FIRST_HOST_PORT, LAST_HOST_PORT, ports_of
from kimi_operator.observed import (
    DRAINING_LABEL,
    K8S_1_20,
    K8S_CURRENT,
    Capabilities,
    InstanceId,
    Manifest,
)
from kimi_operator.presets.preset import load_preset
from kimi_runtime.errors import ConfigError
from kimi_runtime.settings import explain_logs
from kimi_runtime.spec.router import FleetSpec, RouterSpec
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.spec.worker import WorkerSpec
from render_cases import HOST_MODEL, K26, MULTUS, deployment

NANO: dict[str, Any] = {"preset": "kimi-nano/cpu", "prefill": {}, "decode": {}}
SHM: dict[str, Any] = {**NANO, "transfer": {"backend": "shm"}}
BIG: dict[str, Any] = {
    "preset": K26,
    "model": HOST_MODEL,
    "rdma": MULTUS,
    "security": {"profile": "RDMA"},
}
VERBS: dict[str, Any] = {
    **NANO,
    "transfer": {"backend": "verbs"},
    "rdma": MULTUS,
    "security": {"profile": "RDMA"},
}
FOREIGN = {**BIG, "engine": "sglang", "image": "example/engine:1"}


def result_of(
    spec: dict[str, Any], server: Capabilities = K8S_CURRENT, **metadata: Any
) -> Rendered:
    meta = {"name": "kimi", "namespace": "llm", "uid": "u", **metadata}
    return rendered(deployment(spec, meta), server)


def of_kind(manifests: Iterable[Manifest], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def pods(result: Rendered) -> dict[str, Manifest]:
    """Pod specs by role or component."""
    found = {}
    for manifest in result.manifests:
        template = manifest.get("spec", {}).get("template")
        if template:
            labels = manifest["metadata"]["labels"]
            who = labels.get("kimistack.dev/role") or labels["app.kubernetes.io/component"]
            found[who] = template["spec"]
    return found


def left_out(result: Rendered) -> str:
    return "\n".join(f"{one.what}: {one.reason}" for one in result.left_out)


# Privilege


def test_a_restricted_pod_adds_no_capability_and_runs_as_nobody():
    for pod in pods(result_of(NANO)).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert "hostNetwork" not in pod
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True


def test_the_only_step_as_root_gives_the_nodes_folder_away():
    for who, pod in pods(result_of(NANO)).items():
        inits = [c["name"] for c in pod.get("initContainers", [])]
        assert inits == ([] if who == "router" else ["own-folder"])


def test_rdma_adds_the_right_to_lock_memory_and_no_other():
    for who, pod in pods(result_of(BIG)).items():
        context = pod["containers"][0]["securityContext"]
        added = context["capabilities"].get("add", [])
        assert added == (["IPC_LOCK"] if who in ("prefill", "decode") else [])


def test_only_host_devices_are_privileged_and_only_engines_have_them():
    spec = {**BIG, "rdma": {"mode": "hostDevice"}, "security": {"profile": "Privileged"}}
    privileged = {
        who: pod["containers"][0]["securityContext"].get("privileged", False)
        for who, pod in pods(result_of(spec)).items()
    }
    assert privileged == {"prefill": True, "decode": True, "umbp": False, "router": False}


def test_processes_that_share_a_socket_are_the_same_user():
    for spec in (NANO, BIG):
        found = pods(result_of(spec))
        users = {found[w]["securityContext"]["runAsUser"] for w in ("prefill", "decode", "umbp")}
        assert len(users) == 1


def test_the_call_key_is_not_rendered_and_added_on_creation():
    secret = call_key_secret(Owner("kimi", "llm", "u"))
    assert "data" not in secret
    assert "stringData" not in secret
    assert with_call_key(secret, "ab" * 32)["stringData"] == {"call-key": "ab" * 32 + "\n"}
    (rendered_secret,) = of_kind(result_of(NANO).manifests, "Secret").values()
    assert rendered_secret == call_key_secret(Owner("kimi", "llm", "u"))


def test_no_pod_gets_rights_at_the_api_server():
    result = result_of(BIG)
    assert not of_kind(result.manifests, "Role")
    assert {
        m["automountServiceAccountToken"]
        for m in of_kind(result.manifests, "ServiceAccount").values()
    } == {False}


# Pods of engines


def test_grace_is_the_sum_of_the_drain_and_at_least_two_minutes():
    drain = {"preStop": "20s", "timeout": "5m", "teardown": "40s"}
    found = pods(result_of({**NANO, "decode": {"drain": drain}}))
    assert found["decode"]["terminationGracePeriodSeconds"] == 360
    assert found["prefill"]["terminationGracePeriodSeconds"] == 120
    wait = found["decode"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert wait[-1] == "test -s /etc/kimistack-drain/draining || sleep 20"


def test_an_engine_hears_of_its_drain_from_its_own_pod():
    pod = pods(result_of(NANO))["decode"]
    engine = pod["containers"][0]
    (volume,) = [v for v in pod["volumes"] if v["name"] == "drain"]
    (item,) = volume["downwardAPI"]["items"]
    assert item["fieldRef"]["fieldPath"] == f"metadata.labels['{DRAINING_LABEL}']"
    (mount,) = [m for m in engine["volumeMounts"] if m["name"] == "drain"]
    variables = {v["name"]: v.get("value") for v in engine["env"]}
    assert variables["KIMISTACK_DRAIN_FILE"] == f"{mount['mountPath']}/{item['path']}"


def test_processes_are_given_no_field_that_an_older_image_may_not_know():
    files = of_kind(result_of(NANO).manifests, "ConfigMap").values()
    text = " ".join(content for config in files for content in config["data"].values())
    assert "retry_window" not in text
    assert "drain_file" not in text


def test_startup_may_take_as_long_as_the_spec_says_and_liveness_is_asked_for():
    probes = {"startupTimeout": "2h", "liveness": "Enabled"}
    engine = pods(result_of({**NANO, "decode": {"probes": probes}}))["decode"]["containers"][0]
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 7200
    assert engine["livenessProbe"]["httpGet"]["path"] == "/healthz"
    other = pods(result_of(NANO))["decode"]["containers"][0]
    assert "livenessProbe" not in other


def test_shared_memory_keeps_prefill_and_decode_of_a_revision_on_one_host():
    resolved = resolve(
        deployment(SHM, {"name": "kimi", "namespace": "llm", "uid": "u"}), load_preset, "x"
    )
    for who in ("prefill", "decode"):
        affinity = pods(result_of(SHM))[who]["affinity"]["podAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        # those of another revision, which may be anywhere, bind none of them
        wanted = term["labelSelector"]["matchLabels"]
        assert wanted["kimistack.dev/revision"] == revision_of(resolved).name
        (beside,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
        wanted = beside["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert "kimistack.dev/revision" not in wanted
        assert "podAffinity" not in pods(result_of(NANO))[who].get("affinity", {})
    apart = {"decode": {"placement": {"spread": "host"}}}
    with pytest.raises(ConfigError, match="keeps instances apart"):
        result_of({**SHM, **apart})
    assert "podAntiAffinity" in pods(result_of({**NANO, **apart}))["decode"]["affinity"]


def test_a_failed_check_excludes_a_node_and_a_required_one_must_have_passed():
    placement = {
        "requireLabels": ["amd.com/rail-bandwidth"],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": z, "operator": "Exists"}]} for z in "ab"
                    ]
                }
            }
        },
    }
    gpu = {"product": "AMD_Instinct_MI355X", "partition": "spx_nps1"}
    pod = pods(result_of({**BIG, "decode": {"placement": placement, "gpu": gpu}}))["decode"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = [
        {(e["key"], e["operator"], *e.get("values", ())) for e in term["matchExpressions"]}
        for term in required["nodeSelectorTerms"]
    ]
    # the user's two terms, each with both spellings of the partition's label
    assert len(terms) == 4
    for term in terms:
        assert ("amd.com/rail-bandwidth", "In", "passed") in term
        assert ("amd.com/nic-health", "NotIn", "failed") in term
        assert ("amd.com/gpu.product-name", "In", "AMD_Instinct_MI355X") in term


def test_instances_of_a_revision_are_kept_apart_from_each_other_alone():
    spec = {**BIG, "decode": {"replicas": 2, "placement": {"spread": "host"}}}
    sets = of_kind(result_of(spec).manifests, "StatefulSet")
    decode = {n: m for n, m in sets.items() if "-d-" in n}
    assert len(decode) == 2
    for manifest in decode.values():
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        affinity = manifest["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        selector = term["labelSelector"]
        assert selector["matchLabels"]["kimistack.dev/revision"] == labels["kimistack.dev/revision"]
        assert selector["matchExpressions"] == [
            {
                "key": "kimistack.dev/instance",
                "operator": "NotIn",
                "values": [labels["kimistack.dev/instance"]],
            }
        ]


def test_multus_attaches_a_card_for_every_gpu():
    template = next(iter(of_kind(result_of(BIG).manifests, "StatefulSet").values()))["spec"][
        "template"
    ]
    networks = json.loads(template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"])
    assert [n["interface"] for n in networks] == ["net1", "net2", "net3", "net4"]
    assert {(n["namespace"], n["name"]) for n in networks} == {("default", "amd-host-device-nad")}
    engine = template["spec"]["containers"][0]
    assert engine["resources"]["limits"]["amd.com/vnic"] == "4"
    assert engine["resources"]["limits"] == engine["resources"]["requests"]


# The host's network

HOST = {**BIG, "rdma": {"mode": "hostNetwork"}}


def test_instances_on_the_hosts_network_have_ports_of_their_own():
    spec = {**HOST, "prefill": {"replicas": 200}, "decode": {"replicas": 200}}
    resolved = resolve(deployment(spec), load_preset, "x")
    revision = revision_of(resolved)
    owner = Owner.of(resolved.deployment)
    taken: set[int] = set()
    for instance in instances_of(resolved.deployment.spec, revision.name):
        ports = set(ports_of(owner, revision.role(instance.role), instance).values())
        assert not ports & taken
        assert all(FIRST_HOST_PORT <= port <= LAST_HOST_PORT for port in ports)
        taken |= ports


def test_ports_variables_and_the_routers_file_agree_on_the_hosts_network():
    result = result_of(HOST)
    file = of_kind(result.manifests, "ConfigMap")["kimi-router"]["data"]["fleet.json"]
    urls = {w.name: w.url for w in FleetSpec.model_validate_json(file).workers}
    for name, manifest in of_kind(result.manifests, "StatefulSet").items():
        pod = manifest["spec"]["template"]["spec"]
        engine = pod["containers"][0]
        env = {v["name"]: v.get("value") for v in engine["env"]}
        assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
        for port, variable in zip(
            engine["ports"], ("KIMISTACK_PORT", "KIMISTACK_TRANSFER_PORT"), strict=True
        ):
            assert port["hostPort"] == port["containerPort"] == int(env[variable])
        http = engine["ports"][0]["hostPort"]
        assert urls[f"{name}-0"] == f"http://{name}-0.{name}.llm.svc:{http}"
    assert "no policy covers" in left_out(result)
    assert "kimi-engine" not in of_kind(result.manifests, "NetworkPolicy")


def test_a_role_has_no_more_instances_than_there_are_ports_for():
    with pytest.raises(ConfigError, match="at most 200"):
        result_of({**NANO, "decode": {"replicas": 201}})


# The pool and the router


def test_the_pool_runs_where_its_engines_may_run():
    spec = {
        **BIG,
        "prefill": {"placement": {"nodeSelector": {"pool": "a"}}},
        "decode": {
            "placement": {
                "nodeSelector": {"pool": "b"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
            }
        },
    }
    pod = pods(result_of(spec))["umbp"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    pools = [
        [e["values"] for e in term["matchExpressions"] if e["key"] == "pool"]
        for term in required["nodeSelectorTerms"]
    ]
    assert pools == [[["a"]], [["b"]]]
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    only = {**spec, "kvPool": {"roles": ["decode"]}}
    terms = pods(result_of(only))["umbp"]["affinity"]["nodeAffinity"]
    assert len(terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]) == 1


def test_the_pools_memory_is_charged_to_its_own_pod():
    plain = pods(result_of({**NANO, "kvPool": {"dram": "1GiB"}}))["umbp"]["containers"][0]
    assert plain["resources"]["limits"] == {"memory": str(2 * 2**30)}
    huge = pods(result_of(BIG))["umbp"]["containers"][0]["resources"]["limits"]
    assert huge == {"memory": str(2**30), "hugepages-2Mi": str(512 * 2**30)}


def test_the_log_on_ssd_is_the_pools_alone_and_survives_its_pods():
    ssd = {"path": "/mnt/nvme/kimi", "capacity": "1TiB"}
    spec = {**NANO, "kvPool": {"ssd": ssd}}
    found, without = pods(result_of(spec)), pods(result_of(NANO))
    for who, pod in found.items():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert ("ssd" in volumes) is (who == "umbp")
    pool, plain = found["umbp"], without["umbp"]
    volume = next(volume for volume in pool["volumes"] if volume["name"] == "ssd")
    assert volume["hostPath"] == {"path": "/mnt/nvme/kimi", "type": "DirectoryOrCreate"}
    assert [init["name"] for init in pool["initContainers"]] == ["own-folder", "own-ssd"]
    mounts = {m["name"]: m["mountPath"] for m in pool["containers"][0]["volumeMounts"]}
    assert pool["initContainers"][1]["volumeMounts"][0]["mountPath"] == mounts["ssd"]
    memory = [int(p["containers"][0]["resources"]["limits"]["memory"]) for p in (pool, plain)]
    assert memory[0] - memory[1] == 2**40 // 2048
    assert "ssd" not in left_out(result_of(spec))


def test_engines_and_pool_mount_the_same_folder_at_the_same_path():
    found = pods(result_of(NANO))
    places = {
        (
            next(v["hostPath"]["path"] for v in found[who]["volumes"] if v["name"] == "run"),
            next(
                m["mountPath"]
                for m in found[who]["containers"][0]["volumeMounts"]
                if m["name"] == "run"
            ),
        )
        for who in ("prefill", "decode", "umbp")
    }
    assert places == {("/run/kimistack/llm.kimi", "/run/kimistack")}


def test_without_a_pool_there_is_no_daemon_and_no_folder_of_the_node():
    spec = {"preset": "kimi-nano/cpu", "decode": {}, "kvPool": {"enabled": False}}
    result = result_of(spec)
    assert not of_kind(result.manifests, "DaemonSet")
    assert not [v for pod in pods(result).values() for v in pod["volumes"] if "hostPath" in v]


def test_the_runtime_reads_the_files_of_pool_and_router():
    data = {
        key: text
        for m in of_kind(result_of(NANO).manifests, "ConfigMap").values()
        for key, text in m["data"].items()
    }
    assert UmbpSpec.model_validate_json(data["umbp.json"]).dram_bytes == 128 * 2**20
    router = RouterSpec.model_validate_json(data["router.json"])
    assert (router.workers, str(router.fleet)) == ((), "/etc/kimistack/fleet.json")
    fleet = FleetSpec.model_validate_json(data["fleet.json"])
    assert [w.role for w in fleet.workers] == ["decode", "prefill"]


def test_the_routers_file_has_the_pools_there_are_and_no_draining_worker():
    resolved = resolve(deployment(NANO), load_preset, "x")
    revision = revision_of(resolved)
    instances = [InstanceId("prefill", revision.name, i) for i in range(2)]
    result = render(
        resolved,
        revisions={revision.name: revision},
        instances=instances,
        capabilities=K8S_CURRENT,
        pools={"node-1": "http://10.0.0.1:8100", "node-2": "https://[fd00::1]:8100"},
        draining=frozenset(instances[:1]),
    )
    file = of_kind(result.manifests, "ConfigMap")["kimi-router"]["data"]["fleet.json"]
    router = FleetSpec.model_validate_json(file)
    assert [w.name for w in router.workers] == [f"kimi-p-{revision.name}-1-0"]
    assert [p.url for p in router.pools] == ["http://10.0.0.1:8100", "https://[fd00::1]:8100"]
    assert len(of_kind(result.manifests, "StatefulSet")) == 2


def test_workers_that_come_and_go_do_not_replace_the_router():
    few, many = (result_of({**NANO, "decode": {"replicas": n}}) for n in (1, 3))
    assert of_kind(few.manifests, "Deployment") == of_kind(many.manifests, "Deployment")
    files = [of_kind(r.manifests, "ConfigMap")["kimi-router"] for r in (few, many)]
    assert files[0] != files[1]


@pytest.mark.parametrize(
    ("router", "kept"),
    [
        ({"policy": "cost"}, 64 * 2**20),
        ({"policy": "cost", "explain": {"maxBytes": "8MiB"}}, 8 * 2**20),
        ({"policy": "cost", "explain": {"maxBytes": "0B"}}, None),
        ({}, None),
    ],
)
def test_a_router_that_has_reasons_keeps_them_where_explain_looks_in_its_pod(
    router: dict[str, Any], kept: int | None, tmp_path: Path
):
    result = result_of({**NANO, "router": router})
    pod = of_kind(result.manifests, "Deployment")["kimi-router"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    file = of_kind(result.manifests, "ConfigMap")["kimi-router"]["data"]["router.json"]
    explain = RouterSpec.model_validate_json(file).explain
    places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    variables = {one["name"]: one.get("value") for one in container["env"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    if kept is None:
        assert explain is None
        assert "explain" not in {*places, *volumes}
        return
    assert explain is not None
    assert explain.max_bytes == kept
    assert volumes["explain"] == {"name": "explain", "emptyDir": {}}
    assert explain.path.parent == Path(places["explain"])
    log = tmp_path / explain.path.relative_to("/")
    log.parent.mkdir(parents=True)
    log.touch()
    state = tmp_path / Path(variables["KIMISTACK_HOME"]).relative_to("/")
    assert explain_logs({"KIMISTACK_HOME": str(state)}) == [log]


def test_one_late_answer_takes_no_router_out_of_its_service():
    """A router that ends leaves it all the same: what terminates is in no Service."""
    router = of_kind(result_of(NANO).manifests, "Deployment")["kimi-router"]
    (container,) = router["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["failureThreshold"] == 2


def test_a_router_that_reads_a_nodes_folder_goes_where_engines_go():
    spec = {**BIG, "decode": {"placement": {"nodeSelector": {"pool": "b"}}}}
    assert "nodeAffinity" in pods(result_of(spec))["router"]["affinity"]
    placed = {**spec, "router": {"placement": {"nodeSelector": {"pool": "front"}}}}
    assert "nodeAffinity" not in pods(result_of(placed))["router"]["affinity"]


# Who reaches whom


def test_only_the_router_is_reached_from_outside():
    policies = of_kind(result_of(BIG).manifests, "NetworkPolicy")
    assert set(policies) == {"kimi-router", "kimi-engine", "kimi-umbp"}
    for name, policy in policies.items():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        from_anywhere = [rule for rule in policy["spec"]["ingress"] if "from" not in rule]
        assert bool(from_anywhere) is (name == "kimi-router")


def test_an_engine_that_asks_for_no_key_is_not_opened_to_scrapers():
    for spec, opened in ((BIG, True), (FOREIGN, False)):
        policy = of_kind(result_of(spec).manifests, "NetworkPolicy")["kimi-engine"]
        assert ("prometheus" in json.dumps(policy)) is opened


def test_engines_of_ours_reach_each_other_where_kv_is_read_and_given_back_alone():
    cases = ((NANO, [8000, 8200]), (VERBS, [8000, 8200]), (SHM, [8000]), (FOREIGN, None))
    for spec, ports in cases:
        policy = of_kind(result_of(spec).manifests, "NetworkPolicy")["kimi-engine"]["spec"]
        engines = {
            "kimistack.dev/deployment": "kimi",
            "app.kubernetes.io/component": "engine",
        }
        for rules, side in ((policy["ingress"], "from"), (policy["egress"], "to")):
            (between,) = [
                rule
                for rule in rules
                if rule.get(side) == [{"podSelector": {"matchLabels": engines}}]
            ]
            found = [port["port"] for port in between["ports"]] if "ports" in between else None
            assert found == ports


def test_kv_that_engines_of_a_node_share_lies_in_the_nodes_folder():
    spec = {**NANO, "kvPool": {"enabled": False}}
    for more, volume in (({}, "emptyDir"), ({"transfer": {"hostMemory": True}}, "hostPath")):
        result = result_of({**spec, **more})
        for who in ("prefill", "decode"):
            (run,) = [v for v in pods(result)[who]["volumes"] if v["name"] == "run"]
            assert volume in run
        files = [
            WorkerSpec.model_validate_json(m["data"]["worker.json"])
            for m in of_kind(result.manifests, "ConfigMap").values()
            if "worker.json" in m["data"]
        ]
        ways = ("shm", "tcp") if more else ("tcp",)
        assert [worker.transports for worker in files] == [ways, ways]


def test_a_port_that_is_chosen_for_hand_offs_is_named_everywhere():
    result = result_of({**NANO, "transfer": {"ports": {"transfer": 9300}, "streams": 8}})
    for manifest in of_kind(result.manifests, "StatefulSet").values():
        (engine,) = manifest["spec"]["template"]["spec"]["containers"]
        assert {p["name"]: p["containerPort"] for p in engine["ports"]}["transfer"] == 9300
        service = of_kind(result.manifests, "Service")[manifest["metadata"]["name"]]
        assert {p["name"]: p["targetPort"] for p in service["spec"]["ports"]}["transfer"] == 9300
        variables = {v["name"]: v for v in engine["env"]}
        assert variables["KIMISTACK_TRANSFER_PORT"]["value"] == "9300"
        assert variables["KIMISTACK_TRANSFER_ADDRESS"]["value"] == "$(POD_IP)"
        names = list(variables)
        assert names.index("POD_IP") < names.index("KIMISTACK_TRANSFER_ADDRESS")
    with pytest.raises(ConfigError, match=r"transfer\.ports\.transfer: 8000 is the engine's own"):
        result_of({**NANO, "transfer": {"ports": {"transfer": 8000}}})


@pytest.mark.parametrize("mode", ["multus", "devicePlugin", "hostNetwork", "hostDevice"])
def test_verbs_of_ours_get_the_cards_of_every_mode_on_both_legs(mode: str):
    modes = {
        "multus": MULTUS,
        "devicePlugin": {"mode": "devicePlugin", "resource": "rdma/hca"},
        "hostNetwork": {"mode": "hostNetwork"},
        "hostDevice": {"mode": "hostDevice", "devices": ["rdma0", "rdma1"]},
    }
    chosen = {"port": 2, "gidIndex": 3, "trafficClass": 104, "serviceLevel": 5, "pkeyIndex": 1}
    spec = {
        **VERBS,
        "rdma": {**modes[mode], **chosen, "queuePairs": 8},
        "security": {"profile": "Privileged"},
    }
    result = result_of(spec)
    files = [
        m["data"]["worker.json"]
        for m in of_kind(result.manifests, "ConfigMap").values()
        if "worker.json" in m["data"]
    ]
    assert len(files) == 2
    for file in files:
        worker = WorkerSpec.model_validate_json(file)
        card = worker.network.rdma
        assert worker.transfer == "verbs"
        assert (card.port, card.gid_index, card.traffic_class) == (2, 3, 104)
        assert (card.service_level, card.pkey_index, card.queue_pairs) == (5, 1, 8)
        assert card.devices == tuple(modes[mode].get("devices", ()))
    for who in ("prefill", "decode"):
        pod = pods(result)[who]
        limits = pod["containers"][0]["resources"]["limits"]
        mounts = {m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        assert pod.get("hostNetwork", False) is (mode != "multus")
        assert ("/dev/infiniband" in mounts) is (mode in ("hostNetwork", "hostDevice"))
        assert limits.get("amd.com/vnic") == ("1" if mode == "multus" else None)
        assert limits.get("rdma/hca") == ("1" if mode == "devicePlugin" else None)


def test_downloads_are_the_only_way_out():
    hub = {**BIG, "model": {}}
    for spec, out in ((BIG, False), (hub, True)):
        policy = of_kind(result_of(spec).manifests, "NetworkPolicy")["kimi-engine"]
        ports = [p["port"] for rule in policy["spec"]["egress"] for p in rule.get("ports", [])]
        assert (443 in ports) is out


def test_policies_can_be_turned_off():
    spec = {**BIG, "security": {"profile": "RDMA", "networkPolicy": "Disabled"}}
    assert not of_kind(result_of(spec).manifests, "NetworkPolicy")


def test_a_route_needs_the_gateway_api():
    spec = {
        **NANO,
        "router": {"gateway": {"name": "g", "hostnames": ["k.example"], "timeout": "5m"}},
    }
    assert "there is no Gateway API" in left_out(result_of(spec))
    kind = "gateway.networking.k8s.io/v1/HTTPRoute"
    server = Capabilities(K8S_CURRENT.version, K8S_CURRENT.kinds | {kind}, K8S_CURRENT.fields)
    (route,) = of_kind(result_of(spec, server).manifests, "HTTPRoute").values()
    assert route["spec"]["rules"][0]["timeouts"] == {"request": "300000ms"}


# Scale and disruption

EXTERNAL = {
    "mode": "External",
    "max": 4,
    "metrics": [{"type": "QueueDepth", "target": 8}],
    "external": {"render": "hpa"},
}


def with_scaling(base: dict[str, Any], **scaling: Any) -> dict[str, Any]:
    return {**base, "decode": {"scaling": {**EXTERNAL, **scaling}}}


@pytest.mark.parametrize(
    ("server", "version"), [(K8S_1_20, "autoscaling/v2beta2"), (K8S_CURRENT, "autoscaling/v2")]
)
def test_an_autoscaler_writes_the_scale_and_nobody_else_does(server: Capabilities, version: str):
    manifests = result_of(with_scaling(NANO), server).manifests
    (hpa,) = of_kind(manifests, "HorizontalPodAutoscaler").values()
    (workers,) = of_kind(manifests, "KimiWorkers").values()
    assert hpa["apiVersion"] == version
    assert hpa["spec"]["scaleTargetRef"]["name"] == workers["metadata"]["name"] == "kimi-decode"
    assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] == "kimistack_worker_waiting"
    assert hpa["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 1800
    assert "replicas" not in workers["spec"]


def test_a_metric_the_engine_does_not_report_is_said():
    spec = with_scaling(NANO, metrics=[{"type": "KvUsage", "target": 80}])
    result = result_of(spec)
    assert "engine kimistack reports no metric for KvUsage" in left_out(result)
    assert not of_kind(result.manifests, "HorizontalPodAutoscaler")


def test_a_share_is_compared_with_percent():
    metrics = [{"type": "KvUsage", "target": 80}]
    (hpa,) = of_kind(
        result_of(with_scaling(FOREIGN, metrics=metrics)).manifests, "HorizontalPodAutoscaler"
    ).values()
    assert hpa["spec"]["metrics"][0]["pods"]["target"]["averageValue"] == "800m"


def test_keda_must_be_there_and_know_its_prometheus():
    spec = with_scaling(NANO, external={"render": "keda"}, min=0)
    assert "KEDA is not installed" in left_out(result_of(spec, K8S_1_20))
    assert "kimistack.dev/prometheus" in left_out(result_of(spec))
    address = {"kimistack.dev/prometheus": "http://p:9090"}
    (scaler,) = of_kind(result_of(spec, annotations=address).manifests, "ScaledObject").values()
    assert scaler["spec"]["minReplicaCount"] == 0
    assert scaler["spec"]["triggers"][0]["metadata"]["serverAddress"] == "http://p:9090"


def test_a_managed_role_has_a_scale_and_no_autoscaler():
    scaling = {"mode": "Managed", "max": 4, "targets": {"ttft": "2s", "itl": "40ms"}}
    result = result_of({**NANO, "decode": {"scaling": scaling}})
    assert set(of_kind(result.manifests, "KimiWorkers")) == {"kimi-decode"}
    assert not of_kind(result.manifests, "HorizontalPodAutoscaler")
    rules = of_kind(result.manifests, "PrometheusRule")["kimi"]["spec"]["groups"][0]["rules"]
    assert {"KimistackTtftLate", "KimistackItlLate"} <= {rule["alert"] for rule in rules}


def test_eviction_may_take_what_a_rollout_may_take_and_always_something():
    spec = {**NANO, "rollout": {"maxUnavailable": 0, "maxSurge": 1}}
    for server, version in ((K8S_1_20, "policy/v1beta1"), (K8S_CURRENT, "policy/v1")):
        budgets = of_kind(result_of(spec, server).manifests, "PodDisruptionBudget")
        assert set(budgets) == {"kimi-router", "kimi-prefill", "kimi-decode"}
        assert {b["spec"]["maxUnavailable"] for b in budgets.values()} == {1}
        assert {b["apiVersion"] for b in budgets.values()} == {version}


def test_all_pods_of_an_instance_of_several_nodes_may_go_together():
    spec = {
        "engine": "sglang",
        "image": "example/engine:1",
        "model": {"id": "a/b", **HOST_MODEL},
        "decode": {"parallelism": {"tp": 16, "nodes": 2}},
    }
    result = result_of(spec)
    assert (
        of_kind(result.manifests, "PodDisruptionBudget")["kimi-decode"]["spec"]["maxUnavailable"]
        == 2
    )
    (instance,) = of_kind(result.manifests, "StatefulSet").values()
    assert instance["spec"]["replicas"] == 2
    assert instance["spec"]["podManagementPolicy"] == "Parallel"


# Monitoring

EXPORTERS = ("server/metrics.py", "umbp/metrics.py", "umbp/remote/metrics.py")


def exported() -> set[str]:
    """Every metric name the exporters could build, from their source."""
    names = set()
    for file in EXPORTERS:
        text = (Path(kimi_runtime.__path__[0]) / file).read_text("utf-8")
        names |= set(re.findall(r'"kimistack_([a-z_]+)"', text))
        for prefix in ("router", "worker", "umbp", "umbp_peer"):
            names |= {f"{prefix}_{word}" for word in re.findall(r'"([a-z_]+)"', text)}
            names |= {f"{prefix}_{word}" for word in re.findall(r'prefix}_([a-z_]+)"', text)}
    return {f"kimistack_{name}" for name in names}


def test_alerts_panels_and_scalers_use_metrics_that_are_exported():
    scaling = {"mode": "Managed", "max": 4, "targets": {"ttft": "2s", "itl": "40ms"}}
    text = yaml.safe_dump_all(result_of({**NANO, "decode": {"scaling": scaling}}).manifests)
    used = set(re.findall(r"kimistack_(?:router|worker|umbp)_[a-z_]+", text))
    assert len(used) > 15
    told = {"queue_seconds", "parked_requests", "waiting_requests", "kv_use"}
    told |= {"transfer_backlog_seconds", "worker_silent_seconds"}
    assert {f"kimistack_router_{name}" for name in told} <= used
    known = exported()
    for name in used:
        assert name in known or re.sub(r"_(total|bucket)$", "", name) in known, name


def test_what_prometheus_cannot_take_is_left_out_with_the_reason():
    missing = left_out(result_of(NANO, K8S_1_20))
    assert "PodMonitor kimi: the Prometheus operator is not installed" in missing
    assert "PrometheusRule kimi" in missing
    off = {"podMonitor": "Disabled", "rules": "Disabled", "dashboard": "Disabled"}
    result = result_of({**NANO, "observability": off}, K8S_1_20)
    assert result.left_out == ()
    assert "kimi-dashboard" not in of_kind(result.manifests, "ConfigMap")


def test_the_dashboard_is_one_that_grafana_reads():
    data = of_kind(result_of(NANO).manifests, "ConfigMap")["kimi-dashboard"]["data"]
    board = json.loads(data["kimi.json"])
    graphs = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] for panel in graphs)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["title"] for panel in board["panels"]}) == len(places)


# What cannot serve


def test_an_engine_without_adapter_is_rendered_and_says_so():
    result = result_of(FOREIGN)
    assert of_kind(result.manifests, "StatefulSet")
    assert [one.reason for one in result.obstacles] == ["EngineNotConnected"]
    assert "sglang has no connector" in left_out(result)
    assert not of_kind(result.manifests, "DaemonSet")


def test_what_this_version_cannot_do_is_an_obstacle_with_the_way_out():
    reasons = [(one.reason, one.message) for one in result_of(BIG).obstacles]
    assert {reason for reason, _ in reasons} == {"NotInThisVersion"}
    assert "this takes 4" in " ".join(message for _, message in reasons)
    for spec in (NANO, SHM, VERBS):
        assert result_of(spec).obstacles == ()


def test_a_server_without_image_volumes_or_claims_is_an_obstacle():
    spec = {
        "preset": "kimi-k3/mi355x",
        "model": {"source": "oci", "image": "registry.example/k3:1"},
        "decode": {"gpu": {"dra": {}}},
    }
    old, new = (result_of(spec, server) for server in (K8S_1_20, K8S_CURRENT))
    assert [o.reason for o in old.obstacles].count("NotServedByCluster") == 2
    assert "NotServedByCluster" not in [o.reason for o in new.obstacles]
    assert "ResourceClaimTemplate kimi-decode-gpus" in left_out(old)
    (template,) = of_kind(new.manifests, "ResourceClaimTemplate").values()
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 8


def test_a_folder_of_one_machine_is_no_source_in_a_cluster():
    with pytest.raises(ConfigError, match="`kimistack up`"):
        result_of({"model": {"id": "kimi-nano", "source": "local", "path": "m"}, "decode": {}})
