"""What the router adds: latency of passing through it, chunks a second it streams, memory it takes.

Worker, router and client are processes of their own; the worker is the scripted engine, which takes
no time. Run `python benchmarks/router.py`; it prints one table. A chunk carries one token id. The
memory is what the router grows by for answers that have begun and then say nothing, over their
number.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack, aclosing
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from kimi_runtime import clock
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.router.client import PeerClient
from kimi_runtime.spec.request import GenerateRequest, Sampling
from kimi_runtime.spec.router import RouterSpec, WorkerEndpoint
from kimi_runtime.spec.worker import Role
from scripted_stack import (
    BLOCK_TOKENS,
    CALL_KEY,
    MODEL,
    VOCABULARY,
    Part,
    call_key_file,
    running_router,
    running_worker,
)

TOKENS = 400
HELD_TOKENS = 7
"""As many ids asked for: the answer stops after the first and its stream stays open."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
TEXT_ID = VOCABULARY.encode_text("fox")[0]
STOP_ID = VOCABULARY.special("<|im_end|>")


def script(request: GenerateRequest) -> Reply:
    """As many ids as were asked for."""
    count = request.sampling.max_tokens
    stall_after = 1 if count == HELD_TOKENS else None
    return Reply(islice(repeat(TEXT_ID), count), stall_after=stall_after)


async def _worker(folder: Path, pipe: Any) -> None:
    part = Part("w", script, info={"block_tokens": BLOCK_TOKENS})
    async with running_worker(part, folder / "call.key") as worker:
        pipe.send(worker.url)
        await asyncio.to_thread(pipe.recv)


async def _router(folder: Path, pipe: Any, worker_url: str) -> None:
    spec = RouterSpec(
        port=0,
        model_name=MODEL,
        workers=(WorkerEndpoint(name="w", role=Role.BOTH, url=worker_url),),
        call_key=folder / "call.key",
        thinking=False,
    )
    async with running_router(spec) as (url, _):
        gc.collect()
        gc.freeze()  # as a router does that was started by its command
        pipe.send(url)
        await asyncio.to_thread(pipe.recv)


def _process(target: Any, *args: Any) -> tuple[Any, Any]:
    ours, theirs = multiprocessing.Pipe()
    folder, *rest = args
    process = multiprocessing.Process(target=_run, args=(target, folder, theirs, *rest))
    process.start()
    return ours, process


def _run(target: Any, folder: Path, pipe: Any, *rest: Any) -> None:
    asyncio.run(target(folder, pipe, *rest))


async def _direct(client: PeerClient, ids: tuple[int, ...], tokens: int, number: int) -> float:
    """Seconds to the first chunk, calling the worker itself."""
    request = GenerateRequest(
        request_id=f"direct-{number}",
        ids=ids,
        sampling=Sampling(max_tokens=tokens, stop_ids=(STOP_ID,)),
        deadline_ms=60_000,
    )
    started_s, first_s = clock.now_s(), 0.0
    async with aclosing(client.generate(request, trace_id="t")) as chunks:
        async for _ in chunks:
            first_s = first_s or clock.now_s() - started_s
    return first_s


