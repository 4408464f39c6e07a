"""Processes that die or freeze, and transfers that fail, while 16 clients hold conversations.

Every answer is compared with that of a run without faults: its text, why it ended and how many
tokens it has; of an answer that was cut, its text is a front of the expected one. Decoding is
greedy and a row's logits are the same in any batch, so whoever computes a turn says the same. Only
a new router knows histories by their text alone (docs/decisions/0005): behind one the expected
answers are those of another new router, asked the same from the same turn on, without a fault.

A table of what each fault cost is printed at the end; docs/faults.md has it.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fault_table import Answer, Row, Turn, answers_of, kind_of, table, wrong_of
from faulty_stack import FaultyStack
from kimi_operator.local.machine import free_ports
from kimi_runtime import clock
from kimi_runtime.bench.replay.client import Endpoint
from kimi_runtime.bench.replay.outcome import Outcome
from kimi_runtime.bench.replay.play import Retries, play
from kimi_runtime.bench.replay.texts import Texts
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.sim import sessions as load
from kimi_runtime.transfer.chaos import Fault

MANIFEST = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {{name: faults}}
spec:
  preset: kimi-nano/cpu
  model: {{source: random}}
  prefill: {{replicas: 1, limits: {{kvMemory: 16MiB}}}}
  decode: {{replicas: 2, limits: {{kvMemory: 16MiB}}}}
  transfer: {{backend: tcp}}
  kvPool: {{dram: 24MiB, ssd: {{path: {ssd}, capacity: 256MiB}}}}
"""
TWO_NODES = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {name: two}
spec:
  preset: kimi-nano/cpu
  model: {source: random}
  decode: {replicas: 2, limits: {kvMemory: 16MiB}}
  kvPool: {dram: 64MiB}
  router: {policy: least_load}
"""
CLIENTS, TURNS, OUTPUT_TOKENS = 16, 5, 16
BEFORE = 3
"""Turns of each session while the fault happens; the others follow once the process is back."""
FAULT_AFTER = CLIENTS
"""Answered requests, of 48."""
FROZEN_S = 5.0
LONGEST_WAIT_S = 10.0
"""That a fault may cost, on top of what the same machine needs without one."""
LEASES_S = 45.0
"""Hand-offs whose reader is gone are kept for 30 s."""
TEXTS = Texts.of(open_vocabulary(), seed=1)
RETRIES = Retries(most=8, longest_pause_s=4.0)
CHAOS = {
    "seed": 7,
    "delay": 0.2,
    "delay_time": "50ms",
    "duplicate": 0.1,
    "corrupt": 0.15,
    "rehome": 0.05,
    "drop": 0.01,
    "stall": 0.01,
}
WORKERS = ("prefill-0", "decode-0", "decode-1")


def conversations(turns: int = TURNS) -> load.Workload:
    """Every client's: a system prompt that all have, a first question, and what tools said."""
    made = []
    for number in range(CLIENTS):
        lengths = (70, *(40 + 8 * ((number + turn) % 4) for turn in range(1, turns)))
        asked = tuple(load.Turn(tokens, OUTPUT_TOKENS, pause_s=0.2) for tokens in lengths)
        name, text = f"client-{number}", 1000 * (number + 1)
        made.append(load.Session(name, text, asked, 0.25 * number, prefix=1, prefix_tokens=130))
    return load.Workload(f"{CLIENTS} conversations", tuple(made))


