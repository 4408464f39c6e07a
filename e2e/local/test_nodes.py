"""Several pools on one machine, as on so many nodes: workers of one find blocks of another."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kimi_operator.local.machine import free_ports
from local_stack import START_S, Stack

TWO = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {name: two}
spec:
  preset: kimi-nano/cpu
  decode: {replicas: 2}
  kvPool: {dram: 64MiB}
  router: {policy: least_load}
"""
WORKERS = {"decode-0": "umbp-0", "decode-1": "umbp-1"}
FROM_POOL = 'kimistack_worker_prompt_tokens_total{source="pool"}'


def fetched(owner: str) -> str:
    return f'kimistack_umbp_peer_blocks_total{{how="fetched",owner="{owner}"}}'


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers, each with a pool of its own."""
    home = tmp_path_factory.mktemp("home")
    made = Stack(home, free_ports("127.0.0.1", 1)[0])
    (home / "two.yaml").write_text(TWO)
    file = str(home / "two.yaml")
    up = ("up", "--detach", "--nodes", "2", "-f", file, "--port", str(made.port))
    started = made.command(*up, within_s=4 * START_S)
    try:
        assert started.returncode == 0, started.stderr
        yield made
    finally:
        made.command("down")


def ask(stack: Stack, subject: str) -> str:
    """What the model says to a long prompt."""
    text = f"Tell me about {subject} and about all that goes with it. " * 30
    answer = stack.chat([{"role": "user", "content": text}])["choices"][0]["message"]
    return str(answer)


def kill(stack: Stack, name: str) -> None:
    os.kill(stack.processes()[name]["pid"], signal.SIGKILL)


def test_a_worker_finds_what_another_node_s_worker_computed(two: Stack, tmp_path: Path):
    assert list(two.processes()) == ["umbp-0", "umbp-1", "decode-0", "decode-1", "router-0"]
    done = "kimistack_worker_steps_total"
    before = {worker: two.metric(worker, done) for worker in WORKERS}
    said = ask(two, "mountains")
    first = next(worker for worker in WORKERS if two.metric(worker, done) > before[worker])
    other = next(worker for worker in WORKERS if worker != first)
    known = f'kimistack_umbp_peer_known_blocks{{owner="{WORKERS[first]}"}}'
    two.until(lambda: two.metric(WORKERS[other], known) > 0)
    kill(two, first)  # so that the other answers
    assert ask(two, "mountains") == said
    assert two.metric(other, FROM_POOL) > 0
    assert two.metric(WORKERS[other], fetched(WORKERS[first])) > 0
    two.until(lambda: all(line["ready"] for line in two.processes().values()))


def test_a_pool_that_dies_under_load_changes_no_answer(two: Stack):
    subjects = [f"river {n}" for n in range(8)]
    with ThreadPoolExecutor(4) as clients:
        before = list(clients.map(lambda one: ask(two, one), subjects))
        again = [clients.submit(ask, two, one) for one in [*subjects, *subjects]]
        kill(two, "umbp-0")
        answers = [one.result(timeout=3 * START_S) for one in again]
    assert answers == [*before, *before]
    two.until(lambda: all(line["ready"] for line in two.processes().values()))
    assert ask(two, subjects[0]) == before[0]
    assert two.processes()["umbp-0"]["restarts"] == 1


def test_a_pool_that_is_drained_leaves_its_blocks_with_the_other(two: Stack):
    done = "kimistack_worker_steps_total"
    before = {worker: two.metric(worker, done) for worker in WORKERS}
    said = ask(two, "islands")
    first = next(worker for worker in WORKERS if two.metric(worker, done) > before[worker])
    pool, other = WORKERS[first], next(worker for worker in WORKERS if worker != first)
    known = f'kimistack_umbp_peer_known_blocks{{owner="{pool}"}}'
    two.until(lambda: two.metric(WORKERS[other], known) > 0)
    spec = two.home / "two" / "specs" / f"{pool}.json"
    drained = two.command("umbp", "drain", "--spec", str(spec), "--within", "30s", "-o", "json")
    assert drained.returncode == 0, drained.stderr
    fates = json.loads(drained.stdout)["blocks"]
    assert fates["moved"] > 0
    assert (fates["refused"], fates["late"]) == (0, 0)
    taken = 'kimistack_umbp_peer_taken_blocks_total{how="taken",purpose="drain"}'
    assert two.metric(WORKERS[other], taken) == fates["moved"]
    kill(two, pool)
    kill(two, first)
    assert ask(two, "islands") == said
    assert two.metric(other, FROM_POOL) > 0
