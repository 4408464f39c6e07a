"""Step times of the engine's runner on this machine: prefill, decode by batch and context.

    python benchmarks/engine.py [--threads 1] [--seconds 2] [--config config.json]

Prints one Markdown table. Each line repeats one step until `--seconds` have passed. Wall time is
what a client sees; processor time, over all threads, is steadier on a machine that others use too.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kimi_runtime.clock import now_s
from kimi_runtime.engine.plan import Row, StepPlan
from kimi_runtime.engine.runner import TorchRunner, kv_block_bytes
from kimi_runtime.engine.sampler import RequestSampler
from kimi_runtime.models.weights import open_weights
from kimi_runtime.spec.request import Sampling
from kimi_runtime.spec.worker import RandomWeights
from kimi_runtime.transfer.memory import private_memory

BLOCK_TOKENS = 64
STEP_TOKENS = 512
PREFILLS = (0, 2048, 8192)
DECODES = ((1, 128), (1, 2048), (8, 512), (32, 512), (32, 2048), (64, 512))
GREEDY = Sampling(temperature=0.0, max_tokens=1)
SAMPLED = Sampling(temperature=1.0, top_p=0.95, seed=1, max_tokens=1)


@dataclass(frozen=True)
class Case:
    """One step, repeated."""

    name: str
    plan: StepPlan
    sampling: Sampling = GREEDY


def cases() -> list[Case]:
    """Every line of the table."""
    ids = tuple((7919 * i) % 2048 for i in range(STEP_TOKENS))
    result = []
    for start in PREFILLS:
        blocks = tuple(range(-(-(start + STEP_TOKENS) // BLOCK_TOKENS)))
        row = Row(0, start, ids, blocks, sample=True)
        result.append(Case(f"prefill {STEP_TOKENS} tokens after {start}", StepPlan((row,))))
    for batch, context in DECODES:
        per_row = context // BLOCK_TOKENS + 1
        rows = tuple(
            Row(i, context, (ids[i],), tuple(range(i * per_row, (i + 1) * per_row)), sample=True)
            for i in range(batch)
        )
        result.append(Case(f"decode {batch} x 1 token after {context}", StepPlan(rows)))
        if (batch, context) == (32, 512):
            name = f"{result[-1].name}, top-p 0.95"
            result.append(Case(name, StepPlan(rows), SAMPLED))
    return result


def measure(step: Callable[[], object], seconds: float) -> tuple[float, float, int]:
    """Median wall and processor time of a step in seconds, and how many were timed."""
    step()
    step()
    wall: list[float] = []
    processor: list[float] = []
    until = now_s() + seconds
    while now_s() < until or len(wall) < 3:
        start, used = now_s(), time.process_time()
        step()
        wall.append(now_s() - start)
        processor.append(time.process_time() - used)
    return statistics.median(wall), statistics.median(processor), len(wall)


def main() -> None:
    """Build the model, run every case, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--config", type=Path, default=None)
    options = parser.parse_args()
    spec, weights = open_weights(RandomWeights(config=options.config))
    todo = cases()
    blocks = 1 + max(max(row.blocks) for case in todo for row in case.plan.rows)
    start = now_s()
    runner = TorchRunner(
        spec,
        weights,
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        memory=private_memory(blocks * kv_block_bytes(spec, BLOCK_TOKENS)),
        threads=options.threads,
    )
    print(
        f"{spec.name}, {options.threads} thread(s); self-test and start {now_s() - start:.2f} s\n"
    )
    print("| step | wall ms | processor ms | tokens/s | per processor s | steps |")
    print("|---|---|---|---|---|---|")
    for case in todo:
        samplers = {
            row.request: RequestSampler(case.sampling, (1,), spec.vocab_size, random_seed=1)
            for row in case.plan.rows
        }
        wall, processor, count = measure(
            lambda case=case, samplers=samplers: runner.run(case.plan, samplers), options.seconds
        )
        tokens = case.plan.tokens
        print(
            f"| {case.name} | {wall * 1e3:.2f} | {processor * 1e3:.2f} | {tokens / wall:.0f} "
            f"| {tokens / processor:.0f} | {count} |"
        )


if __name__ == "__main__":
    main()