class Trial:
    """The stack, what it says without faults, and a row for each fault."""

    def __init__(self, stack: FaultyStack) -> None:
        self.stack = stack
        self.expected: dict[Turn, Answer] = {}
        self.rows: list[Row] = []

    async def play(
        self,
        turns: int = TURNS,
        *,
        answered: dict[str, list[str]] | None = None,
        told: Callable[[Outcome], None] | None = None,
    ) -> list[Outcome]:
        endpoint = Endpoint(self.stack.url, "kimi-nano", timeout_s=60.0)
        return await play(
            *(conversations(turns), endpoint, TEXTS),
            on_outcome=told,
            retries=RETRIES,
            answered=answered,
        )

    async def during(self, fault: str, victim: str, happens: Callable[[], Any]) -> Row:
        """Play the first turns, let the fault happen amid them, and the others after it."""
        row, under_way, answers = Row(fault), asyncio.Event(), 0

        def told(outcome: Outcome) -> None:
            nonlocal answers
            answers += outcome.ok
            if answers >= FAULT_AFTER:
                under_way.set()

        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(self.play(BEFORE, told=told))
            await under_way.wait()
            while not (row.in_flight or first.done()):  # a prefill is over soon
                row.in_flight = await asyncio.to_thread(self.in_flight, victim)
            retried, router, began_s = self.retries(), self.router_pid, clock.now_s()
            await happens()
            row.away_s = clock.now_s() - began_s
        row.outcomes = first.result()
        row.later = await self.play(answered=said(row.outcomes))
        row.retried = self.retries() - (retried if self.router_pid == router else 0)
        await self.finish(row)
        return row

    async def finish(self, row: Row) -> None:
        """All requests are over: what is left of them, and whether every turn was answered."""
        began_s = clock.now_s()
        row.leaks = await self.stack.quiet(LEASES_S)
        row.quiet_s = clock.now_s() - began_s
        row.unanswered = CLIENTS * TURNS - len(answers_of(row.all))
        self.rows.append(row)

    def in_flight(self, name: str) -> float:
        samples = self.stack.metrics("router-0")
        if name in self.stack.workers:
            return samples.total("kimistack_router_worker_in_flight", name)
        return samples.total("kimistack_router_in_flight")

    @property
    def usual_wait_s(self) -> float:
        """The longest for which nothing came of a request in the runs without a fault."""
        return max(row.worst_wait[0] for row in self.rows[:2])

    @property
    def router_pid(self) -> int | None:
        return self.stack.processes()["router-0"].pid

    def retries(self) -> float:
        """Of the router of now."""
        return self.stack.metrics("router-0").total("kimistack_router_retries_total")


def said(outcomes: list[Outcome]) -> dict[str, list[str]]:
    """The answers that each session has had, in order."""
    found: dict[str, list[str]] = {}
    for one in outcomes:
        if one.ok:
            found.setdefault(one.session, []).append(one.text)
    return found


def check(row: Row, trial: Trial) -> None:
    """What must hold whatever happened."""
    assert row.wrong == []
    assert row.unanswered == 0
    assert row.leaks == {}
    assert row.worst_wait[0] <= LONGEST_WAIT_S + trial.usual_wait_s
    silent = [one for one in row.all if not one.ok and "without a word" in kind_of(one)]
    assert silent == []


@pytest.fixture(scope="module")
def trial(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Trial]:
    home = tmp_path_factory.mktemp("home")
    manifest = MANIFEST.format(ssd=tmp_path_factory.mktemp("ssd"))
    stack = FaultyStack(home, free_ports("127.0.0.1", 1)[0], "faults", manifest)
    try:
        made = Trial(stack)
        for fault in ("none: the expected answers", "none, again"):
            row = Row(fault, asyncio.run(made.play()))
            made.expected = made.expected or answers_of(row.all)
            row.wrong = wrong_of(row.all, made.expected)
            made.rows.append(row)
        yield made
    finally:
        stack.down()
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print("\n\n" + table(made.rows))


def test_without_a_fault_every_turn_is_answered_and_twice_the_same(trial: Trial):
    for row in trial.rows[:2]:
        assert row.errors == {}
        assert row.wrong == []
    assert len(trial.expected) == CLIENTS * TURNS
    workers = [trial.stack.metrics(name) for name in WORKERS]
    assert sum(one.total("kimistack_worker_prompt_tokens_total", "pool") for one in workers) > 0
    pool = trial.stack.metrics("umbp-0")
    assert pool.total("kimistack_umbp_evicted_blocks_total") > 0
    assert pool.total("kimistack_umbp_ssd_put_blocks_total") > 0