def _body(tokens: int, number: int) -> dict[str, Any]:
    """A conversation of its own for each number."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{number} {PROMPT}"}],
        "max_tokens": tokens,
        "stream": True,
    }


async def _routed(http: aiohttp.ClientSession, tokens: int, number: int) -> float:
    """Seconds to the first event, through the router."""
    started_s, first_s = clock.now_s(), 0.0
    async with http.post("/v1/chat/completions", json=_body(tokens, number)) as answer:
        assert answer.status == 200, await answer.text()
        async for _ in answer.content.iter_any():
            first_s = first_s or clock.now_s() - started_s
    return first_s


async def _held_bytes(http: aiohttp.ClientSession, router_pid: int, streams: int) -> float:
    """Memory that the router takes for each of `streams` answers that are open at once."""
    before = _resident_bytes(router_pid)
    async with AsyncExitStack() as opened:
        for number in range(streams):
            post = http.post("/v1/chat/completions", json=_body(HELD_TOKENS, number))
            answer = await opened.enter_async_context(post)
            assert answer.status == 200, await answer.text()
            await answer.content.readany()
        return (_resident_bytes(router_pid) - before) / streams


async def _rate(call: Any, *, streams: int, tokens: int) -> float:
    """Chunks a second of `streams` concurrent answers of `tokens` chunks each."""
    started_s = clock.now_s()
    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(call(tokens, number))
    return streams * tokens / (clock.now_s() - started_s)


async def _until_ready(http: aiohttp.ClientSession) -> None:
    for _ in range(200):
        async with http.get("/readyz") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.05)
    raise SystemExit("the router did not become ready within 10 s")


def _row(name: str, latencies: list[float], rate: float) -> str:
    cuts = statistics.quantiles(latencies, n=100)
    return f"| {name:<16} | {cuts[49] * 1e3:8.2f} | {cuts[98] * 1e3:8.2f} | {rate:10,.0f} |"


def _cpu_s(pid: int) -> float:
    """Processor seconds a process has used: unlike latency, about the same on a busy machine."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    """Memory of the process that is not part of a file."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


async def _measure(
    worker_url: str, router_url: str, router_pid: int, options: argparse.Namespace
) -> None:
    ids = tuple(VOCABULARY.encode_text(PROMPT))
    requests, streams = options.requests, options.streams
    async with AsyncExitStack() as owned:
        inner = await owned.enter_async_context(aiohttp.ClientSession())
        free = aiohttp.TCPConnector(limit=0)  # by default at most a hundred connections at once
        outer = await owned.enter_async_context(aiohttp.ClientSession(router_url, connector=free))
        worker = PeerClient(inner, "w", worker_url, CALL_KEY.encode())

        async def direct(tokens: int, number: int) -> float:
            return await _direct(worker, ids, tokens, number)

        async def routed(tokens: int, number: int) -> float:
            return await _routed(outer, tokens, number)

        await _until_ready(outer)
        rows = []
        for name, call in (("worker alone", direct), ("through router", routed)):
            await call(1, -1)
            marks = [_cpu_s(router_pid)]
            latencies = [await call(1, number) for number in range(requests)]
            marks.append(_cpu_s(router_pid))
            rate = await _rate(call, streams=streams, tokens=TOKENS)
            marks.append(_cpu_s(router_pid))
            rows.append((name, latencies, rate))
        held_kib = await _held_bytes(outer, router_pid, options.held) / 1024
    print(f"{requests} requests of {len(ids)} prompt tokens; {streams} concurrent streams")
    print(f"{platform.machine()}, Python {platform.python_version()}")
    print("| path             |   p50 ms |   p99 ms |   chunks/s |")
    print("| ---------------- | -------: | -------: | ---------: |")
    for row in rows:
        print(_row(*row))
    added = [statistics.quantiles(rows[1][1], n=100)[n] for n in (49, 98)]
    base = [statistics.quantiles(rows[0][1], n=100)[n] for n in (49, 98)]
    p50, p99 = ((a - b) * 1e3 for a, b in zip(added, base, strict=True))
    print(f"| added            | {p50:8.2f} | {p99:8.2f} |            |")
    request_ms = (marks[1] - marks[0]) / requests * 1e3
    chunk_us = (marks[2] - marks[1]) / (streams * TOKENS) * 1e6
    print(f"processor time of the router: {request_ms:.2f} ms a request, {chunk_us:.0f} us a chunk")
    print(f"memory of the router: {held_kib:.0f} KiB for each of {options.held} open streams")


def main() -> None:
    """Start worker and router, measure, stop them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument(
        "--held",
        type=int,
        default=60,
        help="streams open at once, for memory: at most what a worker answers at once",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call_key_file(folder)
        worker_pipe, worker = _process(_worker, folder)
        worker_url = worker_pipe.recv()
        router_pipe, router = _process(_router, folder, worker_url)
        router_url = router_pipe.recv()
        try:
            asyncio.run(_measure(worker_url, router_url, router.pid, options))
        finally:
            for pipe, process in ((router_pipe, router), (worker_pipe, worker)):
                pipe.send("stop")
                process.join(10)


if __name__ == "__main__":
    main()
