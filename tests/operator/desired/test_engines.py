"""Command and environment of every engine's container."""

import json
import subprocess
from typing import Any

import pytest

from kimi_operator.desired.engines.flags import check_flags, flag_of
from kimi_operator.desired.render import rendered
from kimi_operator.observed import K8S_CURRENT, Manifest
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.worker import FileWeights, Role, WorkerSpec
from render_cases import HOST_MODEL, K26, MULTUS, deployment

BASE: dict[str, Any] = {
    "preset": K26,
    "image": "example/engine:1",
    "model": HOST_MODEL,
    "rdma": MULTUS,
    "security": {"profile": "RDMA"},
}


def engines(spec: dict[str, Any]) -> dict[str, Manifest]:
    """The engine containers by role."""
    found = {}
    for manifest in rendered(deployment(spec), K8S_CURRENT).manifests:
        if manifest["kind"] == "StatefulSet":
            (engine,) = manifest["spec"]["template"]["spec"]["containers"]
            found[manifest["metadata"]["labels"]["kimistack.dev/role"]] = engine
    return found


def argv(engine: Manifest) -> str:
    return " ".join(engine["command"])


def env(engine: Manifest) -> dict[str, Any]:
    return {v["name"]: v.get("value") for v in engine["env"]}


def test_sglang_prefill_and_decode_are_started_as_documented():
    both = engines({**BASE, "engine": "sglang"})
    common = (
        "python3 -m sglang.launch_server --model-path /models --served-model-name kimi-k2.6 "
        "--host 0.0.0.0 --port $(KIMISTACK_PORT) --tp-size 4 --context-length 262144 "
    )
    assert argv(both["prefill"]).startswith(
        f"{common}--disaggregation-mode prefill --disaggregation-transfer-backend mori "
        "--disaggregation-bootstrap-port $(KIMISTACK_BOOTSTRAP_PORT) --trust-remote-code"
    )
    assert argv(both["decode"]).startswith(
        f"{common}--disaggregation-mode decode --disaggregation-transfer-backend mori --trust"
    )
    for engine in both.values():
        assert env(engine)["SGLANG_HOST_IP"] == "$(POD_IP)"
        assert env(engine)["MORI_IB_GID_INDEX"] == "1"
    assert [p["containerPort"] for p in both["prefill"]["ports"]] == [8000, 8998]
    assert [p["containerPort"] for p in both["decode"]["ports"]] == [8000]


def test_experts_of_sglang_get_moris_all_to_all_unless_the_user_says_otherwise():
    role = {"parallelism": {"tp": 4, "ep": 4}}
    ours = engines({**BASE, "engine": "sglang", "decode": role})["decode"]
    theirs = engines(
        {
            **BASE,
            "engine": "sglang",
            "decode": {**role, "engineArgs": ["--moe-a2a-backend=deepep"]},
        }
    )["decode"]
    assert "--ep-size 4 " in argv(ours)
    assert "--moe-a2a-backend mori" in argv(ours)
    assert "--moe-a2a-backend mori" not in argv(theirs)
    assert env(ours)["RCCL_MSCCL_ENABLE"] == "0"