@pytest.mark.parametrize("victim", [*WORKERS, "umbp-0"])
async def test_a_killed_process_costs_time_and_nothing_else(trial: Trial, victim: str):
    row = await trial.during(f"kill -9 {victim}", victim, lambda: trial.stack.kill(victim))
    assert row.in_flight > 0
    row.wrong = wrong_of(row.all, trial.expected)
    check(row, trial)


async def test_a_killed_router_is_a_new_one_that_reads_the_histories(trial: Trial):
    killed_s = 0.0

    async def kill() -> None:
        nonlocal killed_s
        killed_s = clock.now_s()
        await trial.stack.kill("router-0")

    began_s = clock.now_s()
    row = await trial.during("kill -9 router-0", "router-0", kill)
    old = [one for one in row.outcomes if one.asked_s <= killed_s - began_s]
    new = [one for one in row.all if one not in old]
    await trial.stack.kill("router-0")
    again = await trial.play(answered=said(old))
    row.wrong = wrong_of(old, trial.expected) + wrong_of(new, answers_of(again))
    await trial.stack.kill("router-0")  # it must not know the turns of this test by other ids
    check(row, trial)


@pytest.mark.parametrize("victim", [*WORKERS, "umbp-0", "router-0"])
async def test_a_frozen_process_costs_time_and_nothing_else(trial: Trial, victim: str):
    async def freeze() -> None:
        trial.stack.signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            trial.stack.signal(victim, signal.SIGCONT)

    row = await trial.during(f"SIGSTOP {victim}, {FROZEN_S:g} s", victim, freeze)
    row.wrong = wrong_of(row.all, trial.expected)
    check(row, trial)


async def test_every_corruption_of_a_hand_off_is_found(trial: Trial):
    injected, found = await failing(
        *(trial, "failing hand-offs", WORKERS),
        injected=("kimistack_worker_transfer_faults_total", "fault"),
        found=("kimistack_worker_hand_off_failures_total", "reason"),
    )
    assert set(injected) == set(Fault)  # each at least once
    assert found == injected["corrupt"]


async def test_every_corruption_between_pools_is_found(trial: Trial, tmp_path: Path):
    port = free_ports("127.0.0.1", 1)[0]
    two = Trial(FaultyStack(tmp_path, port, "two", TWO_NODES, "--nodes", "2"))
    two.expected, two.rows = trial.expected, trial.rows  # whoever computes it, wherever its KV was
    try:
        injected, found = await failing(
            *(two, "failing reads between two nodes' pools", two.stack.pools),
            injected=("kimistack_umbp_peer_transfer_faults_total", "fault"),
            found=("kimistack_umbp_peer_blocks_total", "how"),
        )
        fetched = [two.stack.metrics(name) for name in two.stack.pools]
        assert sum(one.total("kimistack_umbp_peer_blocks_total", "fetched") for one in fetched) > 0
        assert found == injected["corrupt"] > 0
    finally:
        two.stack.down()


async def failing(
    trial: Trial,
    fault: str,
    readers: Sequence[str],
    *,
    injected: tuple[str, str],
    found: tuple[str, str],
) -> tuple[Counter[str], float]:
    """Play while the transfers of `readers` fail: what was injected, what was found corrupt.

    `injected` and `found` are metrics with their labels.
    """
    for name in readers:
        trial.stack.rewrite(name, lambda spec: spec.update(chaos=CHAOS))
    await trial.stack.kill(*readers)
    row = Row(fault, await trial.play())
    await trial.finish(row)
    row.wrong = wrong_of(row.all, trial.expected)
    metrics = [trial.stack.metrics(name) for name in readers]
    faults = sum((one.by(*injected) for one in metrics), Counter[str]())
    corrupt = sum(one.by(*found)["corrupt"] for one in metrics)
    told = ", ".join(f"{count:g} {kind}" for kind, count in sorted(faults.items()))
    row.fault += f" ({told}; found corrupt: {corrupt:g})"
    check(row, trial)
    return faults, corrupt
