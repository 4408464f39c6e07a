"""TLS of the pool's daemons: what a Secret's name in the spec becomes, and what it leaves alone."""

import subprocess
from dataclasses import replace

import pytest

from kimi_operator.desired.effective import resolve
from kimi_operator.desired.pool_tls import TLS_DIR
from kimi_operator.desired.render import instances_of, render, revision_of
from kimi_operator.desired.revision import Revision, fingerprint, named
from kimi_operator.observed import K8S_CURRENT
from kimi_operator.presets.preset import load_preset
from kimi_runtime.spec.router import RouterSpec
from kimi_runtime.spec.umbp import UmbpSpec
from render_cases import deployment

META = {"name": "kimi", "namespace": "llm", "uid": "u"}
HOST = "kimi-umbp.llm.svc"
NANO = {"preset": "kimi-nano/cpu", "prefill": {}, "decode": {}, "kvPool": {"dram": "128MiB"}}
SGLANG = {
    "engine": "sglang",
    "image": "sglang",
    "model": {"source": "hostPath", "path": "/models/m"},
    "decode": {},
}
ROLES = ["prefill", "decode"]
INPUTS_OF_0_3 = {
    "prefill": "b8c4f42a1070d1b2",
    "decode": "b3abea124fd74bf9",
    "router": "0f0ebfc7f841f7fd",
    "umbp": "aa20d34b51334877",
}
"""Fingerprints of `effective_of()` as 0.3.0 wrote them: the Secret was a field of them all."""


def effective_of(secret="pool-tls", spec=NANO):
    security = {"tlsSecretName": secret} if secret else {}
    return resolve(deployment({**spec, "security": security}, META), load_preset, "test")


def result_of(effective, revision=None):
    revision = revision or revision_of(effective)
    return render(
        effective,
        revisions={revision.name: revision},
        instances=instances_of(effective.deployment.spec, revision.name),
        capabilities=K8S_CURRENT,
    )


def objects(result):
    return {(m["kind"], m["metadata"]["name"]): m for m in result.manifests}


def pod_of(found, kind, name):
    return found[kind, name]["spec"]["template"]["spec"]


def file_of(found, name):
    return next(
        m["data"][name]
        for (kind, _), m in found.items()
        if kind == "ConfigMap" and name in m.get("data", {})
    )


@pytest.mark.parametrize(
    ("kind", "name", "keys"),
    [
        ("DaemonSet", "kimi-umbp", ["tls.crt", "tls.key", "ca.crt"]),
        ("Deployment", "kimi-router", ["ca.crt"]),
    ],
)
def test_pods_mount_what_they_need_of_the_secret_read_only_for_their_group(kind, name, keys):
    pod = pod_of(objects(result_of(effective_of())), kind, name)
    (volume,) = [one["secret"] for one in pod["volumes"] if one["name"] == "tls"]
    assert volume["secretName"] == "pool-tls"
    assert [item["key"] for item in volume["items"]] == keys
    assert (volume["defaultMode"], pod["securityContext"]["fsGroup"]) == (0o440, 65532)
    for container in (pod["containers"][0], pod["initContainers"][-1]):
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == "tls"]
        assert mount == {"name": "tls", "mountPath": TLS_DIR, "readOnly": True}
        assert "subPath" not in mount  # a renewed Secret would never reach it


def test_daemon_and_router_verify_one_name_by_files_that_are_mounted():
    found = objects(result_of(effective_of()))
    tls = UmbpSpec.model_validate_json(file_of(found, "umbp.json")).tls
    router = RouterSpec.model_validate_json(file_of(found, "router.json"))
    assert (tls.name, router.pools_name) == (HOST, HOST)
    assert str(router.pools_ca) == str(tls.ca) == f"{TLS_DIR}/ca.crt"
    assert (str(tls.certificate), str(tls.key)) == (f"{TLS_DIR}/tls.crt", f"{TLS_DIR}/tls.key")
    # the name is the Service's, so that one certificate is good for all and for who asks it
    assert found["Service", "kimi-umbp"]["metadata"]["namespace"] == "llm"


