"""Whole engines on the hash runner: everything but the model is the production code."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hash_runner import HashRunner, StatefulHashRunner
from kimi_runtime.engine.adapters.reference import Model, ReferenceAdapter
from kimi_runtime.engine.assembly import Backing, assemble
from kimi_runtime.engine.fetch import Pool
from kimi_runtime.engine.follow import ProgressSource
from kimi_runtime.engine.handoff import TicketUrls
from kimi_runtime.engine.plan import StepPlan
from kimi_runtime.protocol.grammar import GrammarState
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.spec.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    HandOff,
    KvPlan,
    KvUsage,
    Sampling,
)
from kimi_runtime.spec.worker import Capabilities, EngineLimits, Role, WorkerInfo
from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.memory import private_memory, shared_memory
from kimi_runtime.umbp.checkpoints import Checkpoints

BLOCK_TOKENS = 4
VOCABULARY = open_vocabulary()
EOS = VOCABULARY.special("<|im_end|>")
POOL_KEY = b"p" * 32


@dataclass
class Setup:
    """What a test varies."""

    name: str = "w"
    role: Role = Role.BOTH
    blocks: int = 64
    max_running: int = 8
    max_waiting: int = 64
    step_tokens: int = 32
    max_context_tokens: int = 128
    model_digest: str = "hash"
    layout: str = "hash/4"
    lease_s: float = 30.0
    deadline_s: float = 2.0
    transport: Transport | None = None
    also: Sequence[Transport] = ()
    file: Path | None = None
    """Of the KV memory, for shm."""
    pool: Pool | None = None
    call_key: bytes | None = None
    release_url: Callable[[str], str] = field(default=lambda ticket: f"http://127.0.0.1:1/{ticket}")
    stateful: bool = False
    checkpoints: Checkpoints | None = None
    progress_url: Callable[[str], str] = field(default=str)
    progress: ProgressSource | None = None
    before_step: Callable[[StepPlan], None] = field(default=lambda plan: None)
    after_group: Callable[[int], None] = field(default=lambda group: None)


@dataclass
class Running:
    """An engine, and the runner under it."""

    engine: ReferenceAdapter
    runner: HashRunner
    setup: Setup

    async def generate(self, asked: GenerateRequest) -> "Answer":
        """Run the request to its end."""
        return Answer([chunk async for chunk in self.engine.generate(asked)])

    def assert_all_free(self) -> None:
        """Nobody holds anything."""
        self.engine.check_integrity()
        assert self.engine.load().free_blocks == self.setup.blocks
        assert self.engine.load().in_flight == {}


@dataclass
class Answer:
    """A whole stream."""

    chunks: list[GenerateChunk]

    @property
    def ids(self) -> list[int]:
        return [number for chunk in self.chunks for number in chunk.ids]

    @property
    def finish(self) -> FinishReason | None:
        return self.chunks[-1].finish

    @property
    def usage(self) -> KvUsage:
        usage = self.chunks[-1].usage
        assert usage is not None
        return usage

    @property
    def hand_off(self) -> HandOff:
        hand_off = self.chunks[-1].hand_off
        assert hand_off is not None
        return hand_off


def request(
    ids: list[int],
    outputs: int = 6,
    *,
    kv: KvPlan | None = None,
    deadline_ms: int = 20_000,
    sampling: dict[str, object] | None = None,
    **fields: object,
) -> GenerateRequest:
    """A greedy request of exactly `outputs` ids unless `sampling` says otherwise."""
    chosen = {"temperature": 0.0, "max_tokens": outputs, "ignore_eos": True, **(sampling or {})}
    return GenerateRequest.model_validate(
        {
            "request_id": "r",
            "ids": ids,
            "sampling": Sampling.model_validate(chosen),
            "kv": kv or KvPlan(),
            "deadline_ms": deadline_ms,
            **fields,
        }
    )


def build(setup: Setup) -> Running:
    """An engine that is not running yet."""
    size = setup.blocks * BLOCK_TOKENS * 16
    memory = private_memory(size) if setup.file is None else shared_memory(setup.file, size)
    kind = StatefulHashRunner if setup.stateful else HashRunner
    runner = kind(
        setup.blocks,
        BLOCK_TOKENS,
        memory=memory.view,
        before_step=setup.before_step,
        after_group=setup.after_group,
    )
    info = WorkerInfo(
        name=setup.name,
        role=setup.role,
        engine="hash",
        epoch=1,
        revision="hash",
        model="hash",
        model_digest=setup.model_digest,
        layout=setup.layout,
        vocabulary_digest=VOCABULARY.digest,
        block_tokens=BLOCK_TOKENS,
        block_bytes=runner.block_bytes,
        max_context_tokens=setup.max_context_tokens,
        total_blocks=setup.blocks,
        capabilities=Capabilities(
            roles=tuple(Role),
            per_request_roles=True,
            fetch_source=False,
            layer_streaming=True,
            mid_decode_move=False,
            grammar=True,
            logprobs=False,
        ),
    )
    model = Model(
        vocabulary=VOCABULARY,
        vocab_size=VOCABULARY.size,
        eos_ids=(EOS, VOCABULARY.special("[EOS]")),
        pool_key=POOL_KEY,
        grammar=lambda grammar, most: GrammarState(VOCABULARY, grammar, most),
    )
    own = () if setup.transport is None else (setup.transport,)
    transports = (*own, *setup.also)
    engine = assemble(
        info,
        model,
        Backing(
            *(runner, memory, transports, setup.pool, setup.call_key, setup.progress),
            states=runner if isinstance(runner, StatefulHashRunner) else None,
            checkpoints=setup.checkpoints,
        ),
        EngineLimits(
            block_tokens=BLOCK_TOKENS,
            kv_bytes=memory.size_bytes,
            max_running=setup.max_running,
            max_waiting=setup.max_waiting,
            step_tokens=setup.step_tokens,
        ),
        lease_s=setup.lease_s,
        deadline_s=setup.deadline_s,
        urls=TicketUrls(release=setup.release_url, progress=setup.progress_url),
    )
    return Running(engine, runner, setup)


@asynccontextmanager
async def hash_engine(setup: Setup | None = None) -> AsyncIterator[Running]:
    """A running engine; its books are checked at the end."""
    running = build(setup or Setup())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(running.engine.run())
        try:
            yield running
            running.engine.check_integrity()
        finally:
            await running.engine.aclose()
