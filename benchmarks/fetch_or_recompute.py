"""When KV is fetched sooner than computed, on this machine, and whether the estimates know.

    PYTHONPATH=runtime python benchmarks/fetch_or_recompute.py [--rounds 3] [--threads 1]
        [--tokens 64 256 ...]

kimi-nano on the CPU. *Computed* adds up prefill steps of 512 tokens, timed at depths from 0 to 32k.
Fetched is what `PoolClient.load` takes for blocks of the same size that lie in the node's memory,
on its SSD alone (the page cache may have them), at a peer over tcp on loopback, or at one that is
100 ms farther away; every daemon is a process of its own. In brackets what was estimated before: a
client's quote, an engine's pace. `even at` is the rate at which a fetch takes as long as computing.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kimi_connect.wire import Outcome, Source, Stretch
from kimi_runtime.engine.fetch_price import worth_fetching
from kimi_runtime.engine.pace import PrefillPace
from kimi_runtime.engine.plan import Row, StepPlan
from kimi_runtime.engine.runner import TorchRunner, kv_block_bytes
from kimi_runtime.engine.sampler import RequestSampler
from kimi_runtime.models.weights import open_weights
from kimi_runtime.spec.request import Sampling
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.spec.worker import RandomWeights
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.umbp.client import PoolClient, open_pool

BLOCK_TOKENS = 64
STEP_TOKENS = 512
DEPTHS = (0, 1024, 4096, 16_384, 32_768 - STEP_TOKENS)
TOKENS = (64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
CALL_KEY = b"benchmark" * 4
DEADLINE_S = 60.0
SOURCES = {"dram": Source.MEMORY, "ssd": Source.SSD, "peer": Source.PEER, "far": Source.PEER}
FAR_S = 0.1

SERVE = """
import asyncio, sys
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.transfer import open_transport
from kimi_runtime.transfer.chaos import ChaosTransport, Fault
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.remote import service
class Far:
    seed, delay_s = 0, float(sys.argv[2])
    def draw(self, dice):
        return Fault.DELAY
async def open_far(name, **given):
    return ChaosTransport(await open_transport(name, **given), Far())
if Far.delay_s:
    service.open_transport = open_far
async def main():
    async with running(UmbpSpec.model_validate_json(sys.argv[1])) as daemon:
        print(daemon.url, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):  # a line: leave the rest to the SSD
            print(len(daemon.tier.evict(1 << 30)), flush=True)
