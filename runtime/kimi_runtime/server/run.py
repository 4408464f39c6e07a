"""Each process from its spec to its drain."""

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from kimi_runtime.auth import read_call_keys
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.router.service import open_router
from kimi_runtime.server import logs
from kimi_runtime.server.app import open_codec, read_api_keys, router_app
from kimi_runtime.server.serve import bind, listening, until_signalled
from kimi_runtime.server.worker_app import serving, worker_app
from kimi_runtime.spec.router import RouterSpec
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.spec.worker import WorkerSpec

_log = logging.getLogger(__name__)


async def run_router(spec: RouterSpec) -> None:
    """A router until SIGTERM, then until its requests have ended or `drain` has passed."""
    logs.configure(spec.name, spec.log_level)
    async with AsyncExitStack() as owned:
        listener = owned.enter_context(bind(spec.host, spec.port))
        keys = read_api_keys(spec.api_keys)
        vocabulary = open_vocabulary(spec.vocabulary)
        codec = open_codec(spec, vocabulary)
        router = await owned.enter_async_context(open_router(spec, vocabulary))
        app = router_app(router, codec, keys)
        url = await owned.enter_async_context(listening(app, listener))
        _log.info("listening", extra={"fields": {"url": url}})
        gc.collect()
        gc.freeze()  # what is there by now stays: walking it would hold requests up
        await until_signalled(
            lambda: router.admission.drain(within_s=spec.drain, linger_s=spec.linger)
        )
    _log.info("stopped")


async def run_worker(spec: WorkerSpec) -> None:
    """A worker until SIGTERM, then until its requests have ended or `drain` has passed."""
    logs.configure(spec.name, spec.log_level)
    from kimi_runtime.engine.adapters import open_adapter

    async with AsyncExitStack() as owned:
        listener = owned.enter_context(bind(spec.host, spec.port))
        keys = read_call_keys(spec.call_key)
        adapter = await owned.enter_async_context(open_adapter(spec))
        server = await owned.enter_async_context(
            serving(adapter, keys, spec.drain_file, spec.lease)
        )
        url = await owned.enter_async_context(listening(worker_app(server), listener))
        _log.info("listening", extra={"fields": {"url": url}})
        await until_signalled(lambda: server.drain(within_s=spec.drain))
    _log.info("stopped")


async def run_umbp(path: Path, read: Callable[[], UmbpSpec]) -> None:
    """A pool daemon until SIGTERM, from the file at `path`, which `read` reads; again on SIGHUP."""
    spec = read()
    logs.configure(spec.name, spec.log_level)
    from kimi_runtime.router.reuse import gap_reuse
    from kimi_runtime.umbp.daemon import serve
    from kimi_runtime.umbp.tuning import Source

    source = Source(path, read)
    async with asyncio.TaskGroup() as tasks:
        daemon = tasks.create_task(serve(spec, source, reuse=gap_reuse), name="umbp")
        stop = tasks.create_task(until_signalled(_nothing), name="signals")
        await asyncio.wait({daemon, stop}, return_when=asyncio.FIRST_COMPLETED)
        daemon.cancel()
        stop.cancel()
    _log.info("stopped")


async def _nothing() -> None:
    """A pool has nothing to wait for: engines reconnect."""
