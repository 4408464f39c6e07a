"""A file that is read again while its daemon runs."""

import json
import signal

import pytest

from kimi_connect.wire import Outcome
from kimi_runtime.errors import ConfigError, Unauthorized
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.rpc.methods import INSPECT, RELOAD
from kimi_runtime.umbp.tuning import LIVE, Source
from pool_control import SOON_S, control_of
from pool_daemon import CALL_KEY, blocks_of, keys_of, pool_spec, start_python, targets
from pool_peers import knows, owner_of, peer, until

NEW_KEY = b"the new key has thirty-two bytes"


class File:
    """A daemon's file, as an operator edits it."""

    def __init__(self, spec: UmbpSpec) -> None:
        self.path = spec.socket.parent / "umbp.json"
        self.spec = spec
        self.write()
        self.source = Source(self.path, self.read)

    def read(self) -> UmbpSpec:
        try:
            return UmbpSpec.model_validate_json(self.path.read_bytes())
        except ValueError as exc:
            raise ConfigError(f"{self.path} is no UmbpSpec: {exc}") from exc

    def write(self, **changes) -> None:
        """Replace it by one with these changes."""
        fields = self.spec.model_dump(mode="json", exclude_none=True) | changes
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(fields))
        new.replace(self.path)


@pytest.fixture
async def daemon(tmp_path):
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="16MiB", segment="1MiB")
    file = File(pool_spec(tmp_path, ssd=ssd, tenants={"a": {"weight": 2.0}}))
    async with running(file.spec, file.source) as made:
        yield made, file


async def test_what_can_change_at_once_does_and_the_rest_is_named(daemon):
    made, file = daemon
    file.write(
        evict_above=0.9,
        evict_to=0.8,
        tenants={"a": {"quota": "40KiB"}},
        ssd_after_uses=5,
        ssd_write_rate="1MiB/s",
        recompute_rate="1GiB/s",
        dram_bytes="2MiB",
        pin_lease=1.0,
    )
    async with control_of(made.spec) as control:
        answer = await control(RELOAD)
        assert set(answer.changed) == {
            *("evict_above", "evict_to", "tenants"),
            *("ssd_after_uses", "ssd_write_rate", "recompute_rate"),
        }
        assert set(answer.needs_restart) == {"dram_bytes", "pin_lease"}
        again = await control(RELOAD)
        assert (list(again.changed), set(again.needs_restart)) == ([], {"dram_bytes", "pin_lease"})
    pool, second = made.clients.pool, made.clients.second
    assert (pool.high, pool.low) == (0.9, 0.8)
    assert (second.after_uses, second.writer.bytes_per_s) == (5, 1 << 20)
    assert pool.retention.seconds_per_byte(b"k" * 16) == pytest.approx(1 / (1 << 30))
    assert pool.pin_lease_s == file.spec.pin_lease
    client = await open_pool(made.spec.socket, CALL_KEY)
    keys = keys_of(5)
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S, tenant="a") == 3
    await client.aclose()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no UmbpSpec"),
        ('{"name": "pool"}', "no UmbpSpec"),
        (None, "cannot be read"),
    ],
)
async def test_a_file_that_is_wrong_changes_nothing_and_says_why(daemon, caplog, text, says):
    made, file = daemon
    if text is None:
        file.write(evict_to=0.5, call_key="/nowhere/key")
    else:
        file.path.write_text(text)
    async with control_of(made.spec) as control:
        assert says in (await control(RELOAD)).refused
    assert made.tuner.spec == file.spec
    assert made.clients.pool.low == file.spec.evict_to
    assert "all is as before" in caplog.text
    assert made.state.reloads["refused"] >= 1


async def test_the_daemon_notices_by_itself_that_its_file_or_key_changed(daemon):
    made, file = daemon
    file.write(evict_to=0.7)
    await until(lambda: made.clients.pool.low == 0.7)
    made.spec.call_key.write_bytes(NEW_KEY + b"\n" + CALL_KEY)
    await until(lambda: made.state.call_keys == [NEW_KEY, CALL_KEY])


