"""Opening the `kimistack` engine from a worker's file: weights, memory, transport, pool."""

import asyncio
import importlib.metadata
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlunsplit

from kimi_runtime import clock
from kimi_runtime.auth import read_call_keys
from kimi_runtime.engine.adapters.reference import Model, ReferenceAdapter
from kimi_runtime.engine.assembly import Backing, assemble
from kimi_runtime.engine.handoff import TicketUrls
from kimi_runtime.engine.runner import TorchRunner, kv_block_bytes
from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.models.weights import ModelWeights, open_weights
from kimi_runtime.protocol.grammar import GrammarState
from kimi_runtime.protocol.vocabulary import Vocabulary, open_vocabulary
from kimi_runtime.spec.layout import KvLayout
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.spec.sizes import state_bytes
from kimi_runtime.spec.worker import Capabilities, Role, WorkerInfo, WorkerSpec
from kimi_runtime.transfer import open_transport
from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.chaos import ChaosTransport
from kimi_runtime.transfer.memory import Memory, private_memory, shared_memory
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.keys import pool_key_of
from kimi_runtime.units import format_bytes

_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_kimistack(spec: WorkerSpec) -> AsyncIterator[ReferenceAdapter]:
    """A running engine; on the way out it drains for `spec.drain` and gives everything back.

    Raises ConfigError for a file that names what is not there, CapacityError for too little
    memory. Leaving raises what the engine's own tasks raised.
    """
    call_keys = read_call_keys(spec.call_key)
    call_key = call_keys[0]
    vocabulary = open_vocabulary(spec.vocabulary)
    model, weights = await asyncio.to_thread(open_weights, spec.weights)
    if vocabulary.size > model.vocab_size:
        raise ConfigError(
            f"the vocabulary has {vocabulary.size} ids, but {model.name} embeds "
            f"{model.vocab_size}; name the vocabulary that belongs to the model"
        )
    blocks = _blocks(spec, model)
    async with AsyncExitStack() as owned:
        memory = _memory(spec, blocks * kv_block_bytes(model, spec.limits.block_tokens))
        if memory.path is not None:
            owned.callback(memory.path.unlink, missing_ok=True)
        runner = await asyncio.to_thread(_runner, spec, model, weights, vocabulary, memory, blocks)
        transports: list[Transport] = []
        faults: Counter[str] = Counter()
        for name in spec.transports:
            network = NetworkSettings.of(spec.network, call_keys, host=spec.host)
            transport = await open_transport(name, peer=spec.name, network=network)
            if spec.chaos is not None:
                _log.warning("transfers fail on purpose", extra={"fields": spec.chaos.model_dump()})
                transport = ChaosTransport.asked(transport, spec.chaos, faults)
            owned.push_async_callback(transport.aclose)
            transports.append(transport)
        pool = None
        if spec.umbp_socket is not None:
            pool = await open_pool(
                spec.umbp_socket, call_key, name=spec.name, group_bytes=runner.layer_group_bytes
            )
            owned.push_async_callback(pool.aclose)
        engine = assemble(
            _info(spec, model, runner, vocabulary),
            _model(model, vocabulary, pool_key_of(call_key)),
            Backing(runner, memory, transports, pool, call_key, transfer_faults=faults),
            spec.limits,
            lease_s=spec.hand_off_lease,
            deadline_s=spec.pull_deadline,
            urls=TicketUrls(
                release=lambda ticket: _url(spec, f"/handoff/{ticket}/release"),
                progress=lambda ticket: _url(spec, f"/handoff/{ticket}/progress"),
            ),
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run(), name="engine")
            try:
                yield engine
                within_s = 0.0 if engine.load().draining else spec.drain  # the server's part
                await engine.drain(within_s=within_s)
            finally:
                await engine.aclose()


def _blocks(spec: WorkerSpec, model: ModelSpec) -> int:
    block_bytes = kv_block_bytes(model, spec.limits.block_tokens)
    blocks = spec.limits.kv_bytes // block_bytes
    if not blocks:
        raise CapacityError(
            f"one KV block of {spec.limits.block_tokens} tokens of {model.name}",
            need=format_bytes(block_bytes),
            have=format_bytes(spec.limits.kv_bytes),
            where=f"limits.kv_bytes of {spec.name}",
            fix="raise it or lower block_tokens",
        )
    return blocks


def _memory(spec: WorkerSpec, size_bytes: int) -> Memory:
    if "shm" in spec.transports:
        return shared_memory(spec.run_dir / f"{spec.name}.kv", size_bytes)
    return private_memory(size_bytes)


def _runner(
    spec: WorkerSpec,
    model: ModelSpec,
    weights: ModelWeights,
    vocabulary: Vocabulary,
    memory: Memory,
    blocks: int,
) -> TorchRunner:
    return TorchRunner(
        model,
        weights,
        blocks=blocks,
        block_tokens=spec.limits.block_tokens,
        memory=memory,
        threads=spec.threads,
        vocabulary_size=vocabulary.size,
    )


def _info(
    spec: WorkerSpec, model: ModelSpec, runner: TorchRunner, vocabulary: Vocabulary
) -> WorkerInfo:
    block_tokens = spec.limits.block_tokens
    context = spec.limits.max_context_tokens or model.max_positions
    return WorkerInfo(
        name=spec.name,
        role=spec.role,
        engine=spec.engine,
        epoch=int(clock.unix_s() * 1e3),
        revision=f"{spec.revision or _version()}/{runner.model_digest}",
        node=spec.node,
        model=model.name,
        model_digest=runner.model_digest,
        layout=KvLayout.of(model, block_tokens=block_tokens).digest(),
        vocabulary_digest=vocabulary.digest,
        block_tokens=block_tokens,
        block_bytes=runner.block_bytes,
        state_bytes=state_bytes(model),
        max_context_tokens=min(context, model.max_positions, runner.blocks * block_tokens),
        total_blocks=runner.blocks,
        max_running=spec.limits.max_running,
        capabilities=Capabilities(
            roles=tuple(Role),
            per_request_roles=True,
            fetch_source=False,
            layer_streaming=True,
            mid_decode_move=False,
            grammar=True,
            logprobs=True,
            transports=spec.transports,
        ),
    )


def _model(model: ModelSpec, vocabulary: Vocabulary, pool_key: bytes) -> Model:
    # a grammar may end with either, whatever the model's config lists
    ends = {*model.eos_ids, vocabulary.special("<|im_end|>"), vocabulary.special("[EOS]")}
    return Model(
        vocabulary=vocabulary,
        vocab_size=vocabulary.size,
        eos_ids=tuple(sorted(ends)),
        pool_key=pool_key,
        grammar=lambda grammar, most: GrammarState(vocabulary, grammar, most),
    )


def _version() -> str:
    """Of the code: KV is only handed between equal ones."""
    try:
        return importlib.metadata.version("kimistack")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _url(spec: WorkerSpec, path: str) -> str:
    host = f"[{spec.host}]" if ":" in spec.host else spec.host
    return urlunsplit(("http", f"{host}:{spec.port}", path, "", ""))
