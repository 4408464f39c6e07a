"""What the router adds: latency of passing through it, and how many chunks a second it streams.

Worker, router and client are processes of their own; the worker is the scripted engine, which takes
no time. Run `python benchmarks/router.py`; it prints one table. A chunk carries one token id.
"""

import argparse
import asyncio
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
from contextlib import aclosing
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
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
TEXT_ID = VOCABULARY.encode_text("fox")[0]
STOP_ID = VOCABULARY.special("<|im_end|>")


def script(request: GenerateRequest) -> Reply:
    """As many ids as were asked for."""
    return Reply(islice(repeat(TEXT_ID), request.sampling.max_tokens))


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


async def _routed(http: aiohttp.ClientSession, tokens: int, number: int) -> float:
    """Seconds to the first event, through the router; a conversation of its own each time."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{number} {PROMPT}"}],
        "max_tokens": tokens,
        "stream": True,
    }
    started_s, first_s = clock.now_s(), 0.0
    async with http.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for _ in answer.content.iter_any():
            first_s = first_s or clock.now_s() - started_s
    return first_s


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


async def _measure(
    worker_url: str, router_url: str, router_pid: int, requests: int, streams: int
) -> None:
    ids = tuple(VOCABULARY.encode_text(PROMPT))
    async with aiohttp.ClientSession() as inner, aiohttp.ClientSession(router_url) as outer:
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


def main() -> None:
    """Start worker and router, measure, stop them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--streams", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        call_key_file(folder)
        worker_pipe, worker = _process(_worker, folder)
        worker_url = worker_pipe.recv()
        router_pipe, router = _process(_router, folder, worker_url)
        router_url = router_pipe.recv()
        try:
            asyncio.run(
                _measure(worker_url, router_url, router.pid, options.requests, options.streams)
            )
        finally:
            for pipe, process in ((router_pipe, router), (worker_pipe, worker)):
                pipe.send("stop")
                process.join(10)


if __name__ == "__main__":
    main()
