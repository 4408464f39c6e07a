"""`kimistack umbp …` against a daemon that runs: as a process, found as a person finds it."""

import json
import os
import subprocess
import sys
from contextlib import aclosing

import pytest

from kimi_runtime.settings import pool_specs
from kimi_runtime.umbp.client import open_pool
from pool_daemon import CALL_KEY, DaemonProcess, blocks_of, keys_of, pool_spec, targets
from pool_peers import SOON_S


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A state folder as `kimistack up` leaves it, and its daemon."""
    folder = tmp_path_factory.mktemp("home")
    specs = folder / "kimi-nano" / "specs"
    specs.mkdir(parents=True)
    spec = pool_spec(specs.parent)
    (specs / "umbp-0.json").write_text(spec.model_dump_json(exclude_none=True))
    daemon = DaemonProcess(spec)
    yield folder, spec
    daemon.kill()


def umbp(folder, *words):
    """A command's exit status and what it printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KIMISTACK_HOME": str(folder),
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "kimi_runtime.cli", "umbp", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return done.returncode, done.stdout, done.stderr


async def test_a_person_looks_at_the_pool_checks_it_and_makes_room(home):
    folder, spec = home
    keys = keys_of(6)
    async with aclosing(await open_pool(spec.socket, CALL_KEY)) as client:
        assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S, tenant="acme") == 6
        assert (await client.load(keys_of(8), targets(8), deadline_s=SOON_S)).blocks == 6
        await client.held(keys)

    status, text, _ = umbp(folder, "inspect")
    assert status == 0
    for word in ("pool: ready", "memory", "acme", "not_computed", keys[0].hex()[:12]):
        assert word in text
    status, text, _ = umbp(folder, "inspect", "--hottest", 1, "-o", "json")
    told = json.loads(text)
    assert told["funnel"] == {
        "looked_up": 8,
        "hits": {"memory": 6},
        "lost": {"not_computed": 2},
        "open": 0,
    }
    (hottest,) = told["hottest"]
    assert (hottest["key"] in {key.hex() for key in keys}, hottest["uses"]) == (True, 2)
    assert umbp(folder, "verify", "--rate", "1GiB/s")[1].startswith("memory: 6 of 6 blocks checked")
    status, text, _ = umbp(folder, "evict", "--key", keys[5].hex(), "-o", "json")
    assert (status, json.loads(text)["blocks"]) == (0, 1)
    assert json.loads(umbp(folder, "evict", "--tenant", "acme", "-o", "json")[1])["blocks"] == 5


def test_what_cannot_be_done_is_one_line_and_a_status(home, tmp_path):
    folder, spec = home
    status, _, error = umbp(tmp_path, "inspect")
    assert (status, "no pool of `kimistack up`" in error) == (1, True)
    other = tmp_path / "key"
    other.write_text("another key of thirty-two bytes.")
    other.chmod(0o600)
    status, _, error = umbp(folder, "inspect", "--call-key", other)
    assert (status, "this deployment's call key" in error, len(error.splitlines())) == (1, True, 1)
    nobody = ("--socket", tmp_path / "none.sock", "--call-key", spec.call_key)
    status, _, error = umbp(folder, "inspect", *nobody)
    assert (status, "none.sock" in error, len(error.splitlines())) == (1, True, 1)
    assert umbp(folder, "evict")[0] == 2
    assert umbp(folder, "evict", "--all", "--tenant", "a")[0] == 2
    assert umbp(folder, "evict", "--until-free", "much")[0] == 2
    assert umbp(folder)[0] == 2
    status, text, _ = umbp(folder, "reload")
    assert (status, "not started from a file" in text) == (1, True)


def test_the_newest_pool_of_kimistack_up_comes_first(tmp_path):
    for name, at_s in (("old", 100), ("new", 200)):
        specs = tmp_path / name / "specs"
        specs.mkdir(parents=True)
        (specs / "umbp-0.json").write_text("{}")
        os.utime(specs / "umbp-0.json", (at_s, at_s))
        (specs / "router-0.json").write_text("{}")
    found = pool_specs({"KIMISTACK_HOME": str(tmp_path)})
    assert [path.parent.parent.name for path in found] == ["new", "old"]
