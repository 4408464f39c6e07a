"""Our engine's steps against Hugging Face transformers: same weights, one run, turn by turn.

    python3.11 -m venv ENV
    ENV/bin/pip install torch==2.13.0 transformers==5.24.0     # no Triton in it
    python benchmarks/transformers_compare.py --python ENV/bin/python [--threads 1] [--rounds 5]

Both sides are processes that read the same bf16 safetensors and answer one at a time: a round asks
each for the same case, so that other load meets both; ratios are medians over the rounds' ratios.
Prefill is a whole prompt up to its first id; decode is greedy ids one by one for the whole batch,
through each side's own cache. transformers takes its own defaults (DynamicCache, `sdpa`, its choice
of experts' implementation) or what `--experts` says; `--their-dtype float32` widens its weights and
its cache, which is quicker on a processor without AMX. Tokens/s are of wall time, cpu columns of
processor time over all threads, which is steadier on a machine that others use too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

BLOCK_TOKENS = 64
STEP_TOKENS = 512
PROMPT = 512
BATCHES = (1, 8, 32)
DECODE_CONTEXTS = (128, 512, 2048)
MOST_TOKENS = 32 * 512
"""Of a case's prompts together: longer ones would take minutes to compute."""
DECODE_STEPS = {1: 24, 8: 12, 32: 6}


class Case(NamedTuple):
    """`batch` prompts of `context` ids; then `steps` greedy ids of each, 0: only the first."""

    batch: int
    context: int
    steps: int

    @property
    def name(self) -> str:
        """The row of the table."""
        if self.steps:
            return f"decode, batch {self.batch} after {self.context}"
        return f"prefill of {self.context}, batch {self.batch}"

    @property
    def tokens(self) -> int:
        """Computed while the clock runs."""
        return self.batch * (self.steps or self.context)

    def prompts(self, vocab: int) -> list[list[int]]:
        """The same on both sides."""
        return [
            [(7919 * i + 104_729 * row + 13) % (vocab - 256) for i in range(self.context)]
            for row in range(self.batch)
        ]


class Side(Protocol):
    """One implementation in a process of its own."""

    def start(self, prompts: list[list[int]]) -> list[int]:
        """Compute the prompts and return each one's next id."""

    def step(self, ids: list[int]) -> list[int]:
        """Append an id to each prompt and return each one's next."""


class Ours:
    """The engine's runner, stepped as its scheduler would: at most STEP_TOKENS tokens at once."""

    def __init__(self, folder: Path, threads: int) -> None:
        from kimi_runtime.engine.runner import TorchRunner, kv_block_bytes
        from kimi_runtime.models.weights import load_weights
        from kimi_runtime.spec.model import ModelSpec
        from kimi_runtime.transfer.memory import private_memory

        spec = ModelSpec.model_validate_json((folder / "spec.json").read_bytes())
        self._per_row = -(-(max(DECODE_CONTEXTS) + max(DECODE_STEPS.values()) + 1) // BLOCK_TOKENS)
        blocks = max(BATCHES) * self._per_row
        self._runner = TorchRunner(
            spec,
            load_weights(spec, folder),
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            memory=private_memory(blocks * kv_block_bytes(spec, BLOCK_TOKENS)),
            threads=threads,
        )
        self._vocab, self._lengths = spec.vocab_size, [0]

    def start(self, prompts: list[list[int]]) -> list[int]:
        self._lengths = [0] * len(prompts)
        waiting, drawn = dict(enumerate(prompts)), {}
        while waiting:
            left, parts = STEP_TOKENS, {}
            for row, ids in waiting.items():
                parts[row] = ids[:left]
                left -= len(parts[row])
            parts = {row: ids for row, ids in parts.items() if ids}
            drawn |= self._run(parts)
            waiting = {row: ids[len(parts.get(row, ())) :] for row, ids in waiting.items()}
            waiting = {row: ids for row, ids in waiting.items() if ids}
        return [drawn[row] for row in range(len(prompts))]

    def step(self, ids: list[int]) -> list[int]:
        drawn = self._run({row: [id_] for row, id_ in enumerate(ids)})
        return [drawn[row] for row in range(len(ids))]

    def _run(self, parts: dict[int, list[int]]) -> dict[int, int]:
        from kimi_runtime.engine.plan import Row, StepPlan
        from kimi_runtime.engine.sampler import RequestSampler
        from kimi_runtime.spec.request import Sampling

        greedy = Sampling(temperature=0.0, max_tokens=1)
        rows, samplers = [], {}
        for row, ids in parts.items():
            blocks = range(row * self._per_row, (row + 1) * self._per_row)
            rows.append(Row(row, self._lengths[row], tuple(ids), tuple(blocks), sample=True))
            samplers[row] = RequestSampler(greedy, (1,), self._vocab, random_seed=1)
            self._lengths[row] += len(ids)
        sampled = self._runner.run(StepPlan(tuple(rows)), samplers)
        return {one.request: one.id for one in sampled}


class Theirs:
    """transformers' DeepseekV3 with its cache."""

    def __init__(self, folder: Path, threads: int, experts: str | None, dtype: str) -> None:
        import torch
        from transformers import DeepseekV3ForCausalLM

        self._torch = torch
        torch.set_num_threads(threads)
        options = {} if experts is None else {"experts_implementation": experts}
        self._model = DeepseekV3ForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), **options
        ).eval()
        self._cache: Any = None

    def start(self, prompts: list[list[int]]) -> list[int]:
        self._cache = None
        return self._forward(prompts)

    def step(self, ids: list[int]) -> list[int]:
        return self._forward([[id_] for id_ in ids])

    def _forward(self, ids: list[list[int]]) -> list[int]:
        with self._torch.inference_mode():
            output = self._model(
                self._torch.tensor(ids), cache=self._cache, use_cache=True, logits_to_keep=1
            )
        self._cache = output.cache
        drawn: list[int] = output.logits[:, -1].argmax(-1).tolist()
        return drawn


