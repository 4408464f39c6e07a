"""The pool's daemons as peers: who tells them of each other, who reaches them, how they go."""

import json

import pytest

from kimi_operator.daemons import pool_peers, pool_urls
from kimi_operator.desired.effective import resolve
from kimi_operator.desired.render import instances_of, render, revision_of
from kimi_operator.desired.revision import Revision, fingerprint
from kimi_operator.observed import K8S_CURRENT, ObjectKey
from kimi_operator.presets.preset import load_preset
from kimi_runtime.settings import read_settings
from kimi_runtime.spec.router import FleetSpec
from kimi_runtime.spec.umbp import UmbpSpec
from render_cases import deployment

META = {"name": "kimi", "namespace": "llm", "uid": "u"}
NANO = {"preset": "kimi-nano/cpu", "prefill": {}, "decode": {}}


def effective_of(**pool):
    spec = {**NANO, "kvPool": {"dram": "128MiB", **pool}, "security": {"profile": "RDMA"}}
    return resolve(deployment(spec, META), load_preset, "test")


def objects(effective, revision=None, **given):
    revision = revision or revision_of(effective)
    result = render(
        effective,
        revisions={revision.name: revision},
        instances=instances_of(effective.deployment.spec, revision.name),
        capabilities=K8S_CURRENT,
        **given,
    )
    return {(m["kind"], m["metadata"]["name"]): m for m in result.manifests}


def container_of(found):
    return found["DaemonSet", "kimi-umbp"]["spec"]["template"]["spec"]["containers"][0]


def file_of(found):
    data = next(
        m["data"]
        for (kind, _), m in found.items()
        if kind == "ConfigMap" and "umbp.json" in m.get("data", {})
    )
    return UmbpSpec.model_validate_json(data["umbp.json"])


def test_every_daemon_is_told_of_every_other_by_a_file_that_changes():
    pools = {"node-b": "http://10.0.0.2:8100", "node-a": "http://[fd00::1]:8100"}
    found = objects(effective_of(), pools=pools)
    told = FleetSpec.model_validate_json(
        found["ConfigMap", "kimi-umbp-peers"]["data"]["peers.json"]
    )
    assert [(one.name, one.url) for one in told.pools] == [
        ("node-a", "http://[fd00::1]:8100"),
        ("node-b", "http://10.0.0.2:8100"),
    ]
    pod = found["DaemonSet", "kimi-umbp"]["spec"]["template"]["spec"]
    mount = next(m for m in container_of(found)["volumeMounts"] if m["name"] == "peers")
    volume = next(v for v in pod["volumes"] if v["name"] == "peers")
    assert volume["configMap"]["name"] == "kimi-umbp-peers"
    assert str(file_of(found).peers_file) == f"{mount['mountPath']}/peers.json"
    more = objects(effective_of(), pools={**pools, "node-c": "http://10.0.0.3:8100"})
    assert more["DaemonSet", "kimi-umbp"] == found["DaemonSet", "kimi-umbp"]


def test_a_daemon_is_named_by_its_node_and_reached_at_its_pod_s_address():
    found = objects(effective_of())
    env = {one["name"]: one.get("value") for one in container_of(found)["env"]}
    assert env["KIMISTACK_NAME"] == "$(NODE_NAME)"
    values = {"$(NODE_NAME)": "node-a", "$(POD_IP)": "10.0.0.1"}
    settings = read_settings({name: values.get(value, value or "") for name, value in env.items()})
    spec = settings.onto(file_of(found))
    assert (spec.name, spec.network.advertised, spec.network.port) == ("node-a", "10.0.0.1", 8101)
    assert (spec.port, spec.grpc_port) == (8100, 8102)


def test_only_daemons_reach_what_is_for_peers():
    policy = objects(effective_of())["NetworkPolicy", "kimi-umbp"]["spec"]
    reached = {}
    for rule in policy["ingress"]:
        who = {
            peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component", "scraper")
            for peer in rule["from"]
        }
        for port in rule["ports"]:
            reached[port["port"]] = who
    assert reached == {8100: {"router", "umbp", "scraper"}, 8101: {"umbp"}, 8102: {"umbp"}}


