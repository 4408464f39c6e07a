"""Step times of the engine's runner on this machine: prefill, decode by batch and context.

    python benchmarks/engine.py [--threads 1] [--seconds 2] [--config config.json] [--operators]

Prints one Markdown table. Each line repeats one step until `--seconds` have passed. Wall time is
what a client sees; processor time, over all threads, is steadier on a machine that others use too.
With `--operators` it prints instead, for a prompt and for a decode of 32, where a step's processor
time goes and how fast its products are, beside what one large product reaches.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

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
DECODES = ((1, 128), (1, 2048), (8, 512), (32, 128), (32, 512), (32, 2048), (64, 512))
PROFILED = (f"prefill {STEP_TOKENS} tokens after 0", "decode 32 x 1 token after 128")
PROFILED_STEPS = 20
PEAK_SIDE = 2048
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


def stepping(runner: TorchRunner, case: Case) -> Callable[[], object]:
    """What computes the case's step once."""
    samplers = {
        row.request: RequestSampler(case.sampling, (1,), runner.spec.vocab_size, random_seed=1)
        for row in case.plan.rows
    }
    return lambda: runner.run(case.plan, samplers)


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


def floating_operations(event: Any) -> int:
    """Of one call of a product, by its operands' shapes; 0 for all else."""
    left: list[int]
    right: list[int]
    left, right = (*event.input_shapes, [], [])[:2]
    match event.key.split("::")[-1]:
        case "_linear_pointwise":  # [M, K], [N, K]
            return 2 * left[0] * left[1] * right[0]
        case "mm":  # [M, K], [K, N]
            return 2 * left[0] * left[1] * right[1]
        case "bmm":  # [B, M, K], [B, K, N]
            return 2 * left[0] * left[1] * left[2] * right[2]
        case "_scaled_dot_product_flash_attention_for_cpu":  # [G, 1, R, D], [G, 1, n, D], twice
            return 4 * left[0] * left[2] * left[3] * right[2]
    return 0


def print_peaks() -> None:
    """What the machine gives one large product and one large copy."""
    for dtype in (torch.bfloat16, torch.float32):
        square = torch.randn(PEAK_SIDE, PEAK_SIDE).to(dtype)
        _, product_s, _ = measure(functools.partial(torch.mm, square, square), 1.0)
        rate = 2 * PEAK_SIDE**3 / product_s / 1e9
        print(
            f"a {str(dtype).removeprefix('torch.')} product of side {PEAK_SIDE}: {rate:.0f} GFLOP/s"
        )
    source = torch.zeros(2**24)
    target = torch.empty_like(source)
    _, copy_s, _ = measure(lambda: target.copy_(source), 1.0)
    print(f"a copy of 64 MiB: {2 * source.nbytes / copy_s / 1e9:.0f} GB/s read and written\n")


def print_operators(case: Case, step: Callable[[], object]) -> None:
    """A table of the operators that take most of a step."""
    _, processor, _ = measure(step, 1.0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(PROFILED_STEPS):
            step()
    totals: dict[str, list[float]] = {}
    for event in recorded.key_averages(group_by_input_shape=True):
        total = totals.setdefault(event.key.split("::")[-1], [0.0, 0.0, 0.0])
        total[0] += event.count / PROFILED_STEPS
        total[1] += event.self_cpu_time_total / PROFILED_STEPS / 1e3
        total[2] += floating_operations(event) * event.count / PROFILED_STEPS / 1e9
    print(f"{case.name}: {processor * 1e3:.1f} ms of processor time; with the profiler:\n")
    print("| operator | calls | ms | GFLOP | GFLOP/s |")
    print("|---|---|---|---|---|")
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])
    rest = [sum(column) for column in zip(*(total for _, total in ranked[10:]), strict=True)]
    for name, (calls, spent_ms, work) in [*ranked[:10], ("all others", rest)]:
        rate = f"{work:.3f} | {work / spent_ms * 1e3:.0f}" if work else "| "
        print(f"| {name.lstrip('_')} | {calls:.0f} | {spent_ms:.2f} | {rate} |")
    calls, spent_ms, work = (sum(column) for column in zip(*totals.values(), strict=True))
    print(f"| together | {calls:.0f} | {spent_ms:.2f} | {work:.3f} | |\n")


def main() -> None:
    """Build the model, run every case, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--operators", action="store_true")
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
    if options.operators:
        print_peaks()
        for case in (one for one in todo if one.name in PROFILED):
            print_operators(case, stepping(runner, case))
        return
    print("| step | wall ms | processor ms | tokens/s | per processor s | steps |")
    print("|---|---|---|---|---|---|")
    for case in todo:
        wall, processor, count = measure(stepping(runner, case), options.seconds)
        tokens = case.plan.tokens
        print(
            f"| {case.name} | {wall * 1e3:.2f} | {processor * 1e3:.2f} | {tokens / wall:.0f} "
            f"| {tokens / processor:.0f} | {count} |"
        )


if __name__ == "__main__":
    main()