def serve(side: Side) -> None:
    """Answer one case per line of stdin: seconds of wall and processor, and the last ids."""
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = asked["prompts"]
        if asked["steps"]:
            ids = side.start(prompts)
            side.step(ids)  # the first step of a shape prepares what later ones use

            def work(ids: list[int] = ids, steps: int = asked["steps"]) -> list[int]:
                for _ in range(steps):
                    ids = side.step(ids)
                return ids
        else:

            def work(prompts: list[list[int]] = prompts) -> list[int]:
                return side.start(prompts)

        answer(work)


def answer(work: Callable[[], list[int]]) -> None:
    """Time it and say so."""
    wall, cpu = time.perf_counter(), time.process_time()
    ids = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    sys.stdout.write(json.dumps({"wall": wall, "cpu": cpu, "ids": ids}) + "\n")
    sys.stdout.flush()


class Process:
    """A side as its asker sees it."""

    def __init__(self, python: str, side: str, options: argparse.Namespace, folder: Path) -> None:
        command = [python, __file__, "--side", side, "--folder", str(folder)]
        command += ["--threads", str(options.threads), "--their-dtype", options.their_dtype]
        if options.experts is not None:
            command += ["--experts", options.experts]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def ask(self, case: Case, vocab: int) -> dict[str, Any]:
        """Run the case once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"prompts": case.prompts(vocab), "steps": case.steps}) + "\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        answered: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answered


def cases() -> list[Case]:
    """Every row of the table."""
    found = [Case(batch, PROMPT, 0) for batch in BATCHES]
    found += [
        Case(batch, context, DECODE_STEPS[batch])
        for context in DECODE_CONTEXTS
        for batch in BATCHES
        if batch * context <= MOST_TOKENS
    ]
    return found


def compare(options: argparse.Namespace) -> None:
    """Start both sides on the same weights and print the table."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from kimi_runtime.models.weights import open_weights
    from kimi_runtime.spec.worker import FileWeights, RandomWeights
    from oracle_cases import write_checkpoint

    source = FileWeights(path=options.model) if options.model else RandomWeights()
    spec, weights = open_weights(source)
    spec = spec.model_copy(update={"quantisation": None})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(spec, weights.tensors, folder)
        (folder / "spec.json").write_text(spec.model_dump_json())
        ours = stack.enter_context(Process(sys.executable, "ours", options, folder))
        theirs = stack.enter_context(Process(options.python, "theirs", options, folder))
        print(
            f"{spec.name}, bf16, theirs in {options.their_dtype}, {options.threads} thread(s), "
            f"{options.rounds} rounds\n"
        )
        print("| case | ours tok/s | transformers tok/s | ratio | cpu ratio |")
        print("| --- | --- | --- | --- | --- |")
        for case in (one for one in cases() if options.only in one.name):
            pairs = [
                (ours.ask(case, spec.vocab_size), theirs.ask(case, spec.vocab_size))
                for _ in range(options.rounds)
            ]
            print(row(case, pairs), flush=True)


def row(case: Case, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Medians over the rounds."""
    rates = [
        case.tokens / statistics.median(side["wall"] for side in one)
        for one in zip(*pairs, strict=True)
    ]
    ratios = [
        statistics.median(theirs[clock] / ours[clock] for ours, theirs in pairs)
        for clock in ("wall", "cpu")
    ]
    figures = [f"{rate:,.0f}" for rate in rates] + [f"{ratio:.2f}" for ratio in ratios]
    return f"| {case.name} | {' | '.join(figures)} |"


def main() -> None:
    """One side, or both compared."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", help="the interpreter of an environment with transformers")
    parser.add_argument("--model", type=Path, help="a K2 model's folder; random kimi-nano without")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    parser.add_argument("--experts", help="transformers' experts_implementation")
    parser.add_argument("--their-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # a waiting thread of one side must not take the processor of the other
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if options.side == "ours":
        serve(Ours(options.folder, options.threads))
    elif options.side == "theirs":
        serve(Theirs(options.folder, options.threads, options.experts, options.their_dtype))
    elif options.python is None:
        print("transformers is not compared with: name its environment's interpreter (--python)")
    else:
        compare(options)


if __name__ == "__main__":
    main()