asyncio.run(main())
"""


class Computing:
    """Prefill steps of kimi-nano, timed by depth."""

    def __init__(self, threads: int) -> None:
        spec, weights = open_weights(RandomWeights())
        blocks = (DEPTHS[-1] + STEP_TOKENS) // BLOCK_TOKENS
        self.block_bytes = kv_block_bytes(spec, BLOCK_TOKENS)
        memory = private_memory(blocks * self.block_bytes)
        self._runner = TorchRunner(
            spec, weights, blocks=blocks, block_tokens=BLOCK_TOKENS, memory=memory, threads=threads
        )
        sampling = Sampling(temperature=0.0, max_tokens=1)
        self._samplers = {0: RequestSampler(sampling, (1,), spec.vocab_size, random_seed=1)}
        self.pace = PrefillPace()
        self._times = {start: self._step(start, STEP_TOKENS) for start in DEPTHS}
        self._short = {n: self._step(0, n) for n in TOKENS if n < STEP_TOKENS}

    def seconds(self, tokens: int) -> float:
        """Measured: full steps by linear interpolation between the depths."""
        if tokens in self._short:
            return self._short[tokens]
        return sum(self._at(start) for start in range(0, tokens, STEP_TOKENS))

    def _at(self, depth: int) -> float:
        after = next(start for start in DEPTHS if start >= depth)
        before = max(start for start in DEPTHS if start <= depth)
        if after == before:
            return self._times[depth]
        part = (depth - before) / (after - before)
        return (1 - part) * self._times[before] + part * self._times[after]

    def _step(self, start: int, tokens: int) -> float:
        ids = tuple((7919 * n) % 2048 for n in range(tokens))
        blocks = tuple(range(-(-(start + tokens) // BLOCK_TOKENS)))
        plan = StepPlan((Row(0, start, ids, blocks, sample=True),))
        took = []
        for _ in range(3):
            begun_s = time.perf_counter()
            self._runner.run(plan, self._samplers)
            took.append(time.perf_counter() - begun_s)
            self.pace.step([(start, tokens)], took[-1])
        return statistics.median(took[1:])


class Daemons:
    """Processes of their own, ended on `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, dram_bytes: int, away_s: float = 0.0, **more: Any) -> str:
        """A daemon, and its URL; each read from a peer takes it `away_s` longer."""
        spec = UmbpSpec.model_validate(
            {
                "name": name,
                "port": 0,
                "socket": self._folder / f"{name}.sock",
                "arena": Path("/dev/shm") / f"{self._folder.name}-{name}",
                "dram_bytes": dram_bytes,
                "call_key": self._folder / "key",
                "lends": True,
                **more,
            }
        )
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(spec.model_dump(mode="json")), str(away_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running[name] = process
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def evict(self, name: str) -> None:
        """Empty a daemon's memory."""
        process = self._running[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("evict\n")
        process.stdin.flush()
        process.stdout.readline()

    def close(self) -> None:
        """End all of them."""
        for process in reversed(self._running.values()):
            process.communicate()
        for left in Path("/dev/shm").glob(f"{self._folder.name}-*"):
            left.unlink()


def metric(url: str, name: str) -> float:
    """A figure of a daemon."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


class Fetching:
    """Loads of runs that one source has; `put` makes a run that only this one has."""

    def __init__(
        self,
        name: str,
        reader: PoolClient,
        owner: PoolClient,
        url: str,
        evict: Callable[[], None],
        *,
        first: int,
    ) -> None:
        """Keys are numbered from `first`; `evict` empties the owner's memory."""
        self.name, self._reader, self._owner, self._url = name, reader, owner, url
        self._evict, self._next = evict, first

    async def once(self, count: int, size: int) -> tuple[float, float]:
        """Seconds to load a run of so many new blocks, and what was quoted before."""
        keys = self._new(count)
        data = memoryview(bytes(range(256)) * (size // 256))
        if self.name == "ssd":  # or what is new would be evicted for what was read the round before
            await asyncio.to_thread(self._evict)
        assert await self._owner.store(keys, [data] * count, deadline_s=DEADLINE_S) == count
        if self.name == "ssd":
            await self._leave_on_ssd(keys)
        while await self._reader.held(keys) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        into = [memoryview(bytearray(size)) for _ in range(count)]
        quoted = await self._reader.quote(keys, block_bytes=size)
        assert {one.source for one in quoted} == {SOURCES[self.name]}, quoted
        begun_s = time.perf_counter()
        got = await self._reader.load(keys, into, deadline_s=DEADLINE_S)
        took_s = time.perf_counter() - begun_s
        assert got == (count, Outcome.HIT), got
        return took_s, sum(one.seconds for one in quoted)

    def _new(self, count: int) -> list[bytes]:
        self._next += count
        return [n.to_bytes(16, "big") for n in range(self._next - count, self._next)]

    async def _on_ssd(self) -> float:
        return await asyncio.to_thread(metric, self._url, "kimistack_umbp_ssd_blocks")

    async def _leave_on_ssd(self, keys: Sequence[bytes]) -> None:
        before = await self._on_ssd()
        self._owner.used(keys)
        until = before + len(keys)
        while await self._on_ssd() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        in_memory = True
        while in_memory:  # what was written last is pinned for a moment
            await asyncio.to_thread(self._evict)
            quoted = await self._owner.quote(keys, block_bytes=1)
            in_memory = any(one.source is Source.MEMORY for one in quoted)


async def measure(folder: Path, lengths: Sequence[int], rounds: int, threads: int) -> None:
    """Print the table of these lengths."""
    (folder / "key").write_bytes(CALL_KEY)
    (folder / "key").chmod(0o600)
    computing = Computing(threads)
    size, most = computing.block_bytes, TOKENS[-1] // BLOCK_TOKENS
    daemons = Daemons(folder)
    try:
        room = 8 * most * size
        urls = {"owner": daemons.start("owner", room)}
        peers = [{"name": "owner", "url": urls["owner"]}]
        urls["reader"] = daemons.start("reader", room, peers=peers)
        urls["far"] = daemons.start("far", room, FAR_S, peers=peers)
        ssd = {"folder": folder / "ssd", "capacity": 40 * room, "segment": "64MiB"}
        urls["disk"] = daemons.start("disk", 2 * most * size, ssd=ssd)
        clients = {name: await open_pool(folder / f"{name}.sock", CALL_KEY) for name in urls}
        who = {
            "dram": ("reader", "reader"),
            "ssd": ("disk", "disk"),
            "peer": ("reader", "owner"),
            "far": ("far", "owner"),
        }
        sources = [
            Fetching(
                *(name, clients[reader], clients[owner], urls[owner]),
                partial(daemons.evict, owner),
                first=1 + (n << 40),
            )
            for n, (name, (reader, owner)) in enumerate(who.items())
        ]

        def empty() -> None:
            for name in urls:
                daemons.evict(name)

        await report(computing, sources, lengths, rounds, empty)
        for client in clients.values():
            await client.aclose()
    finally:
        daemons.close()


async def report(
    computing: Computing,
    sources: Sequence[Fetching],
    lengths: Sequence[int],
    rounds: int,
    empty: Callable[[], None],
) -> None:
    """One line for each length, and the crossover."""
    size = computing.block_bytes
    for source in sources:  # what a daemon that runs for a while has learnt
        for count in (1, 64, 8, 128, 32, 4):
            await source.once(count, size)
    print(f"{size} bytes a block of {BLOCK_TOKENS} tokens; ms (estimated)\n")
    print(
        "| tokens | computed | even at | dram | ssd | peer | far | sooner (!: thought otherwise) |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---|")
    right = total = 0
    crossover: dict[str, int] = {}
    for tokens in lengths:
        await asyncio.to_thread(empty)  # or what is new would be evicted for what was read before
        compute_s, cells = computing.seconds(tokens), []
        estimated_s = computing.pace.seconds(tokens, 0) or 0.0
        cells.append(f"{1e3 * compute_s:.1f} ({1e3 * estimated_s:.1f})")
        cells.append(f"{tokens // BLOCK_TOKENS * size / compute_s / 1e6:.0f} MB/s")
        verdicts = []
        for source in sources:
            taken = [await source.once(tokens // BLOCK_TOKENS, size) for _ in range(rounds)]
            fetch_s, quoted_s = (statistics.median(one) for one in zip(*taken, strict=True))
            cells.append(f"{1e3 * fetch_s:.1f} ({1e3 * quoted_s:.1f})")
            stretch = Stretch(tokens // BLOCK_TOKENS, SOURCES[source.name], quoted_s)
            chosen = worth_fetching(
                [stretch], block_tokens=BLOCK_TOKENS, before=0, compute=computing.pace.seconds
            )
            sooner, thought = fetch_s < compute_s, chosen.blocks > 0
            verdicts.append(("fetch" if sooner else "compute") + ("" if sooner == thought else "!"))
            right, total = right + (sooner == thought), total + 1
            if sooner:
                crossover.setdefault(source.name, tokens)
        print(f"| {tokens} | {' | '.join(cells)} | {', '.join(verdicts)} |", flush=True)
    where = ", ".join(f"{name} from {tokens}" for name, tokens in crossover.items()) or "never"
    print(f"\nsummary: sooner fetched: {where} tokens on; the estimate is right in {right}/{total}")


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, nargs="+", choices=TOKENS, default=TOKENS, help="rows of the table"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), options.tokens, options.rounds, options.threads))


if __name__ == "__main__":
    main()
