"""A router and scripted workers over real sockets, in one process."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_runtime import clock
from kimi_runtime.auth import read_call_keys
from kimi_runtime.engine.adapters.scripted import Pace, ScriptedAdapter, scripted_info
from kimi_runtime.engine.adapters.scripts import Script
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.vocabulary import Vocabulary, open_vocabulary
from kimi_runtime.router.service import Router, open_router
from kimi_runtime.server.app import read_api_keys, router_app
from kimi_runtime.server.serve import bind, listening
from kimi_runtime.server.worker_app import WorkerServer, serving, worker_app
from kimi_runtime.spec.router import RouterSpec, WorkerEndpoint
from kimi_runtime.spec.worker import Role
from kimi_runtime.umbp.keys import pool_key_of

MODEL = "kimi-scripted"
CALL_KEY = "k" * 64
VOCABULARY = open_vocabulary()
CODEC = K2Codec(VOCABULARY)
BLOCK_TOKENS = 8


@dataclass(frozen=True)
class Part:
    """One scripted worker to start."""

    name: str
    script: Script
    role: Role = Role.BOTH
    pace: Pace | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    port: int = 0


@dataclass
class RunningWorker:
    """A started worker; `stop` kills its server without a drain."""

    part: Part
    adapter: ScriptedAdapter
    server: WorkerServer
    url: str
    owned: AsyncExitStack

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(name=self.part.name, role=self.part.role, url=self.url)


@dataclass
class Stack:
    """A started router with its workers."""

    url: str
    router: Router
    workers: dict[str, RunningWorker]
    call_key: Path


def call_key_file(folder: Path) -> Path:
    path = folder / "call.key"
    path.write_text(CALL_KEY)
    path.chmod(0o600)
    return path


@asynccontextmanager
async def running_worker(part: Part, key_file: Path) -> AsyncIterator[RunningWorker]:
    """Serve a scripted adapter on its port."""
    options = {"block_tokens": BLOCK_TOKENS, "vocabulary_digest": VOCABULARY.digest}
    info = scripted_info(part.name, part.role, **(options | dict(part.info)))
    adapter = ScriptedAdapter(
        info, part.script, pace=part.pace, pool_key=pool_key_of(CALL_KEY.encode()), **part.options
    )
    async with AsyncExitStack() as owned:
        listener = owned.enter_context(bind("127.0.0.1", part.port))
        server = await owned.enter_async_context(serving(adapter, read_call_keys(key_file)))
        url = await owned.enter_async_context(listening(worker_app(server), listener))
        owned.push_async_callback(server.drain, within_s=0.0)
        yield RunningWorker(part, adapter, server, url, owned)


@asynccontextmanager
async def running_router(spec: RouterSpec) -> AsyncIterator[tuple[str, Router]]:
    """Serve a router on its port."""
    async with AsyncExitStack() as owned:
        listener = owned.enter_context(bind(spec.host, spec.port))
        router = await owned.enter_async_context(open_router(spec, VOCABULARY))
        app = router_app(router, CODEC, read_api_keys(spec.api_keys))
        yield await owned.enter_async_context(listening(app, listener)), router


@asynccontextmanager
async def running_stack(
    folder: Path, parts: Iterable[Part], *, wait_ready: bool = True, **options: Any
) -> AsyncIterator[Stack]:
    """Workers and a router in front of them; ready when the block begins."""
    key_file = call_key_file(folder)
    failure: Exception | None = None
    async with AsyncExitStack() as owned:
        workers = {
            part.name: await owned.enter_async_context(running_worker(part, key_file))
            for part in parts
        }
        spec = RouterSpec(
            **(
                {
                    "port": 0,
                    "model_name": MODEL,
                    "workers": tuple(one.endpoint for one in workers.values()),
                    "call_key": key_file,
                    "thinking": False,
                    "load_interval": 0.05,
                    "retry_window": 0.0,
                    "request_deadline": 20.0,
                }
                | options
            )
        )
        url, router = await owned.enter_async_context(running_router(spec))
        if wait_ready:
            await until(lambda: router.readiness.obstacle is None and all_ready(router))
        try:
            yield Stack(url, router, workers, key_file)
        except Exception as exc:
            failure = exc
    if failure is not None:
        raise failure  # as it was, not in the groups of everybody who was open around it


def all_ready(router: Router) -> bool:
    return all(member.ready for member in router.fleet.members)


async def until(condition: Any, *, within_s: float = 10.0) -> None:
    """Wait until `condition()` holds; an AssertionError that it never did otherwise."""
    end_s = clock.now_s() + within_s
    while not condition():
        assert clock.now_s() < end_s, "the condition never became true"
        await asyncio.sleep(0.005)


def ids_of(text: str, vocabulary: Vocabulary = VOCABULARY) -> list[int]:
    """Output ids for a template with special tokens written `<|name|>`, `<think>`, `</think>`."""
    ids: list[int] = []
    rest = text
    specials = sorted(vocabulary.special_ids, key=len, reverse=True)
    while rest:
        found = min(
            ((rest.find(name), name) for name in specials if name in rest),
            key=lambda hit: (hit[0], -len(hit[1])),
            default=(len(rest), ""),
        )
        ids += vocabulary.encode_text(rest[: found[0]])
        if found[1]:
            ids.append(vocabulary.special(found[1]))
        rest = rest[found[0] + len(found[1]) :]
    return ids
