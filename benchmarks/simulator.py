"""How long simulating takes: coding sessions on MI355X workers, by policy.

    python benchmarks/simulator.py [--sessions 128] [--turns 40] [--workers 4] [--policy cost ...]

Prints one Markdown table. Processor seconds of the one process, since a machine that others use
would be measured otherwise. Steps that were fast-forwarded count as steps.
"""

import argparse
import time

from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.tasks import policy_of
from kimi_runtime.sim.workload import AgentMix, agents
from kimi_runtime.sim.world import World


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=128)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--workers", type=int, default=4, help="of 4 GPUs each")
    parser.add_argument("--block-tokens", type=int, default=256)
    parser.add_argument("--policy", nargs="+", default=["cost", "least_load"])
    args = parser.parse_args()
    cluster = ClusterSpec(workers=args.workers, block_tokens=args.block_tokens)
    workload = agents(args.sessions, 1, AgentMix(turns=args.turns))
    print("| policy | GPUs | sessions | requests | steps | callbacks | processor s | simulated s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in args.policy:
        started_s = time.process_time()
        world = World(cluster, workload, policy_of(name, cluster), seed=1)
        run = world.run()
        took_s = time.process_time() - started_s
        steps = sum(worker.steps for worker in run.cluster.workers.values())
        print(
            f"| {name} | {cluster.gpus} | {args.sessions} | {len(run.records)} | {steps} "
            f"| {world.timeline.happened} | {took_s:.1f} | {run.makespan_s:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
