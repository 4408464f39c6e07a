"""Daemons and a router that start from what the operator writes for a Secret of certificates."""

import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from certificates import Authority, needs_openssl
from kimi_connect.wire import Outcome
from kimi_operator.desired.effective import resolve
from kimi_operator.desired.pool_tls import CA, CERTIFICATE, KEY, TLS_DIR
from kimi_operator.desired.render import instances_of, render, revision_of
from kimi_operator.observed import K8S_CURRENT
from kimi_operator.presets.preset import load_preset
from kimi_runtime.errors import ConfigError
from kimi_runtime.router.service import open_router
from kimi_runtime.settings import read_settings
from kimi_runtime.spec.router import RouterSpec
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.feed import FollowState
from pool_daemon import CALL_KEY, blocks_of, keys_of, targets
from pool_peers import SOON_S, knows, owner_of, until
from render_cases import deployment
from scripted_stack import VOCABULARY

pytestmark = needs_openssl

SPEC = {
    "preset": "kimi-nano/cpu",
    "kvPool": {"dram": "1MiB", "page": "4KiB"},
    "security": {"tlsSecretName": "pool-tls"},
}
HOST = "kimi-umbp.llm.svc"


def rendered_files(pools: dict[str, str]) -> dict[str, str]:
    """Every file of every ConfigMap, with the daemons at these urls by node."""
    meta = {"name": "kimi", "namespace": "llm", "uid": "u"}
    effective = resolve(deployment(SPEC, meta), load_preset, "test")
    revision = revision_of(effective)
    result = render(
        effective,
        revisions={revision.name: revision},
        instances=instances_of(effective.deployment.spec, revision.name),
        capabilities=K8S_CURRENT,
        pools=pools,
    )
    maps = [m["data"] for m in result.manifests if m["kind"] == "ConfigMap"]
    return {name: text for data in maps for name, text in data.items()}


