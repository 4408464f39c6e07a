#!/usr/bin/env python
"""Train kimi-nano from a fixed seed; the same command goes on where a killed run stopped.

    python scripts/train_nano.py run --folder DIR
    python scripts/train_nano.py export --folder DIR --to MODEL_FOLDER

`run` replaces DIR/state.pt about once a minute and appends to DIR/log.jsonl; it ends after the last
step of the schedule. `export` writes config.json and model.safetensors as the engine reads them,
from whatever state is there. GLIBC_TUNABLES=glibc.malloc.hugetlb=1 puts the C library's memory on
huge pages, which saves a third of a step.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path

# waiting threads must not spin: on a busy machine the processor is wanted elsewhere
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.spec.model import KIMI_NANO
from kimi_runtime.training.curriculum import STAGES, Curriculum
from kimi_runtime.training.export import write_model
from kimi_runtime.training.loop import Schedule, StepReport, Training

SEED = 20
STEPS = 4000
BATCH_TOKENS = 4096
MICRO_TOKENS = 1024  # what of one layer fits a core's cache
STATE, LOG = "state.pt", "log.jsonl"


def run(args: argparse.Namespace) -> int:
    """Train to the end of the schedule."""
    _keep_freed_memory()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    curriculum = Curriculum(
        open_vocabulary(),
        seed=SEED,
        steps=args.steps,
        batch_tokens=BATCH_TOKENS,
        micro_tokens=MICRO_TOKENS,
    )
    training = _training(args.steps, structured=not args.unstructured)
    total = training.schedule.steps
    state = args.folder / STATE
    if state.exists():
        training.load(state)
        print(f"going on from step {training.step} of {total}", flush=True)
    saved_s = time.monotonic()
    with (args.folder / LOG).open("a") as file:
        log = _Log(training.tokens)
        while training.step < total:
            log.add(training.advance(curriculum.batch(training.step)))
            done = training.step == total
            if done or training.step % args.report_every == 0:
                file.write(json.dumps(log.line()) + "\n")
                file.flush()
            if done or time.monotonic() - saved_s > args.save_every_s:
                training.save(state)
                saved_s = time.monotonic()
    return 0


def export(args: argparse.Namespace) -> int:
    """Write the model folder."""
    training = _training(args.steps)
    training.load(args.folder / STATE)
    size = write_model(KIMI_NANO, training.masters, args.to)
    print(f"step {training.step}, {training.tokens} tokens: {size} bytes in {args.to}")
    return 0


def _training(steps: int, *, structured: bool = True) -> Training:
    longest = max(stage.longest for stage in STAGES)
    return Training(
        KIMI_NANO,
        Schedule(steps=steps),
        open_vocabulary(),
        seed=SEED,
        positions=longest,
        structured=structured,
    )


def _keep_freed_memory() -> None:
    """Have the C library keep what is freed: else a third of a step is page faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_max = -1, -2, -4
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(top_pad, 2**28)


class _Log:
    """Means over the steps since the last line, and speed."""

    def __init__(self, tokens: int) -> None:
        self._reports: list[StepReport] = []
        self._begin(tokens)

    def add(self, report: StepReport) -> None:
        """One more step."""
        self._reports.append(report)

    def line(self) -> dict[str, float]:
        """The line, and a fresh start."""
        reports, last = self._reports, self._reports[-1]
        tokens = last.tokens - self._tokens
        line = {
            "step": last.step + 1,
            "tokens": last.tokens,
            "loss": round(sum(r.loss for r in reports) / len(reports), 4),
            "right": round(sum(r.right for r in reports) / len(reports), 4),
            "busiest": round(sum(r.busiest for r in reports) / len(reports), 2),
            "tokens_per_s": round(tokens / (time.monotonic() - self._wall_s)),
            "tokens_per_cpu_s": round(tokens / (time.process_time() - self._cpu_s)),
        }
        self._begin(last.tokens)
        return line

    def _begin(self, tokens: int) -> None:
        self._reports.clear()
        self._tokens = tokens
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="train, or go on training")
    one.set_defaults(do=run)
    one.add_argument("--threads", type=int, default=1)
    one.add_argument("--report-every", type=int, default=20, help="steps between log lines")
    one.add_argument("--save-every-s", type=float, default=60.0)
    one.add_argument("--unstructured", action="store_true", help="start from random matrices alone")
    other = commands.add_parser("export", help="write the weights as a model folder")
    other.set_defaults(do=export)
    other.add_argument("--to", type=Path, required=True)
    for command in (one, other):
        command.add_argument("--folder", type=Path, required=True, help="of state.pt and log.jsonl")
        command.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    result: int = args.do(args)
    return result


if __name__ == "__main__":
    sys.exit(main())