def test_probes_scrapes_and_policies_follow_the_scheme():
    found = objects(result_of(effective_of()))
    container = pod_of(found, "DaemonSet", "kimi-umbp")["containers"][0]
    for probe in ("startupProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert (get["scheme"], get["port"]) == ("HTTPS", "https")
    assert {port["name"]: port["containerPort"] for port in container["ports"]}["https"] == 8100
    (encrypted,) = found["PodMonitor", "kimi-umbp"]["spec"]["podMetricsEndpoints"]
    assert (encrypted["port"], encrypted["scheme"]) == ("https", "https")
    assert encrypted["tlsConfig"] == {
        "ca": {"secret": {"name": "pool-tls", "key": "ca.crt"}},
        "serverName": HOST,
    }
    rules = found["PrometheusRule", "kimi"]["spec"]["groups"][0]["rules"]
    assert "KimistackCertificateEnds" in {rule["alert"] for rule in rules}
    without = objects(result_of(effective_of(secret=None)))
    # a monitor whose Secret is missing is not used at all: the others' does not name it
    assert found["PodMonitor", "kimi"] == without["PodMonitor", "kimi"]
    selected = found["PodMonitor", "kimi-umbp"]["spec"]["selector"]["matchLabels"]
    labels = found["DaemonSet", "kimi-umbp"]["spec"]["template"]["metadata"]["labels"]
    assert selected.items() <= labels.items()
    for policy in ("kimi-umbp", "kimi-router", "kimi-engine"):
        assert found["NetworkPolicy", policy] == without["NetworkPolicy", policy]


def test_without_a_secret_nothing_is_said_that_an_older_image_does_not_know():
    found = objects(result_of(effective_of(secret=None)))
    assert "tls" not in file_of(found, "umbp.json")
    assert "pools_" not in file_of(found, "router.json")
    for kind, name in (("DaemonSet", "kimi-umbp"), ("Deployment", "kimi-router")):
        pod = pod_of(found, kind, name)
        assert "tls" not in {volume["name"] for volume in pod["volumes"]}
        names = {one["name"] for one in pod.get("initContainers", ())}
        assert "certificates" not in names
    assert ("PodMonitor", "kimi-umbp") not in found


def test_a_secret_that_comes_or_goes_replaces_daemons_and_routers_and_no_engine():
    with_it, without, other = (effective_of(secret=name) for name in ("pool-tls", None, "another"))
    for role in ROLES:
        assert len({fingerprint(e.written, role, ROLES) for e in (with_it, without, other)}) == 1
    for component in ("umbp", "router"):
        assert (
            len({fingerprint(e.written, component, ROLES) for e in (with_it, without, other)}) == 3
        )
    assert revision_of(with_it).name == revision_of(without).name


def test_a_deployment_that_named_a_secret_under_an_operator_that_left_it_out_gets_tls_now():
    plain = revision_of(effective_of(secret=None))
    older = {
        name: replace(
            part,
            inputs=INPUTS_OF_0_3[name],
            pod={**part.pod, "metadata": {"annotations": {"rendered-by": "an older operator"}}},
        )
        for name, part in plain.templates.items()
    }
    before = named(older, plain.image)
    upgraded = revision_of(effective_of(), kept=[before])
    assert upgraded.name == before.name
    assert "https" in upgraded.templates["umbp"].ports
    # and no engine restarts later on, for the field is none of theirs
    for later in (effective_of(secret=None), effective_of(secret="another")):
        assert revision_of(later, kept=[upgraded]).name == before.name


@pytest.mark.parametrize(
    "spec",
    [{**NANO, "kvPool": {"enabled": False}}, SGLANG],
    ids=["no pool", "an engine without one"],
)
def test_where_there_is_no_pool_the_condition_says_that_nothing_is_encrypted(spec):
    result = result_of(effective_of(spec=spec))
    left = next(one for one in result.left_out if one.what == "security.tlsSecretName")
    assert "there is none" in left.reason
    assert "signed, not encrypted" in left.reason
    found = objects(result)
    router = pod_of(found, "Deployment", "kimi-router")
    assert "tls" not in {volume["name"] for volume in router["volumes"]}
    assert ("PodMonitor", "kimi-umbp") not in found


def test_a_pool_of_before_is_not_scraped_by_tls_and_the_condition_says_so():
    effective = effective_of()
    now, then = revision_of(effective), revision_of(effective_of(secret=None))
    old = Revision(now.name, {**now.templates, "umbp": then.templates["umbp"]}, now.image)
    result = result_of(effective, old)
    (left,) = result.left_out
    assert f"revision {now.name} was made without it" in left.reason
    assert ("PodMonitor", "kimi-umbp") not in objects(result)
    assert not result_of(effective).left_out


@pytest.mark.parametrize(
    ("there", "lacks"),
    [
        (["tls.crt", "tls.key", "ca.crt"], None),
        (["tls.crt", "tls.key"], "ca.crt"),
        (["ca.crt"], "tls.crt tls.key"),
        ([], "tls.crt tls.key ca.crt"),
    ],
)
def test_a_daemon_waits_for_its_secret_and_says_which_key_it_lacks(tmp_path, there, lacks):
    pod = pod_of(objects(result_of(effective_of())), "DaemonSet", "kimi-umbp")
    (gate,) = [one for one in pod["initContainers"] if one["name"] == "certificates"]
    for key in there:
        (tmp_path / key).write_text("PEM")
    (tmp_path / "said").touch()
    moved = {TLS_DIR: str(tmp_path), "/dev/termination-log": str(tmp_path / "said")}
    *shell, script = gate["command"]
    for old, new in moved.items():
        script = script.replace(old, new)
    done = subprocess.run([*shell, script], capture_output=True, text=True, timeout=30, check=False)
    said = (tmp_path / "said").read_text()
    assert done.stderr == said
    if lacks is None:
        assert (done.returncode, said) == (0, "")
    else:
        assert done.returncode == 1
        assert f"Secret pool-tls of namespace llm lacks {lacks};" in said
        assert HOST in said
        assert len(said) < 400  # what a condition shows of a failure is 500 characters