class Pod:
    """A folder with what the kubelet would mount; rendered paths lead into it."""

    def __init__(self, folder: Path, authority: Authority, host: str = f"DNS:{HOST}") -> None:
        self.folder = folder
        folder.mkdir()
        self.certify(authority, host)
        self.put("/etc/kimistack-keys/call-key", CALL_KEY.decode())
        self.at("/etc/kimistack-keys/call-key").chmod(0o600)
        self.at("/run/kimistack").mkdir(parents=True)

    def certify(self, authority: Authority, host: str = f"DNS:{HOST}") -> None:
        """Have the files of a Secret that this authority's issuer wrote."""
        issued = authority.issue(self.folder / "issued", host=host)
        for file, key in ((issued.certificate, CERTIFICATE), (issued.key, KEY), (issued.ca, CA)):
            self.put(f"{TLS_DIR}/{key}", file.read_text())

    def at(self, path: str) -> Path:
        """Where a pod's path is on this machine."""
        return self.folder / path.lstrip("/")

    def put(self, path: str, text: str) -> None:
        """Write a file as the kubelet does: as a whole."""
        there = self.at(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        (there.parent / "new").write_text(text)
        (there.parent / "new").rename(there)

    def read(self, text: str) -> dict[str, object]:
        """A rendered file with the pod's paths as they are here."""
        spec = json.loads(text)
        return {name: self._moved(value) for name, value in spec.items()}

    def _moved(self, value):
        if isinstance(value, dict):
            return {name: self._moved(one) for name, one in value.items()}
        is_path = isinstance(value, str) and value.startswith(("/etc/", "/run/"))
        return str(self.at(value)) if is_path else value


@asynccontextmanager
async def daemon_of(pod: Pod, node: str):
    """The daemon of a node from its rendered file, at ports of this machine; and a client."""
    fields = pod.read(rendered_files({})["umbp.json"])
    ports = {"port": 0, "network": {"port": 0}, "evict_above": 1.0, "evict_to": 1.0}
    settings = read_settings({"KIMISTACK_HOST": "127.0.0.1", "KIMISTACK_NAME": node})
    spec = settings.onto(UmbpSpec.model_validate(fields | ports))
    async with running(spec) as daemon:
        client = await open_pool(daemon.spec.socket, CALL_KEY)
        try:
            yield daemon, client
        finally:
            await client.aclose()


def tell(pod: Pod, pools: dict[str, str]) -> None:
    """What the operator tells a pod of the daemons there are."""
    files = rendered_files(pools)
    pod.put("/etc/kimistack-peers/peers.json", files["peers.json"])
    fleet = json.loads(files["fleet.json"]) | {"workers": []}
    pod.put("/etc/kimistack/fleet.json", json.dumps(fleet))


@pytest.fixture
def folder(tmp_path_factory):
    """Of a short name: sockets lie in it, whose paths have a limit."""
    return tmp_path_factory.mktemp("t")


async def test_rendered_daemons_and_router_serve_each_other_over_tls_and_refuse_strangers(
    folder, caplog
):
    ours, theirs = Authority(folder / "ours"), Authority(folder / "theirs")
    a, b, router = (Pod(folder / name, ours) for name in ("a", "b", "router"))
    stranger = Pod(folder / "c", theirs)
    async with (
        daemon_of(a, "node-a") as (daemon_a, at_a),
        daemon_of(b, "node-b") as (daemon_b, at_b),
        daemon_of(stranger, "node-c") as (daemon_c, _),
    ):
        daemons = {"a": daemon_a, "b": daemon_b, "c": daemon_c}
        pools = {f"node-{name}": daemon.url for name, daemon in daemons.items()}
        assert {url.partition(":")[0] for url in pools.values()} == {"https"}
        for pod in (a, b, router):
            tell(pod, pools)
        keys, into = keys_of(3), targets(3)
        await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
        await until(lambda: owner_of_or_none(daemon_b, "node-a") is not None)
        await knows(daemon_b, "node-a", 3)
        assert await at_b.load(keys, into, deadline_s=SOON_S) == (3, Outcome.HIT)
        assert into == blocks_of(keys)
        why = f"the feed of node-c is lost: node-c at {pools['node-c']} shows a certificate that"
        await until(lambda: why in caplog.text)
        assert owner_of(daemon_b, "node-c").blocks == {}
        spec = RouterSpec.model_validate(router.read(rendered_files(pools)["router.json"]))
        assert spec.pools_name == HOST
        async with open_router(spec, VOCABULARY) as routing:
            feeds = routing.feeds
            await until(lambda: feeds.states().get("node-a") is FollowState.EXACT)
            await until(lambda: feeds.keys_held()["node-a"] == 3)
            await until(lambda: "node-c" in _lost(caplog))
            assert feeds.keys_held()["node-c"] == 0
        assert "node-c shows a certificate that is not trusted" in _lost(caplog)["node-c"]
        assert "certificate verify failed" in _lost(caplog)["node-c"]


async def test_a_renewed_secret_reaches_daemons_and_routers_that_run(folder, caplog):
    caplog.set_level("INFO")
    ours, another = Authority(folder / "ours"), Authority(folder / "another")
    a, b, router = every = [Pod(folder / name, ours) for name in ("a", "b", "router")]
    async with (
        daemon_of(a, "node-a") as (daemon_a, at_a),
        daemon_of(b, "node-b") as (daemon_b, at_b),
    ):
        pools = {"node-a": daemon_a.url, "node-b": daemon_b.url}
        for pod in every:
            tell(pod, pools)
        spec = RouterSpec.model_validate(router.read(rendered_files(pools)["router.json"]))
        async with open_router(spec, VOCABULARY) as routing:
            follows = routing.feeds.states
            await until(lambda: follows().get("node-a") is FollowState.EXACT)
            for pod in every:
                pod.certify(another)
            await until(lambda: caplog.text.count("the certificates were renewed") == 2)
            keys, into = keys_of(3), targets(3)
            await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
            await until(lambda: owner_of_or_none(daemon_b, "node-a") is not None)
            await knows(daemon_b, "node-a", 3)
            assert await at_b.load(keys, into, deadline_s=SOON_S) == (3, Outcome.HIT)
            tell(router, {})
            await until(lambda: not follows().keys() & pools.keys())
            tell(router, pools)  # connects anew
            await until(lambda: follows().get("node-a") is FollowState.EXACT)
        assert "authority renewed" in caplog.text


async def test_a_rendered_daemon_with_a_certificate_of_another_name_does_not_start(folder):
    ours = Authority(folder / "ours")
    pod = Pod(folder / "a", ours, "DNS:another-umbp.llm.svc")
    with pytest.raises(ConfigError, match=f"not valid for '{HOST}'"):
        async with daemon_of(pod, "node-a"):
            pass


def owner_of_or_none(daemon, name):
    return daemon.clients.remote.owners.named(name)


def _lost(caplog) -> dict[str, str]:
    """Why the router follows an owner no more, by its name."""
    found = [record.fields for record in caplog.records if record.message == "feed lost"]
    return {fields["owner"]: fields["why"] for fields in found}
