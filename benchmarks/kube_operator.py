"""What the operator costs and how fast it is: one table from one operator process.

Latency from a resource to all its children, repair of a deleted child, requests of a settled
operator, time, memory and processor with many resources, and the sizes of the CRDs.

Run `python benchmarks/kube_operator.py` with KUBECONFIG naming an API server to load (it needs no
nodes), or without one for a server in memory, in a process of its own.
`--small` is a quick run. Requests pass through a proxy of this process that counts them.
"""

import argparse
import asyncio
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from cluster import Server
from fakekube import FakeKube
from fault_proxy import FaultProxy, kubeconfig
from http_kube import HttpKube
from kimi_operator.api.base import API_VERSION
from kimi_operator.api.schema import crds
from kimi_operator.clock import now_s
from kimi_operator.kube import ApiKube, TokenBucket, open_kube
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.errors import ClusterError
from operator_process import OperatorProcess, kept_running
from operator_world import nano

NAMESPACE = "operator-benchmark"
WITHIN_S = 3600.0
QUIET_S = 5.0
TICK_S = os.sysconf("SC_CLK_TCK")
Row = tuple[str, str]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    applied: int = 20
    repaired: int = 10
    resources: int = 500
    idle_s: float = 60.0


SMALL = Sizes(applied=4, repaired=3, resources=20, idle_s=10.0)


@dataclass
class Bench:
    """An API server, an operator behind a counting proxy, and a client beside it."""

    kube: ApiKube
    proxy: FaultProxy
    operator: OperatorProcess

    async def create(self, name: str) -> None:
        """What `kubectl apply` does."""
        document = nano()
        document["metadata"] = {"name": name, "namespace": NAMESPACE}
        await self.kube.create(document)

    async def resource(self, name: str) -> Manifest | None:
        return await self.kube.get(ObjectKey(API_VERSION, "KimiDeployment", NAMESPACE, name))

    async def applied(self, name: str) -> bool:
        """Whether a whole pass went through; its status comes after all its children."""
        return "pools" in (((await self.resource(name)) or {}).get("status") or {})

    async def metric(self, name: str) -> float:
        """Sum of a metric of the operator over its labels; 0 while it does not answer."""
        url = f"http://127.0.0.1:{self.operator.port}/metrics"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                lines = (await answer.text()).splitlines()
        except aiohttp.ClientError:
            return 0.0
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    @property
    def pid(self) -> int:
        """Of the operator."""
        assert self.operator.process is not None
        return self.operator.process.pid

    def rss_mib(self) -> float:
        """The operator's resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_s(self) -> float:
        """Processor time the operator has taken."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK_S


async def until(holds: Callable[[], Awaitable[bool]], every_s: float = 0.02) -> float:
    """Seconds until it holds."""
    began_s = now_s()
    async with asyncio.timeout(WITHIN_S):
        while not await holds():  # noqa: ASYNC110 - what is asked is another process
            await asyncio.sleep(every_s)
    return now_s() - began_s


async def from_apply_to_children(bench: Bench, count: int) -> Row:
    took = []
    for number in range(count):
        name = f"one-{number}"
        await bench.create(name)
        took.append(await until(lambda name=name: bench.applied(name)))  # type: ignore[misc]
    return f"apply to all children created ({count} runs)", percentiles(took)


async def repair(bench: Bench, count: int) -> Row:
    await bench.proxy.quiet(QUIET_S, within_s=WITHIN_S)
    took = []
    for number in range(count):
        at = ObjectKey("v1", "Service", NAMESPACE, f"one-{number}-router")
        child = await bench.kube.get(at)
        assert child is not None
        old = child["metadata"]["uid"]
        await bench.kube.delete(at, uid=old)

        async def back(at: ObjectKey = at, old: str = old) -> bool:
            found = await bench.kube.get(at)
            return found is not None and found["metadata"]["uid"] != old

        took.append(await until(back))
    return f"repair of a deleted Service ({count} runs)", percentiles(took)


async def steady(bench: Bench, seconds: float, what: str) -> list[Row]:
    await bench.proxy.quiet(QUIET_S, within_s=WITHIN_S)
    since_s, cpu_s = now_s(), bench.cpu_s()
    await asyncio.sleep(seconds)
    calls = Counter(
        "Lease"
        if passed.of_lease
        else "watch"
        if passed.watches
        else "write"
        if passed.writes
        else "read"
        for passed in bench.proxy.passed
        if passed.at_s >= since_s
    )
    listed = ", ".join(f"{calls[kind]} {kind}" for kind in ("write", "read", "watch", "Lease"))
    minute = (bench.cpu_s() - cpu_s) * 60 / seconds
    return [
        (f"requests in {seconds:.0f} quiet s, {what}", listed),
        (f"processor a quiet minute, {what}", f"{minute:.2f} s"),
    ]


