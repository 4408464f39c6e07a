"""Daemons that encrypt: who gets in, who does not, and what a renewal of certificates does."""

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
from contextlib import aclosing

import aiohttp
import pytest

from certificates import Authority, needs_openssl
from kimi_connect.wire import Outcome
from kimi_runtime.errors import ConfigError, PeerGone, WorkerFailed
from kimi_runtime.router.client import PeerClient
from kimi_runtime.router.client import open_http as open_router_http
from kimi_runtime.router.trust import PoolTrust
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.remote.calls import OwnerCalls, open_http
from kimi_runtime.umbp.rpc.client import RpcClient
from kimi_runtime.umbp.rpc.methods import INSPECT
from kimi_runtime.umbp.rpc.tls import Tls
from pool_control import SOON_S, control_of
from pool_daemon import CALL_KEY, blocks_of, keys_of, pool_spec, targets
from pool_peers import knows, owner_of, peer, until

pytestmark = needs_openssl


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "authority")


async def inspected(daemon, files):
    """A call over TCP with these files; files None: without TLS."""
    tls = files and Tls(files)
    rpc = RpcClient(
        f"127.0.0.1:{daemon.grpc_port}",
        [CALL_KEY],
        what="the daemon",
        credentials=tls and tls.channel_credentials(),
    )
    try:
        return await rpc.call(INSPECT, INSPECT.asked(), within_s=SOON_S)
    finally:
        await rpc.aclose()


async def test_daemons_with_certificates_of_one_authority_fetch_from_each_other(
    tmp_path, authority
):
    one, two = authority.issue(tmp_path / "one"), authority.issue(tmp_path / "two")
    async with (
        peer(tmp_path, "a", tls=one) as (a, at_a),
        peer(tmp_path, "b", [("a", a.url)], tls=two) as (b, at_b),
    ):
        assert a.url.startswith("https:")
        keys, into = keys_of(3), targets(3)
        await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
        await knows(b, "a", 3)
        assert await at_b.load(keys, into, deadline_s=SOON_S) == (3, Outcome.HIT)
        assert into == blocks_of(keys)


async def test_a_peer_with_another_authority_is_refused_and_says_why(tmp_path, authority, caplog):
    stranger = Authority(tmp_path / "stranger").issue(tmp_path / "other")
    async with (
        peer(tmp_path, "a", tls=authority.issue(tmp_path / "one")) as (a, _),
        peer(tmp_path, "b", [("a", a.url)], tls=stranger) as (b, _),
    ):
        await until(lambda: "the feed of a is lost" in caplog.text)
        assert "certificate verify failed" in caplog.text
        assert owner_of(b, "a").blocks == {}
        with pytest.raises(PeerGone, match="CERTIFICATE_VERIFY_FAILED"):
            await inspected(a, stranger)


async def test_who_shows_no_certificate_or_one_of_another_authority_gets_no_call_through(
    tmp_path, authority
):
    files = authority.issue(tmp_path / "one")
    stranger = Authority(tmp_path / "stranger").issue(tmp_path / "other")
    strange = stranger.model_copy(update={"ca": authority.certificate})
    async with running(pool_spec(tmp_path, tls=files)) as daemon:
        assert (await inspected(daemon, files)).name == "pool"
        for wrong in (None, strange):
            with pytest.raises(PeerGone):
                await inspected(daemon, wrong)
        async with control_of(daemon.spec) as control:  # its own socket is not encrypted
            assert (await control(INSPECT)).name == "pool"


async def test_the_command_says_in_one_line_that_a_daemon_is_not_trusted(tmp_path, authority):
    stranger = Authority(tmp_path / "stranger").issue(tmp_path / "other")
    ours = pool_spec(tmp_path, tls=authority.issue(tmp_path / "one"))
    file = tmp_path / "spec.json"
    file.write_text(ours.model_copy(update={"tls": stranger}).model_dump_json(exclude_none=True))
    async with running(ours) as daemon:
        command = [sys.executable, "-m", "kimi_runtime.cli", "umbp", "inspect", "--spec", str(file)]
        command += ["--address", f"127.0.0.1:{daemon.grpc_port}"]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=120,
        )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, "CERTIFICATE_VERIFY_FAILED" in line) == (1, True)


async def test_probes_reach_an_encrypted_http_face_without_a_certificate(tmp_path, authority):
    files = authority.issue(tmp_path / "one")
    trusting = ssl.create_default_context(cafile=str(authority.certificate))
    async with running(pool_spec(tmp_path, tls=files)) as daemon, aiohttp.ClientSession() as http:
        async with http.get(f"{daemon.url}/readyz", ssl=trusting) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"{daemon.url}/readyz")


@pytest.mark.parametrize(
    ("host", "name", "known", "refusal"),
    [
        ("IP:127.0.0.1", None, True, None),
        ("DNS:pool.kimistack", "pool.kimistack", True, None),
        ("DNS:pool.kimistack", None, True, "not valid for '127.0.0.1'"),
        ("DNS:pool.kimistack", "another.kimistack", True, "not valid for 'another.kimistack'"),
        ("IP:127.0.0.1", None, False, "certificate verify failed"),
    ],
)
async def test_a_router_follows_encrypted_pools_of_the_authority_and_name_it_knows(
    tmp_path, authority, host, name, known, refusal
):
    files = authority.issue(tmp_path / "one", host=host)
    trust = PoolTrust(authority.certificate if known else None, name)
    async with (
        running(pool_spec(tmp_path, tls=files)) as daemon,
        open_router_http() as http,
        aclosing(
            PeerClient(http, "pool", daemon.url, CALL_KEY, trust=trust).feed(None, 0)
        ) as lines,
    ):
        if refusal is None:
            assert (await anext(lines)).owner == "pool"
        else:
            with pytest.raises(WorkerFailed, match=f"pool shows a certificate.*{refusal}"):
                await anext(lines)


