"""What the KV pool does for coding agents, on this machine: the same sessions with it and without.

Starts `kimistack up` with two aggregated workers whose KV memory holds a part of the working set,
replays sessions (lengths divided by 64) against it, and prints a line for each arm:

  off        no pool: what KV memory drops is computed again
  on         a pool in host memory
  restarted  a pool with an SSD tier whose daemon is killed, its memory removed, half-way

Greedy answers must be equal in all arms. Exit status 1 if one differs or a request failed.

    python benchmarks/pool_replay.py [--sessions 128] [--turns 8] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kimi_operator.local.machine import free_ports
from kimi_runtime.bench.replay.client import Endpoint
from kimi_runtime.bench.replay.outcome import Outcome
from kimi_runtime.bench.replay.play import play
from kimi_runtime.bench.replay.report import markdown, rows, summary
from kimi_runtime.bench.replay.texts import Scale, Texts
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.sim.workload import AgentMix, agents

SEED = 1
SOURCES = ("hbm", "pool", "computed")


@dataclass(frozen=True)
class Arm:
    """A deployment's pool."""

    name: str
    pool: str
    kill_daemon: bool = False


@dataclass
class Result:
    """What one arm brought."""

    outcomes: list[Outcome]
    tokens: dict[str, float]
    """Prompt tokens of all workers by where their KV came from."""
    ssd_recovered: float


def deployment(arm: Arm, kv_memory: str) -> str:
    """The arm's KimiDeployment, as YAML."""
    return f"""
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {{name: replay-{arm.name}}}
spec:
  preset: kimi-nano/cpu
  model: {{source: random}}  # answers end where their budget does
  decode: {{replicas: 2, limits: {{kvMemory: {kv_memory}, maxWaiting: 512}}}}
  kvPool: {arm.pool}
"""


class Stack:
    """A running deployment, by the command line."""

    def __init__(self, folder: Path) -> None:
        self._env = {**os.environ, "KIMISTACK_HOME": str(folder)}
        (self.port,) = free_ports("127.0.0.1", 1)

    def command(self, *arguments: str) -> str:
        """Run `kimistack`; its output."""
        command = (sys.executable, "-m", "kimi_operator.cli", *arguments)
        done = subprocess.run(
            command, env=self._env, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            sys.exit(f"kimistack {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def processes(self) -> dict[str, dict[str, int]]:
        """What runs, by name."""
        found = json.loads(self.command("status", "--json"))
        return {line["process"]: line for report in found for line in report["processes"]}

    def metric(self, port: int, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@contextmanager
def running(arm: Arm, kv_memory: str) -> Iterator[Stack]:
    """The arm's deployment, up."""
    with tempfile.TemporaryDirectory(prefix="kimistack-replay-") as folder:
        file = Path(folder) / "deployment.yaml"
        file.write_text(deployment(arm, kv_memory).replace("SSD_FOLDER", f"{folder}/ssd"))
        stack = Stack(Path(folder) / "home")
        stack.command("up", "--detach", "-f", str(file), "--port", str(stack.port))
        try:
            yield stack
        finally:
            stack.command("down")


def replay(arm: Arm, sessions: int, turns: int, kv_memory: str) -> Result:
    """Play the sessions once."""
    mix = AgentMix(turns=turns, gap_cap_s=10.0)
    load = agents(sessions, SEED, mix)
    texts = Texts.of(open_vocabulary(), seed=SEED)
    with running(arm, kv_memory) as stack:
        done = 0

        def told(_: Outcome) -> None:
            nonlocal done
            done += 1
            if arm.kill_daemon and done == load.turns // 2:
                kill_daemon(stack, arm)
            if done % 100 == 0:
                print(f"{arm.name}: {done} of {load.turns} requests", file=sys.stderr)

        endpoint = Endpoint(f"http://127.0.0.1:{stack.port}/v1", "kimi-nano", timeout_s=300)
        outcomes = asyncio.run(
            play(load, endpoint, texts, scale=Scale(tokens=64.0), on_outcome=told)
        )
        ports = {name: line["port"] for name, line in stack.processes().items()}
        workers = [port for name, port in ports.items() if name.startswith("decode-")]
        sample = 'kimistack_worker_prompt_tokens_total{{source="{}"}}'
        tokens = {
            source: sum(stack.metric(port, sample.format(source)) for port in workers)
            for source in SOURCES
        }
        recovered = 0.0
        if arm.kill_daemon:
            recovered = stack.metric(ports["umbp-0"], "kimistack_umbp_ssd_recovered_blocks_total")
    return Result(outcomes, tokens, recovered)


def kill_daemon(stack: Stack, arm: Arm) -> None:
    """The daemon and the memory it would take over: only what is on SSD is left."""
    os.kill(stack.processes()["umbp-0"]["pid"], signal.SIGKILL)
    for arena in Path("/dev/shm").glob(f"kimistack-*-replay-{arm.name}-*/*.arena"):
        arena.unlink()


def differing(one: Sequence[Outcome], other: Sequence[Outcome]) -> int:
    """Requests whose answers are not the same."""
    return sum(a.text != b.text for a, b in zip(one, other, strict=True))


def main() -> None:
    """Run all arms and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=128)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--kv-memory", default="64MiB", help="of each worker")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arms = (
        Arm("off", "{enabled: false}"),
        Arm("on", "{dram: 1GiB}"),
        Arm("restarted", "{dram: 1GiB, ssd: {path: SSD_FOLDER, capacity: 2GiB}}", kill_daemon=True),
    )
    results = {
        arm.name: replay(arm, arguments.sessions, arguments.turns, arguments.kv_memory)
        for arm in arms
    }
    summaries = {name: summary(result.outcomes) for name, result in results.items()}
    print(markdown(summaries))
    print("| | hit ratio | computed tokens | from KV memory | from the pool |")
    print("| --- | --- | --- | --- | --- |")
    for name, result in results.items():
        all_tokens = sum(result.tokens.values())
        hbm, pool, computed = (result.tokens[source] for source in SOURCES)
        hit = 1 - computed / all_tokens
        print(f"| {name} | {hit:.1%} | {computed:.0f} | {hbm:.0f} | {pool:.0f} |")
    off, on = summaries["off"], summaries["on"]
    wrong = {
        name: differing(results["off"].outcomes, result.outcomes)
        for name, result in results.items()
        if name != "off"
    }
    print(
        f"\npool on against off: p99 TTFT {off.ttft.p99 / on.ttft.p99:.2f} times lower, throughput "
        f"{on.requests_per_s / off.requests_per_s - 1:+.1%}; differing answers {wrong}; blocks "
        f"recovered from SSD {results['restarted'].ssd_recovered:.0f}"
    )
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({name: rows(result.outcomes) for name, result in results.items()})
        )
    if any(wrong.values()) or any(one.failed for one in summaries.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
