"""The pool's TLS by a Secret: turned on under load, renewed without a restart, turned off."""

import base64
from pathlib import Path

import pytest

from certificates import Authority
from load import Load
from nano import (
    DEPLOYMENT,
    NAME,
    NAMESPACE,
    POOLS,
    READY_S,
    ROUTERS,
    condition,
    engines,
    ready,
    restarts,
    router_url,
    serving,
    staying,
)
from nodes import Manifest, Nodes
from samples import samples_of, scheme_of, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
SECRET = f"{NAME}-umbp-tls"
HOST = f"DNS:{NAME}-umbp.{NAMESPACE}.svc"
REPLACED_S = 2 * READY_S
HEARD_S = 180.0
"""A node's kubelet renews mounted Secrets now and then."""
DAYS_LEFT = "kimistack_umbp_certificate_days_left"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


def secret(authority: Authority, folder: Path, days: int) -> Manifest:
    """As cert-manager writes it."""
    files = authority.issue(folder, host=HOST, days=days)
    texts = {"tls.crt": files.certificate, "tls.key": files.key, "ca.crt": files.ca}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET, "namespace": NAMESPACE},
        "type": "kubernetes.io/tls",
        "data": {
            name: base64.b64encode(path.read_bytes()).decode() for name, path in texts.items()
        },
    }


def daemons(nodes: Nodes) -> dict[str, Manifest]:
    """The pool's pods by uid."""
    return staying(nodes, POOLS)


def schemes(nodes: Nodes) -> list[str]:
    return [scheme_of(pod) for pod in daemons(nodes).values()]


def feeds_heard(nodes: Nodes) -> bool:
    """Whether every router follows every daemon's feed without a gap."""
    names = [pod["spec"]["nodeName"] for pod in daemons(nodes).values()]
    routers = staying(nodes, ROUTERS).values()
    if len(routers) != 2:
        return False  # they are being replaced
    found = [samples_of(nodes, router) for router in routers]
    return all(
        one.total("kimistack_router_feed_exact", name) == 1 for one in found for name in names
    )


def replaced(nodes: Nodes, spoken: str) -> None:
    """Until all daemons speak that way, and the deployment serves."""
    until(lambda: schemes(nodes) == [spoken] * 2, REPLACED_S, f"two daemons that speak {spoken}")
    nodes.until(
        DEPLOYMENT, lambda now: serving(now, prefill=2, decode=2), READY_S, "2+2 and Ready again"
    )
    until(lambda: feeds_heard(nodes), HEARD_S, "routers follow both daemons")


def test_a_secret_that_is_missing_is_named_and_nothing_stops_serving(
    nodes: Nodes, deployment: Manifest
):
    before = engines(nodes)
    with Load(router_url(nodes), NAME, clients=2) as load:
        nodes.merge(DEPLOYMENT, {"spec": {"security": {"tlsSecretName": SECRET}}})
        nodes.until(
            DEPLOYMENT,
            lambda now: SECRET in condition(now, "KVPoolReady").get("message", ""),
            READY_S,
            "its Secret named",
        )
    assert load.failures == []
    assert load.served > 0
    assert schemes(nodes) == ["http"] * 2, "no daemon goes before a router can follow its successor"
    assert engines(nodes).keys() == before.keys()


def test_daemons_are_encrypted_one_at_a_time_and_no_engine_restarts(
    nodes: Nodes, authority: Authority, tmp_path: Path
):
    before, there = engines(nodes), set(daemons(nodes))
    with Load(router_url(nodes), NAME, clients=2) as load:
        nodes.apply(secret(authority, tmp_path / "first", days=1))
        with nodes.timed("Secret written to both daemons encrypted and followed, under load"):
            replaced(nodes, "https")
    nodes.measured("the same: requests served", load.served, "")
    nodes.measured("the same: requests failed", len(load.failures), "")
    assert load.failures == []
    assert not there & set(daemons(nodes))
    after = engines(nodes)
    assert after.keys() == before.keys()
    assert restarts(after) == restarts(before)


def test_a_renewed_certificate_is_taken_without_a_restart(
    nodes: Nodes, authority: Authority, tmp_path: Path
):
    before = daemons(nodes)
    assert all(samples_of(nodes, pod).total(DAYS_LEFT) < 1 for pod in before.values())
    nodes.apply(secret(authority, tmp_path / "second", days=9))
    with nodes.timed("Secret renewed to both daemons showing the new certificate"):
        until(
            lambda: all(samples_of(nodes, pod).total(DAYS_LEFT) > 8 for pod in before.values()),
            HEARD_S,
            "the new certificate on both nodes",
        )
    after = daemons(nodes)
    assert after.keys() == before.keys()
    assert restarts(after) == restarts(before)
    until(lambda: feeds_heard(nodes), HEARD_S, "routers follow both daemons")


def test_turned_off_daemons_speak_http_again(nodes: Nodes):
    before = engines(nodes)
    nodes.merge(DEPLOYMENT, {"spec": {"security": {"tlsSecretName": None}}})
    replaced(nodes, "http")
    assert engines(nodes).keys() == before.keys()
    assert ready(nodes.get(DEPLOYMENT))