def test_ranks_of_several_nodes_come_from_the_pods_name():
    spec = {
        "engine": "sglang",
        "image": "example/engine:1",
        "model": {"id": "a/b", **HOST_MODEL},
        "decode": {"parallelism": {"tp": 16, "nodes": 2}},
    }
    engine = engines(spec)["decode"]
    script, name, *args = engine["command"][2:]
    variables = {
        "POD_NAME": "kimi-d-abc123-0-1",
        "POD_NAMESPACE": "llm",
        "KIMISTACK_DIST_PORT": "5000",
    }
    shown = subprocess.run(
        ["/bin/sh", "-c", script, name, "echo", *args[3:]],
        env=variables,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "--nnodes 2" in shown
    assert "--node-rank 1" in shown
    assert "--dist-init-addr kimi-d-abc123-0-0.kimi-d-abc123-0.llm.svc:5000" in shown


@pytest.mark.parametrize(("ordinal", "ready"), [("0", False), ("1", True)])
def test_only_the_first_pod_of_an_instance_must_answer(ordinal: str, ready: bool):
    spec = {
        "engine": "sglang",
        "image": "example/engine:1",
        "model": {"id": "a/b", **HOST_MODEL},
        "decode": {"parallelism": {"tp": 16, "nodes": 2}},
    }
    probe = engines(spec)["decode"]["readinessProbe"]["exec"]["command"]
    variables = {
        "POD_NAME": f"kimi-d-abc123-0-{ordinal}",
        "POD_IP": "127.0.0.1",
        "KIMISTACK_PORT": "9",
        "PATH": "/usr/bin:/bin",
    }
    code = subprocess.run(probe, env=variables, capture_output=True, check=False).returncode
    assert (code == 0) is ready


def test_vllm_gets_moris_connector_on_both_legs():
    both = engines({**BASE, "engine": "vllm"})
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        command = both[role]["command"]
        config = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert (config["kv_connector"], config["kv_role"]) == ("MoRIIOConnector", kv_role)
        assert config["kv_connector_extra_config"] == {
            "http_port": "$(KIMISTACK_PORT)",
            "handshake_port": "$(KIMISTACK_HANDSHAKE_PORT)",
            "notify_port": "$(KIMISTACK_NOTIFY_PORT)",
            "read_mode": True,
        }
        assert env(both[role])["VLLM_MORIIO_CONNECTOR_READ_MODE"] == "1"
        assert env(both[role])["PYTHONHASHSEED"] == "0"
        assert command[:3] == ["vllm", "serve", "/models"]


def test_vllms_mooncake_advertises_the_pods_address():
    spec = {**BASE, "engine": "vllm", "transfer": {"backend": "mooncake", "mode": "write"}}
    engine = engines(spec)["prefill"]
    assert "--data-parallel-address $(POD_IP) --kv-transfer-config" in argv(engine)
    assert env(engine)["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "$(KIMISTACK_BOOTSTRAP_PORT)"
    assert env(engine)["MC_GID_INDEX"] == "1"


def test_atoms_connector_takes_its_ports_as_numbers():
    engine = engines({**BASE, "engine": "atom"})["prefill"]
    command = engine["command"]
    text = command[command.index("--kv-transfer-config") + 1]
    expanded = text.replace("$(KIMISTACK_HANDSHAKE_PORT)", "6301").replace(
        "$(KIMISTACK_PORT)", "8000"
    )
    assert json.loads(expanded) == {
        "kv_role": "kv_producer",
        "kv_connector": "moriio",
        "proxy_ip": "$(POD_IP)",
        "handshake_port": 6301,
        "http_port": 8000,
    }
    assert "--no-enable_prefix_caching" in command
    assert env(engine)["ATOM_HOST_IP"] == "$(POD_IP)"


def test_a_kimistack_worker_starts_from_a_file_that_the_runtime_reads():
    result = rendered(deployment({**BASE, "engine": "kimistack"}), K8S_CURRENT)
    configs = {
        m["metadata"]["name"]: m["data"] for m in result.manifests if m["kind"] == "ConfigMap"
    }
    sets = [m for m in result.manifests if m["kind"] == "StatefulSet"]
    assert len(sets) == 2
    for manifest in sets:
        pod = manifest["spec"]["template"]["spec"]
        (name,) = [v["configMap"]["name"] for v in pod["volumes"] if v["name"] == "config"]
        worker = WorkerSpec.model_validate_json(configs[name]["worker.json"])
        assert worker.role == Role(manifest["metadata"]["labels"]["kimistack.dev/role"])
        assert isinstance(worker.weights, FileWeights)
        assert str(worker.weights.path) == "/models"
        assert str(worker.vocabulary) == "/models/tiktoken.model"
        assert worker.transfer == "verbs"
        (engine,) = pod["containers"]
        assert engine["command"] == ["kimistack", "worker", "--spec", "/etc/kimistack/worker.json"]
        assert env(engine)["KIMISTACK_REVISION"] == "$(POD_REVISION)"
        # a variable may refer to those before it only
        names = [variable["name"] for variable in engine["env"]]
        assert names.index("POD_REVISION") < names.index("KIMISTACK_REVISION")


def test_one_role_alone_hands_nothing_over():
    spec = {"preset": "kimi-nano/cpu", "decode": {}}
    result = rendered(deployment(spec), K8S_CURRENT)
    (file,) = [
        m["data"]["worker.json"]
        for m in result.manifests
        if m["kind"] == "ConfigMap" and "worker.json" in m["data"]
    ]
    worker = WorkerSpec.model_validate_json(file)
    assert (worker.role, worker.transfer) == (Role.BOTH, "loopback")


@pytest.mark.parametrize(
    ("engine", "argument", "full"),
    [
        ("sglang", "--tp=8", "tp"),
        ("sglang", "--tp_size=8", "tp-size"),
        ("sglang", "--enable-dp-attention", "enable-dp-attention"),
        ("sglang", "--disaggregation-m=decode", "disaggregation-mode"),
        ("sglang", "--context-length=1", "context-length"),
        ("vllm", "-tp", "tp"),
        ("vllm", "--max-model-len=1", "max-model-len"),
        ("vllm", "--kv_transfer_config={}", "kv-transfer-config"),
        ("atom", "--server_port=1", "server-port"),
        ("atom", "--enable-dp-attention", "enable-dp-attention"),
    ],
)
def test_a_flag_that_other_fields_decide_is_refused(engine: str, argument: str, full: str):
    spec = {**BASE, "engine": engine, "decode": {"engineArgs": [argument]}}
    with pytest.raises(ConfigError, match=f"engineArgs: .*--?{full}"):
        engines(spec)


def test_flags_are_told_from_values():
    assert [flag_of(text) for text in ("--a_b=1", "-tp", "8", "-1", "[1,2]")] == [
        "a-b",
        "tp",
        "",
        "",
        "",
    ]
    check_flags(["--max-running-requests=1", "4096"], ["--model-path"], frozenset(), "x")


@pytest.mark.parametrize("engine", ["vllm", "atom"])
def test_an_engine_of_one_node_is_not_spread_over_several(engine: str):
    spec = {
        "engine": engine,
        "image": "example/engine:1",
        "model": {"id": "a/b", **HOST_MODEL},
        "decode": {"parallelism": {"tp": 16, "nodes": 2}},
    }
    with pytest.raises(ConfigError, match="one node"):
        engines(spec)


def test_the_users_variable_wins_over_a_generated_one_but_not_over_who_the_pod_is():
    theirs = [{"name": "MORI_IB_GID_INDEX", "value": "7"}]
    engine = engines({**BASE, "engine": "vllm", "decode": {"env": theirs}})["decode"]
    assert env(engine)["MORI_IB_GID_INDEX"] == "7"
    for name in ("KIMISTACK_PORT", "POD_IP", "NODE_NAME"):
        with pytest.raises(ConfigError, match=f"{name} is set by the operator"):
            engines({**BASE, "decode": {"env": [{"name": name, "value": "x"}]}})


def test_adapters_are_mounted_and_named():
    adapters = [
        {"name": "a", "source": "hf", "path": "org/a"},
        {"name": "b", "source": "pvc", "claim": "loras", "path": "x/b"},
        {"name": "c", "source": "hostPath", "path": "/loras/c"},
    ]
    engine = engines({**BASE, "engine": "vllm", "adapters": adapters})["decode"]
    assert "--lora-modules a=org/a b=/adapters/b/x/b c=/adapters/c" in argv(engine)
    mounts = {m["mountPath"] for m in engine["volumeMounts"]}
    assert {"/adapters/b", "/adapters/c"} <= mounts