async def test_keys_are_rotated_without_a_restart_and_without_a_lost_call(tmp_path):
    """New key beside the old one everywhere, then the old one goes; peers lend all the time."""
    with_a, with_b = [File(spec) for spec in await _two(tmp_path)]
    async with running(with_a.spec, with_a.source) as a:
        with_b.spec = with_b.spec.model_copy(
            update={"peers": (type(with_b.spec.peers[0])(name="a", url=a.url),)}
        )
        with_b.write()
        async with running(with_b.spec, with_b.source) as b:
            at_a = await open_pool(a.spec.socket, CALL_KEY)
            step = 0

            async def still_fetched():
                nonlocal step
                step += 1
                keys, into = keys_of(2, 100 * step), targets(2)
                await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
                await knows(b, "a", 2 * step)
                at_b = await open_pool(b.spec.socket, b.state.call_keys[0])
                assert await at_b.load(keys, into, deadline_s=SOON_S) == (2, Outcome.HIT)
                await at_b.aclose()

            await still_fetched()
            for text in (CALL_KEY + b"\n" + NEW_KEY, NEW_KEY + b"\n" + CALL_KEY, NEW_KEY):
                for one in (a, b):
                    one.spec.call_key.write_bytes(text)
                    assert (await one.tuner.reload()).changed == ["call_key"]
                    await still_fetched()
            async with control_of(a.spec, CALL_KEY) as control:
                with pytest.raises(Unauthorized):
                    await control(INSPECT)
            await at_a.aclose()


async def _two(folder):
    specs = []
    for name, peers in (("a", []), ("b", [{"name": "a", "url": "http://127.0.0.1:1"}])):
        (folder / name).mkdir()
        specs.append(pool_spec(folder / name, name=name, peers=peers, lends=True))
    return specs


async def test_peers_come_and_go_by_the_file(tmp_path):
    async with peer(tmp_path, "a") as (a, at_a):
        keys = keys_of(2)
        await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
        (tmp_path / "b").mkdir()
        file = File(pool_spec(tmp_path / "b", name="b", lends=True))
        async with running(file.spec, file.source) as b:
            file.write(peers=[{"name": "a", "url": a.url}])
            assert (await b.tuner.reload()).changed == ["peers"]
            await knows(b, "a", 2)
            file.write()
            assert (await b.tuner.reload()).changed == ["peers"]
            assert not len(b.clients.remote.owners)


async def test_peers_need_a_restart_where_the_daemon_started_alone(daemon):
    made, file = daemon
    file.write(peers=[{"name": "a", "url": "http://127.0.0.1:1"}])
    assert (await made.tuner.reload()).needs_restart == ["peers"]


async def test_a_daemon_without_a_file_says_so(tmp_path):
    async with running(pool_spec(tmp_path)) as made:
        assert "not started from a file" in (await made.tuner.reload()).refused


def test_every_live_field_is_one():
    assert set(UmbpSpec.model_fields) >= LIVE


_SERVE = """
import asyncio, logging, sys
from pathlib import Path
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.daemon import serve
from kimi_runtime.umbp.tuning import Source
path = Path(sys.argv[1])
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
async def main():
    read = lambda: UmbpSpec.model_validate_json(path.read_bytes())
    await serve(read(), Source(path, read))
asyncio.run(main())
"""


def test_a_hangup_signal_has_the_file_read_again(tmp_path):
    file = File(pool_spec(tmp_path))
    process = start_python(_SERVE, str(file.path))
    try:
        lines = iter(process.stdout.readline, b"")
        assert any(b"is ready" in line for line in lines)
        process.send_signal(signal.SIGHUP)  # unchanged: it goes on
        file.write(evict_to=0.75)
        process.send_signal(signal.SIGHUP)
        assert any(b"in force now: evict_to" in line for line in lines)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


async def test_a_start_waits_for_its_peers_but_not_for_ever(tmp_path, caplog):
    async with peer(tmp_path, "a") as (a, _):
        known = peer(tmp_path, "b", [("a", a.url)])
        async with known as (b, _):
            await until(lambda: b.state.phase == "ready")
            assert b.state.unknown_peers == 0
    gone = [("a", "http://127.0.0.1:9")]
    async with peer(tmp_path, "c", gone, peers_within=0.2) as (c, at_c):
        assert c.state.phase == "peers"
        await until(lambda: c.state.awaited == ["a"])
        assert c.state.not_ready().endswith("is not known yet: a")
        keys = keys_of(2)  # engines are served meanwhile
        assert await at_c.store(keys, blocks_of(keys), deadline_s=SOON_S) == 2
        await until(lambda: c.state.phase == "ready")
        assert c.state.unknown_peers == 1
        assert "ready without knowing what a hold" in caplog.text
        assert owner_of(c, "a").blocks == {}
