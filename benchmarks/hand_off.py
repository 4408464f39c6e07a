"""What streaming a hand-off saves: from the prefill's end to the decode's first token.

    python benchmarks/hand_off.py [--transfer shm|tcp] [--tokens 1024,2048,4096,8192] [--repeats 5]

Two worker processes of kimi-nano (random weights, one thread each) hand prompts over, as a router
would have them: *whole*, the decode leg begins when the prefill's answer is there; *streamed*, as
soon as the ticket is told. Every prompt is new; the arms take turns. Prints one Markdown table of
medians, then a summary. The prefill's end is when its last line has arrived here; `bytes before` is
the share of the bytes that were told to be readable before the prompt was said to be complete. The
last layer group of the last step is told only a moment before.
"""

import argparse
import asyncio
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kimi_runtime.clock import now_s
from kimi_runtime.router.client import PeerClient
from kimi_runtime.spec.request import GenerateChunk, GenerateRequest, HandOff, KvPlan, Sampling
from kimi_runtime.spec.transfer import TransferNetwork
from kimi_runtime.spec.worker import EngineLimits, RandomWeights, Role, WorkerSpec

CALL_KEY = b"benchmark-call-key-of-32-bytes!!"
READY_S = 120.0
FIRST_ID, IDS = 3, 1000


@dataclass(frozen=True)
class Times:
    """Of one request, in seconds. `early`: the share of the bytes told before the prefill ended."""

    prefill_s: float
    gap_s: float
    early: float
    hand_off_bytes: int


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def worker(folder: Path, name: str, role: Role, args: argparse.Namespace) -> Iterator[str]:
    """A worker's process; its URL."""
    key, port = folder / "call.key", free_port()
    key.write_bytes(CALL_KEY)
    key.chmod(0o600)
    spec = WorkerSpec(
        name=name,
        role=role,
        port=port,
        weights=RandomWeights(),
        limits=EngineLimits(kv_bytes=args.kv_bytes, step_tokens=args.step_tokens),
        run_dir=folder,
        call_key=key,
        transfer=args.transfer,
        network=TransferNetwork(host="127.0.0.1", port=0),
        revision="benchmark",
        pull_deadline=30.0,
    )
    file = folder / f"{name}.json"
    file.write_text(spec.model_dump_json())
    code = "from kimi_runtime.cli import app; app()"
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "worker", "--spec", str(file)], stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


async def ready(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until the worker has generated something."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                async with http.get(f"{url}/readyz") as answer:
                    if answer.ok:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


def asked(ids: tuple[int, ...], kv: KvPlan, name: str) -> GenerateRequest:
    """A greedy request for one id."""
    return GenerateRequest(
        request_id=name,
        ids=ids,
        sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),
        kv=kv,
        deadline_ms=300_000,
    )


async def decoded(client: PeerClient, ids: tuple[int, ...], hand_off: HandOff) -> GenerateChunk:
    """The first chunk of the decode leg, and when it came."""
    request = asked(ids, KvPlan(take=hand_off), "decode")
    async with aclosing(client.generate(request, trace_id="benchmark")) as chunks:
        return await anext(chunks)


async def measured(
    prefill: PeerClient, decode: PeerClient, ids: tuple[int, ...], *, early: bool
) -> Times:
    """One request through both workers."""
    started_s = now_s()
    request = asked(ids, KvPlan(offer=True, early=early), "prefill")
    decoding: asyncio.Task[GenerateChunk] | None = None
    async with asyncio.TaskGroup() as tasks:
        async with aclosing(prefill.generate(request, trace_id="benchmark")) as chunks:
            async for chunk in chunks:
                if chunk.hand_off is not None and early:
                    decoding = tasks.create_task(decoded(decode, ids, chunk.hand_off))
                last = chunk
        ended_s = now_s()
        if decoding is None:
            assert last.hand_off is not None
            decoding = tasks.create_task(decoded(decode, ids, last.hand_off))
        first = await decoding
    usage = first.usage
    assert usage is not None
    assert usage.hand_off_failure is None, usage
    moved = usage.hand_off_bytes
    return Times(
        prefill_s=ended_s - started_s,
        gap_s=now_s() - ended_s,
        early=usage.hand_off_early_bytes / moved if moved else 0.0,
        hand_off_bytes=moved,
    )


@asynccontextmanager
async def clients(args: argparse.Namespace) -> AsyncIterator[tuple[PeerClient, PeerClient]]:
    """A prefill and a decode worker that are ready."""
    with (
        tempfile.TemporaryDirectory() as folder,
        worker(Path(folder), "prefill", Role.PREFILL, args) as first,
        worker(Path(folder), "decode", Role.DECODE, args) as second,
    ):
        async with aiohttp.ClientSession() as http:
            for url in (first, second):
                await ready(http, url)
            yield (
                PeerClient(http, "prefill", first, CALL_KEY),
                PeerClient(http, "decode", second, CALL_KEY),
            )


async def run(args: argparse.Namespace) -> None:
    """The table."""
    dice = random.Random(1)
    saved = []
    print(f"kimi-nano, {args.transfer}, steps of {args.step_tokens} tokens, {args.repeats} each")
    print("| prompt tokens | MB moved | prefill s | whole ms | streamed ms | bytes before |")
    print("| --- | --- | --- | --- | --- | --- |")
    async with clients(args) as (prefill, decode):
        for tokens in args.tokens:
            times: dict[bool, list[Times]] = {False: [], True: []}
            for number in range(args.repeats + 1):
                for early in (False, True):
                    ids = tuple(dice.choices(range(FIRST_ID, IDS), k=tokens))
                    one = await measured(prefill, decode, ids, early=early)
                    if number:  # the first is a warm-up
                        times[early].append(one)
            whole, streamed = (
                statistics.median(one.gap_s for one in times[early]) for early in (False, True)
            )
            share = statistics.median(one.early for one in times[True])
            prefill_s = statistics.median(one.prefill_s for one in times[False])
            moved = times[True][0].hand_off_bytes / 1e6
            saved.append(1 - streamed / whole)
            print(
                f"| {tokens} | {moved:.1f} | {prefill_s:.2f} | {whole * 1e3:.1f} "
                f"| {streamed * 1e3:.1f} | {share:.0%} |"
            )
    least, most = min(saved), max(saved)
    print(f"streaming shortens prefill's end to first token by {least:.0%} to {most:.0%}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transfer", choices=("shm", "tcp"), default="shm")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--kv-bytes", default="1GiB")
    args = parser.parse_args()
    args.tokens = args.tokens or [1024, 2048, 4096, 8192]
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
