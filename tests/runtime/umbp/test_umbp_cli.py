"""`kimistack umbp …` against a daemon that runs: found as a person finds it."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import aclosing

import pytest
from typer.testing import CliRunner

from kimi_runtime.cli import app
from kimi_runtime.settings import pool_specs
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.control.tables import inspected, table
from kimi_runtime.umbp.funnel import Lost, Where
from kimi_runtime.umbp.proto import control_pb2 as wire
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
    """A command's exit status and what it printed, run here."""
    environment = {"KIMISTACK_HOME": str(folder), "COLUMNS": "200"}
    done = CliRunner().invoke(app, ["umbp", *map(str, words)], env=environment)
    return done.exit_code, done.stdout, done.stderr


async def asked(folder, *words):
    """The same beside what this test's loop does."""
    return await asyncio.to_thread(umbp, folder, *words)


def test_the_command_is_one_of_the_runtime_s_processes(home):
    folder, _ = home
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KIMISTACK_HOME": str(folder),
    }
    command = [sys.executable, "-m", "kimi_runtime.cli", "umbp", "inspect", "-o", "json"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120, check=True)
    assert json.loads(done.stdout)["name"] == "pool"


@pytest.mark.parametrize("output", ["text", "json"])
def test_an_answer_that_cannot_be_written_is_one_line_and_a_status(home, output):
    folder, _ = home
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "KIMISTACK_HOME": str(folder),
    }
    command = [sys.executable, "-m", "kimi_runtime.cli", "umbp", "inspect", "-o", output]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=120
        )
    assert (done.returncode, done.stderr) == (
        1,
        "kimistack: the answer can't be written to standard output: No space left on device\n",
    )


def test_each_way_a_lookup_ends_is_said_in_words():
    funnel = wire.Funnel(
        looked_up=10,
        hits=[wire.Count(name=str(where), value=1) for where in Where],
        lost=[wire.Count(name=str(why), value=1) for why in Lost],
    )
    text = inspected(wire.InspectAnswer(name="pool", funnel=funnel))
    assert "found      in memory" in text
    assert "missed     nobody is known to have had them (not_computed)" in text
    assert all(f"({why})" in text for why in Lost)
    assert text.count("10.0%") == len(Where) + len(Lost)


async def test_a_person_looks_at_the_pool_checks_it_and_makes_room(home):
    folder, spec = home
    keys = keys_of(6)
    async with aclosing(await open_pool(spec.socket, CALL_KEY)) as client:
        assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S, tenant="acme") == 6
        assert (await client.load(keys_of(8), targets(8), deadline_s=SOON_S)).blocks == 6
        await client.held(keys)

    status, text, _ = await asked(folder, "inspect")
    assert status == 0
    for word in ("pool: ready", "memory", "acme", "not_computed", keys[0].hex()[:12]):
        assert word in text
    status, text, _ = await asked(folder, "inspect", "--hottest", 1, "-o", "json")
    told = json.loads(text)
    assert told["funnel"] == {
        "looked_up": 8,
        "hits": {"memory": 6},
        "lost": {"not_computed": 2},
        "open": 0,
    }
    (hottest,) = told["hottest"]
    assert (hottest["key"] in {key.hex() for key in keys}, hottest["uses"]) == (True, 2)
    assert (await asked(folder, "verify", "--rate", "1GiB/s"))[1].startswith(
        "memory: 6 of 6 blocks checked"
    )
    status, text, _ = await asked(folder, "evict", "--key", keys[5].hex(), "-o", "json")
    assert (status, json.loads(text)["blocks"]) == (0, 1)
    assert (
        json.loads((await asked(folder, "evict", "--tenant", "acme", "-o", "json"))[1])["blocks"]
        == 5
    )


async def test_damage_is_named_dropped_and_an_exit_status(home):
    folder, spec = home
    keys = keys_of(3, 500)
    async with aclosing(await open_pool(spec.socket, CALL_KEY)) as client:
        await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
        arena = client._daemon.arena
        found = arena.directory.find(keys[1])
        next(arena.parts(found.block.extents, found.block.size))[9] ^= 4
        status, text, _ = await asked(folder, "verify", "--tier", "memory")
        assert (status, f"damaged, dropped: {keys[1].hex()}" in text) == (1, True)
        assert [await client.held([key]) for key in keys] == [1, 0, 1]
    assert (await asked(folder, "verify"))[0] == 0


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("inspect", "--hottest", "99999999999"), "1000"),
        (("verify", "--rate", "99999999999GiB/s"), "more than any daemon"),
        (("evict", "--until-free", "99999999999GiB"), "more than any daemon"),
        (("evict", "--key", "aa84a53c90a2"), "32 hexadecimal digits"),
        (("evict", "--key", "nonsense"), "'nonsense' is no key"),
        (("drain", "--within", "99999999999999h"), "more than any daemon"),
    ],
)
def test_a_number_or_key_that_no_daemon_can_be_asked_for_is_refused_before_it(home, words, says):
    status, _, error = umbp(home[0], *words)
    assert (status, says in " ".join(error.split()), "Traceback" in error) == (2, True, False)


def test_more_than_the_memory_has_is_not_made_free(home):
    status, _, error = umbp(home[0], "evict", "--until-free", "1TiB")
    assert (status, "1TiB can't become free" in error) == (1, True)
    assert umbp(home[0], "evict", "--until-free", "0")[0] == 0


def test_names_do_not_steer_the_terminal_that_shows_them():
    assert table(("TENANT", "USED"), [("ev\x1b[31mil\n", 1), ("Zoë 東京", 20)]) == [
        r"TENANT          USED",
        r"ev\x1b[31mil\n     1",
        r"Zoë 東京            20",
    ]


def test_a_spec_that_is_none_is_refused_with_the_place_of_what_is_wrong(home, tmp_path):
    folder, spec = home
    path = tmp_path / "umbp.json"
    path.write_text(spec.model_dump_json(exclude_none=True).replace("dram_bytes", "dram_byte"))
    status, _, error = umbp(folder, "inspect", "--spec", path)
    assert (status, "dram_bytes: Field required" in error, "dram_byte:" in error) == (2, True, True)


def test_a_drain_says_what_is_lost_with_a_node_that_has_no_peers(home):
    folder, _ = home
    status, text, _ = umbp(folder, "drain", "--within", "2s")
    assert (status, "kept: 0 blocks" in text, "lost with this node: 2 blocks" in text) == (
        *(0, True),
        True,
    )
    assert umbp(folder, "inspect")[1].startswith("pool: drained")


def test_the_newest_pool_of_kimistack_up_comes_first(tmp_path):
    for name, at_s in (("old", 100), ("new", 200)):
        specs = tmp_path / name / "specs"
        specs.mkdir(parents=True)
        (specs / "umbp-0.json").write_text("{}")
        os.utime(specs / "umbp-0.json", (at_s, at_s))
        (specs / "router-0.json").write_text("{}")
    found = pool_specs({"KIMISTACK_HOME": str(tmp_path)})
    assert [path.parent.parent.name for path in found] == ["new", "old"]
