"""How long simulating takes, and how much memory: coding sessions on MI355X workers, by policy.

    python benchmarks/simulator.py [--sessions 128] [--turns 40] [--workers 4] [--policy cost ...]
    python benchmarks/simulator.py --workers 0 --prefill 2 --decode 2
    python benchmarks/simulator.py --workers 128 --tensor 8 --sessions 10000 --policy cost

Prints one Markdown table. Processor seconds of the one process, since a machine that others use
would be measured otherwise; beside them what a fixed loop took before and after (a million entries
into a small dict), which tells how fast the processor was meanwhile. Steps that were fast-forwarded
count as steps. Memory is what the process grew by over the run, at most, for each session.
"""

import argparse
import resource
import time

from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.tasks import policy_of
from kimi_runtime.sim.workload import AgentMix, agents
from kimi_runtime.sim.world import World

TITLES = (
    "policy | GPUs | sessions | requests | steps | callbacks | processor s | loop ms | "
    "simulated s | KiB a session"
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=128)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--decode", type=int, default=0)
    parser.add_argument("--tensor", type=int, default=4, help="GPUs a worker")
    parser.add_argument("--block-tokens", type=int, default=256)
    parser.add_argument("--policy", nargs="+", default=["cost", "least_load"])
    args = parser.parse_args()
    cluster = ClusterSpec(
        workers=args.workers,
        prefill=args.prefill,
        decode=args.decode,
        tensor=args.tensor,
        block_tokens=args.block_tokens,
    )
    print(f"| {TITLES} |\n|{' --- |' * (TITLES.count('|') + 1)}")
    for name in args.policy:
        print(f"| {name} | {measured(cluster, name, args.sessions, args.turns)} |", flush=True)


def measured(cluster: ClusterSpec, policy: str, sessions: int, turns: int) -> str:
    """One row of the table."""
    before_kib, before_s = _peak_kib(), _loop_s()
    started_s = time.process_time()
    workload = agents(sessions, 1, AgentMix(turns=turns))
    world = World(cluster, workload, policy_of(policy, cluster), seed=1)
    run = world.run()
    took_s = time.process_time() - started_s
    loops_ms = f"{1e3 * before_s:.0f}, {1e3 * _loop_s():.0f}"
    steps = sum(worker.steps for worker in run.cluster.workers.values())
    return (
        f"{cluster.gpus} | {sessions} | {len(run.records)} | {steps} | {world.timeline.happened} | "
        f"{took_s:.1f} | {loops_ms} | {run.makespan_s:.0f} | "
        f"{(_peak_kib() - before_kib) / sessions:.0f}"
    )


def _loop_s() -> float:
    """Processor seconds of a fixed piece of work."""
    started_s, table = time.process_time(), {}
    for number in range(1_000_000):
        table[number & 1023] = number
    return time.process_time() - started_s


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