@pytest.mark.parametrize(
    ("pool", "grace_s"),
    [({}, 60), ({"evacuation": "2m"}, 150), ({"evacuation": "0s"}, 30), ({"keepArena": True}, 30)],
)
def test_a_daemon_that_goes_has_time_to_move_what_it_has(pool, grace_s):
    found = objects(effective_of(**pool))
    pod = found["DaemonSet", "kimi-umbp"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == grace_s
    hook = container_of(found).get("lifecycle", {}).get("preStop")
    if grace_s == 30:
        assert hook is None
    else:
        assert hook["exec"]["command"][:3] == ["kimistack", "umbp", "drain"]
        assert hook["exec"]["command"][-1] == f"{grace_s - 30}s"


def test_without_peers_nothing_is_said_of_them():
    found = objects(effective_of(peers="Disabled"))
    assert ("ConfigMap", "kimi-umbp-peers") not in found
    assert not file_of(found).has_peers
    names = {
        volume["name"]
        for volume in found["DaemonSet", "kimi-umbp"]["spec"]["template"]["spec"]["volumes"]
    }
    assert "peers" not in names
    assert "lifecycle" not in container_of(found)
    ports = [rule["ports"] for rule in found["NetworkPolicy", "kimi-umbp"]["spec"]["ingress"]]
    assert [[one["port"] for one in some] for some in ports] == [[8100]]


def test_a_revision_of_before_gets_no_file_that_it_does_not_mount():
    effective = effective_of()
    now = revision_of(effective)
    then = revision_of(effective_of(peers="Disabled")).templates["umbp"]
    old = Revision(now.name, {**now.templates, "umbp": then}, now.image)
    found = objects(effective, old)
    assert ("ConfigMap", "kimi-umbp-peers") not in found
    assert len(found["NetworkPolicy", "kimi-umbp"]["spec"]["ingress"]) == 1


def test_what_a_user_says_of_tenants_and_memory_reaches_the_daemon():
    found = objects(
        effective_of(
            tenants={"batch": {"weight": 0.5, "quota": "16MiB"}},
            tenantDefault={"weight": 2},
            numaNodes=[0, 1],
            keepArena=True,
        )
    )
    spec = file_of(found)
    assert (spec.tenants["batch"].weight, spec.tenants["batch"].quota) == (0.5, 2**24)
    assert spec.tenant_default.weight == 2
    assert (spec.numa_nodes, spec.keep_arena) == ((0, 1), True)
    assert container_of(found)["securityContext"]["capabilities"]["add"] == ["SYS_NICE"]


def test_what_is_the_pool_s_alone_restarts_no_engine_and_no_router():
    plain, other = effective_of(), effective_of(peers="Disabled", evacuation="5s", numaNodes=[1])
    for component in ("prefill", "decode", "router"):
        prints = {
            fingerprint(one.written, component, ["prefill", "decode"]) for one in (plain, other)
        }
        assert len(prints) == 1
    assert len({fingerprint(one.written, "umbp", []) for one in (plain, other)}) == 2


def pod(node, *, ready=True, leaving=False, ip="10.0.0.1"):
    metadata = {"name": f"p-{node}-{leaving}", "labels": {"app.kubernetes.io/component": "umbp"}}
    if leaving:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, "namespace": "llm"},
        "spec": {"nodeName": node},
        "status": {"podIP": ip, "conditions": conditions},
    }
    return ObjectKey.of(manifest), json.loads(json.dumps(manifest))


def test_a_daemon_that_goes_is_known_to_its_peers_and_no_longer_to_routers():
    children = dict(
        [
            pod("a"),
            pod("b", ready=False, leaving=True, ip="10.0.0.2"),
            pod("c", ready=False, ip="10.0.0.3"),
            pod("d", leaving=True, ip="10.0.0.4"),
            pod("d", ip="10.0.0.5"),
        ]
    )
    a, b, d = (f"http://10.0.0.{n}:8100" for n in (1, 2, 5))
    assert pool_urls(children) == {"a": a, "d": d}
    assert pool_peers(children) == {"a": a, "b": b, "d": d}