async def test_a_certificate_made_out_to_a_name_is_good_where_that_name_is_expected(
    tmp_path, authority
):
    files = authority.issue(tmp_path / "one", host="DNS:pool.kimistack", name="pool.kimistack")
    async with running(pool_spec(tmp_path, tls=files, lends=True)) as daemon, open_http() as http:
        calls = OwnerCalls(http, "a", daemon.url, [CALL_KEY], tls=Tls(files))
        lines = calls.feed(None, 0)
        assert (await anext(lines)).owner == "pool"
        await lines.aclose()
        await calls.aclose()
        unnamed = files.model_copy(update={"name": None})
        calls = OwnerCalls(http, "a", daemon.url, [CALL_KEY], tls=Tls(unnamed))
        with pytest.raises(PeerGone, match="certificate"):
            await anext(calls.feed(None, 0))


@pytest.mark.parametrize(
    ("issued", "why"),
    [
        ({"host": "DNS:another.kimistack"}, "Hostname mismatch"),
        ({"usage": "serverAuth"}, "unsuitable certificate purpose|unsupported certificate purpose"),
        ({"usage": "clientAuth"}, "unsuitable certificate purpose|unsupported certificate purpose"),
        ({"usage": "serverAuth,clientAuth"}, None),
        ({"days": -1}, None),  # told by a line a day, and may be the clock's fault
    ],
)
def test_a_certificate_that_peers_of_that_name_would_refuse_is_refused_at_the_start(
    tmp_path, authority, issued, why
):
    name = "pool.kimistack"
    files = authority.issue(tmp_path / "one", **{"host": f"DNS:{name}", **issued}, name=name)
    if why is None:
        Tls(files)
    else:
        with pytest.raises(ConfigError, match=rf"peers will refuse .*({why})"):
            Tls(files)


@pytest.mark.parametrize("strict", [True, False])
def test_a_certificate_is_proved_as_strictly_as_this_python_s_peers_look_at_it(
    tmp_path, monkeypatch, strict
):
    as_it_is = ssl.create_default_context

    def as_of_3_13(*args, **named):
        context = as_it_is(*args, **named)
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_of_3_13)
    host = "pool.example"
    ca = Authority(tmp_path / "authority", strict=strict)
    files = ca.issue(tmp_path / "one", host=f"DNS:{host}", name=host)
    if strict:
        Tls(files)
    else:
        with pytest.raises(ConfigError, match=r"refuse .*: CA cert does not include key"):
            Tls(files)


def test_a_certificate_of_another_authority_than_the_one_beside_it_is_refused(tmp_path, authority):
    files = authority.issue(tmp_path / "one", host="DNS:pool", name="pool")
    files.ca.write_bytes(Authority(tmp_path / "stranger").certificate.read_bytes())
    with pytest.raises(ConfigError, match="peers will refuse"):
        Tls(files)


async def test_renewed_certificates_count_from_the_next_connection_on(tmp_path, authority, caplog):
    files = authority.issue(tmp_path / "one")
    caplog.set_level("INFO")
    other = Authority(tmp_path / "next")
    new = other.issue(tmp_path / "new")
    async with running(pool_spec(tmp_path, tls=files)) as daemon:
        shutil.copy(new.key, files.key)  # half of a renewal: the key belongs to no certificate
        await until(lambda: "the certificates are as before" in caplog.text)
        shutil.copy(new.certificate, files.certificate)
        shutil.copy(new.ca, files.ca)
        await until(lambda: "the certificates were renewed" in caplog.text)
        assert (await inspected(daemon, new)).name == "pool"
        trusting = ssl.create_default_context(cafile=str(other.certificate))
        url = f"{daemon.url}/healthz"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trusting) as response:
            assert response.status == 200


@pytest.mark.parametrize("missing", ["certificate", "key", "ca"])
async def test_files_that_are_not_there_or_do_not_belong_together_end_the_start(
    tmp_path, authority, missing
):
    files = authority.issue(tmp_path / "one")
    getattr(files, missing).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        async with running(pool_spec(tmp_path, tls=files)):
            pass
    getattr(files, missing).write_text("no certificate")
    with pytest.raises(ConfigError, match="belong together"):
        async with running(pool_spec(tmp_path, tls=files)):
            pass


async def test_an_empty_authority_is_refused_and_not_every_one_of_this_machine_trusted(
    tmp_path, authority, caplog
):
    files = authority.issue(tmp_path / "one")
    tls, whole = Tls(files), files.ca.read_text()
    trusted = tls.client_context
    files.ca.write_text("")
    tls.refresh()
    assert (tls.client_context is trusted, tls.renewals) == (True, 0)
    assert "is empty" in caplog.text
    with pytest.raises(ConfigError, match="is empty"):
        Tls(files)
    files.ca.write_text(whole)
    tls.refresh()
    assert len(tls.client_context.get_ca_certs()) == 1


async def test_a_peer_that_is_reached_but_not_trusted_is_told_after_one_that_was_not_there(
    tmp_path, authority, caplog
):
    stranger = Authority(tmp_path / "stranger").issue(tmp_path / "other")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    late = [("b", f"https://127.0.0.1:{port}")]
    async with peer(tmp_path, "a", late, tls=authority.issue(tmp_path / "one")):
        await until(lambda: "can't be reached" in caplog.text)
        assert "certificate verify failed" not in caplog.text
        async with running(pool_spec(tmp_path, port=port, tls=stranger)):
            await until(lambda: "certificate verify failed" in caplog.text)
