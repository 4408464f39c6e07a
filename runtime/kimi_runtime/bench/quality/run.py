"""The examination through a real engine: prompts of ids in, greedy ids out, many at a time."""

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kimi_runtime.bench.quality.examination import (
    MAX_ANSWER_TOKENS,
    Examiner,
    Item,
    Tally,
    judge,
)
from kimi_runtime.engine.adapters import open_adapter
from kimi_runtime.engine.adapters.base import Adapter
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.spec.request import GenerateRequest, Sampling
from kimi_runtime.spec.worker import EngineLimits, Role, Weights, WorkerSpec

NEEDLE_TOKENS = (128, 512, 1024, 2048, 4096, 8192)
_AT_ONCE = 16
_DEADLINE_MS = 3_600_000  # of one question; the machine may be busy with other things


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked."""

    dialogues: int = 240
    needles: int = 24
    needle_tokens: tuple[int, ...] = NEEDLE_TOKENS
    seed: int = 0
    threads: int = 1
    thinking: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it."""

    model: str
    digest: str
    plan: Plan
    tally: Tally


async def examine(
    weights: Weights, plan: Plan, *, on_progress: Callable[[int, int], None] | None = None
) -> Result:
    """Put the plan's questions to an engine of these weights and judge the answers.

    Without grammar: what is valid is the model's own doing. Raises ConfigError for weights that are
    not there or not what they say.
    """
    codec = K2Codec(open_vocabulary())
    examiner = Examiner(codec, seed=plan.seed)
    items = examiner.dialogues(plan.dialogues, thinking=plan.thinking)
    for tokens in plan.needle_tokens:
        items += examiner.needles(plan.needles, tokens=tokens, thinking=plan.thinking)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="kimistack-quality-") as folder:
        async with open_adapter(_worker(weights, plan, Path(folder))) as adapter:
            await _ask_all(adapter, examiner, items, tally, on_progress)
            info = adapter.info
    return Result(info.model, info.model_digest, plan, tally)


def _worker(weights: Weights, plan: Plan, folder: Path) -> WorkerSpec:
    key = folder / "call.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    limits = EngineLimits(
        kv_bytes=1 << 30, max_running=_AT_ONCE, max_waiting=2 * _AT_ONCE, step_tokens=512
    )
    return WorkerSpec(
        name="quality",
        role=Role.BOTH,
        port=0,
        weights=weights,
        limits=limits,
        threads=plan.threads,
        run_dir=folder,
        call_key=key,
        transfer="loopback",
    )


async def _ask_all(
    adapter: Adapter,
    examiner: Examiner,
    items: Sequence[Item],
    tally: Tally,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    waiting = iter(enumerate(items))
    outputs: dict[int, list[int]] = {}

    async def ask() -> None:
        for number, item in waiting:
            outputs[number] = await _output(adapter, examiner, item, number)
            if on_progress is not None:
                on_progress(len(outputs), len(items))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(ask())
    for number, item in enumerate(items):
        judge(item, examiner.read(item, outputs[number]), tally)


async def _output(adapter: Adapter, examiner: Examiner, item: Item, number: int) -> list[int]:
    asked = GenerateRequest(
        request_id=f"quality-{number}",
        ids=item.rendered.ids,
        sampling=Sampling(
            temperature=0.0, max_tokens=MAX_ANSWER_TOKENS, stop_ids=examiner.stop_ids
        ),
        deadline_ms=_DEADLINE_MS,
    )
    return [token async for chunk in adapter.generate(asked) for token in chunk.ids]
