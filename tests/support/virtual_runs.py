"""One run of a simulated cluster: work, then peace, then the accounts."""

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mishaps import DAMAGE, Blow, Plan, Step, Storm, Upset, none
from pool_daemon import keys_of
from virtual_cluster import Cluster, simulated
from virtual_network import Network
from virtual_processes import Engine
from virtual_time import VirtualLoop

SHM = Path("/dev/shm")
RUN_S = 600.0
"""Of virtual time; what takes longer hangs."""

Scenario = Callable[[Cluster], Awaitable[None]]


class Run(NamedTuple):
    """What happened while the scenario ran."""

    trace: list[Step]
    blows: list[tuple[int, Step, Blow]]
    loaded: int
    """Blocks that engines got."""


async def everyday(cluster: Cluster) -> None:
    """Put, get, get from a peer, keep that, put into the stock, two puts at once, evict, get from
    SSD, read in place, drain.
    """
    a, b = cluster.engines["e-a"], cluster.engines["e-b"]
    first, into_stock, beside, more = keys_of(3), keys_of(4, 50), keys_of(4, 80), keys_of(10, 100)
    await a.store(first)
    await a.load(first)
    await asyncio.sleep(0.1)  # the feed tells
    await b.load(first)
    await b.load(first)
    a.used(first)
    await asyncio.sleep(0.05)  # they are written to SSD
    await a.store(into_stock)
    await asyncio.sleep(0.1)
    await b.load(into_stock)
    async with asyncio.TaskGroup() as group:
        group.create_task(a.store(beside))
        group.create_task(a.store(more))
    await a.load(more)
    await a.load(first)
    await a.lend(first, 1.2)
    await cluster.nodes["a"].drain(1.0)
    await b.load(first)
    await b.load(more)


def run(scenario: Scenario, *, seed: int = 0, plan: Plan = none) -> Run:
    """Run it on two daemons; AssertionError or TimeoutError where an account does not balance."""
    folder = SHM if SHM.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=folder) as home,
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        network = Network(loop, seed, plan)
        with simulated(network, seed):
            return runner.run(_run(Cluster(loop, network, Path(home)), scenario))


async def _run(cluster: Cluster, scenario: Scenario) -> Run:
    ssd = {"capacity": "640KiB", "segment": "64KiB", "io_threads": 1}
    cluster.add("a", ["b"], ssd={"folder": cluster.folder / "ssd", **ssd})
    cluster.add("b", ["a"])
    network = cluster.network
    async with asyncio.timeout(RUN_S), cluster.running():
        await scenario(cluster)
        steps = len(network.trace)
        await cluster.heal()
        await cluster.works_again(keys_of(4, 1000))
        await cluster.settled()
        damage = any(blow.what in DAMAGE for *_, blow in network.blows)
        assert damage or not cluster.corrupt, f"{cluster.corrupt} blocks were written over"
    loaded = sum(engine.loaded for engine in cluster.engines.values())
    return Run(network.trace[:steps], network.blows, loaded)


async def busy(cluster: Cluster) -> None:
    """Engines at work beside each other, on chains that they share."""
    dice = cluster.network.dice

    async def work(engine: Engine) -> None:
        for _ in range(8):
            start, length = 5 * dice.randrange(4), dice.randrange(1, 6)
            keys = keys_of(length, start)
            match dice.randrange(6):
                case 0 | 1:
                    await engine.store(keys)
                case 2:
                    engine.used(keys)
                case 3:
                    await engine.lend(keys, dice.choice((0.0, 0.4, 1.4)))
                case _:
                    await engine.load(keys)
            await asyncio.sleep(dice.choice((0.0, 0.001, 0.1)))

    async with asyncio.TaskGroup() as group:
        for engine in cluster.engines.values():
            group.create_task(work(engine))
            group.create_task(work(engine))
    if dice.randrange(2):
        await cluster.nodes["b"].drain(1.0)


def first_of_each(trace: Sequence[Step]) -> list[tuple[int, Step]]:
    """The first step of each kind, by whom and what it is about."""
    found: dict[tuple[str, ...], tuple[int, Step]] = {}
    for number, step in enumerate(trace):
        found.setdefault((step.kind, step.who, step.what), (number, step))
    return list(found.values())


UPSETS = tuple(
    (upset, whom)
    for upset in Upset
    for whom in ("a", "b", "e-a", "e-b")
    if not whom.startswith("e-") or upset in (Upset.KILLED, Upset.RESTARTED, Upset.LEAPT)
)
"""What can happen to whom."""


def storm(seed: int) -> Run:
    """Busy engines, and blows drawn from a seed."""
    return run(busy, seed=seed, plan=Storm(random.Random(~seed), UPSETS))