async def many(bench: Bench, count: int, idle_s: float) -> list[Row]:
    before_mib = bench.rss_mib()
    began_s = now_s()
    for number in range(count):
        await bench.create(f"many-{number}")

    async def all_applied() -> bool:
        found = await bench.kube.list(f"{API_VERSION}/KimiDeployment", NAMESPACE)
        return all("pools" in (item.get("status") or {}) for item in found)

    await until(all_applied, every_s=2.0)
    rows = [(f"{count} resources made and settled", f"{now_s() - began_s:.0f} s")]
    await bench.proxy.quiet(QUIET_S, within_s=WITHIN_S)
    grown_mib = bench.rss_mib() - before_mib
    mib = f"{bench.rss_mib():.0f} MiB ({grown_mib / count:.2f} MiB a resource)"
    rows += [(f"memory after making {count}", mib), *await steady(bench, idle_s, f"{count} there")]
    return rows


async def restart(bench: Bench, resources: int) -> list[Row]:
    bench.operator.signalled(signal.SIGKILL)
    began_s, starts = now_s(), bench.operator.starts

    async def all_passed() -> bool:
        passes = await bench.metric("kimi_operator_pass_seconds_count")
        return bench.operator.starts > starts and passes >= resources

    await until(all_passed, every_s=0.25)
    took_s = now_s() - began_s
    wrote = len(bench.proxy.writes(began_s))
    mib = bench.rss_mib()
    return [
        (f"start with {resources} resources, a pass of each", f"{took_s:.1f} s, {wrote} writes"),
        ("memory after that start", f"{mib:.0f} MiB"),
    ]


def percentiles(took: list[float]) -> str:
    """`p50 … p95 …` of seconds."""
    ordered = sorted(took)
    p95 = ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)]
    return f"p50 {statistics.median(ordered):.2f} s, p95 {p95:.2f} s"


async def measured(sizes: Sizes, upstream: str, folder: Path) -> AsyncIterator[Row]:
    """Every row of the table, as it is known."""
    for name, text in sorted(crds().items()):
        yield f"CRD {name}", f"{len(text.encode()) / 1000:.1f} kB"
    async with bench_at(upstream, folder) as bench:
        await until(lambda: _answers(bench), every_s=0.2)
        yield "memory with no resource", f"{bench.rss_mib():.0f} MiB"
        yield await from_apply_to_children(bench, sizes.applied)
        yield await repair(bench, min(sizes.repaired, sizes.applied))
        for row in await steady(bench, sizes.idle_s, f"{sizes.applied} there"):
            yield row
        for row in await many(bench, sizes.resources, sizes.idle_s):
            yield row
        for row in await restart(bench, sizes.resources + sizes.applied):
            yield row


async def _answers(bench: Bench) -> bool:
    return await bench.metric("kimi_operator_leading") > 0


@asynccontextmanager
async def bench_at(upstream: str, folder: Path) -> AsyncIterator[Bench]:
    """An operator at work on an API server without TLS or with a certificate nobody checks."""
    direct, proxy = FaultProxy(upstream), FaultProxy(upstream)
    async with direct.running() as plain, proxy.running() as counted:
        operator = OperatorProcess(
            kubeconfig(folder / "operator.yaml", counted),
            NAMESPACE,
            "benchmark",
            folder / "operator.log",
            lease_s=60,
            environment={"KIMISTACK_WRITE_RATE": "500", "KIMISTACK_LOG_LEVEL": "warning"},
        )
        writes = TokenBucket(500, 500, now_s, asyncio.sleep)
        config = str(kubeconfig(folder / "client.yaml", plain))
        async with open_kube(writes, kubeconfig=config) as kube, kept_running(operator):
            yield Bench(kube, proxy, operator)


def _serve_fake(pipe: Any) -> None:
    async def serve() -> None:
        async with HttpKube(FakeKube(), settles=False).served() as url:
            pipe.send(url)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


@asynccontextmanager
async def api_server(given: str | None) -> AsyncIterator[tuple[str, str]]:
    """Address and name of an API server with our CRDs and an empty namespace."""
    if given:
        server = Server.of(Path(given))
        await asyncio.to_thread(server.install_crds)
        body: Manifest = {"metadata": {"name": NAMESPACE}}
        await asyncio.to_thread(server.call, "POST", "/api/v1/namespaces", body)
        _, version = await asyncio.to_thread(server.call, "GET", "/version")
        yield server.url, f"Kubernetes {version['gitVersion']}"
        return
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_fake, args=(theirs,))
    process.start()
    try:
        yield await asyncio.to_thread(ours.recv), "an API server in memory"
    finally:
        ours.send("end")
        process.join(timeout=10)
        process.kill()


async def run(sizes: Sizes, given: str | None) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        async with api_server(given) as (url, name):
            print(f"{name}; {platform.machine()}, {os.cpu_count()} cores shared with it")
            try:
                async for what, value in measured(sizes, url, Path(folder)):
                    print(f"{what:58} {value}", flush=True)
            except (ClusterError, TimeoutError):
                log = await asyncio.to_thread(Path(folder, "operator.log").read_text)
                sys.stderr.write(log[-4000:])
                raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a quick run")
    parser.add_argument("--resources", type=int, help="how many are many")
    parser.add_argument("--kubeconfig", default=os.environ.get("KUBECONFIG"))
    given = parser.parse_args()
    sizes = SMALL if given.small else Sizes()
    if given.resources:
        sizes = Sizes(sizes.applied, sizes.repaired, given.resources, sizes.idle_s)
    asyncio.run(run(sizes, given.kubeconfig))
