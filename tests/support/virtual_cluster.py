"""Pool daemons and their engines on one virtual loop, with an oracle over everything they return.

The daemons are the production ones from their sockets down: what is simulated is time, threads,
processes and the network between them (`virtual_time`, `virtual_network`). Arenas and SSD logs are
files of a folder.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import Iterator, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any

import grpc

from kimi_connect import small_puts
from kimi_connect.arena import Arena
from kimi_runtime import clock
from kimi_runtime.spec.router import PoolEndpoint
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.transfer import batches
from kimi_runtime.umbp import connection
from kimi_runtime.umbp import loading as engine_loading
from kimi_runtime.umbp import storing as engine_storing
from kimi_runtime.umbp.feed import FollowState
from kimi_runtime.umbp.remote import owners, service
from kimi_runtime.umbp.state import Phase
from mishaps import Upset, none
from pool_daemon import pool_spec
from virtual_network import Network
from virtual_processes import BLOCK, POISON, Engine, Node
from virtual_streams import open_process
from virtual_time import Clock, VirtualLoop

LEASE_S = 1.0
MOVE_HEARD_S = 0.5
LEAP_S = 20.0
WALL_LEAP_S = 3600.0
SETTLE_S = 120.0


@contextlib.contextmanager
def simulated(network: Network, seed: int) -> Iterator[None]:
    """Time, chance, threads and network as the simulation has them, until the way out."""
    dice = random.Random(seed)

    @contextlib.asynccontextmanager
    async def no_http() -> Any:
        yield None

    with contextlib.ExitStack() as changed:
        for where, name, stand_in in (
            (clock, "time", Clock),
            (Arena, "claim", network.claiming(Arena.claim)),
            (secrets, "token_bytes", lambda size=32: dice.randbytes(size)),
            (secrets, "randbits", dice.getrandbits),
            (grpc.aio, "insecure_channel", network.channel),
            (connection, "open_peer_process", open_process),
            (service, "open_transport", network.transport),
            (service, "open_http", no_http),
            (owners, "OwnerCalls", network.calls),
            (engine_loading, "INLINE_BYTES", -1),  # every copy is a step
            (engine_storing, "INLINE_BYTES", -1),
            (batches, "INLINE_BYTES", -1),
            (small_puts, "SMALL_PUT_BYTES", 3 * BLOCK),  # some of what is put is as small, some not
        ):
            changed.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, stand_in)
        yield


class Cluster:
    """Daemons that know each other, an engine at each, and what happens to them."""

    def __init__(self, loop: VirtualLoop, network: Network, folder: Path) -> None:
        self.loop, self.network, self.folder = loop, network, folder
        self.nodes: dict[str, Node] = {}
        self.engines: dict[str, Engine] = {}
        self.given_back: list[memoryview] = []
        """Targets of loads that are over: nothing may write to them."""
        self._twins: list[Node] = []
        self._tasks: asyncio.TaskGroup
        network.upset = self.upset

    def add(self, name: str, peers: Sequence[str], **changes: Any) -> None:
        """A daemon, not yet started, and its engine `e-NAME`."""
        self.nodes[name] = Node(self, self._spec(name, name, peers, **changes), f"{name}.0")
        self.engines[f"e-{name}"] = Engine(self, f"e-{name}", self.nodes[name])

    def _spec(self, name: str, folder: str, peers: Sequence[str], **changes: Any) -> UmbpSpec:
        (self.folder / folder).mkdir()
        fields = {
            "name": name,
            "peers": [{"name": one, "url": f"http://{one}.0:8100"} for one in peers],
            "lends": True,
            "dram_bytes": "128KiB",
            "reservation_ttl": LEASE_S,
            "pin_lease": LEASE_S,
            "peers_within": 0.5,
        }
        return pool_spec(self.folder / folder, **(fields | changes))

    @property
    def corrupt(self) -> int:
        """Blocks that daemons dropped because what an engine read of them had other tags."""
        return sum(node.corrupt for node in (*self.nodes.values(), *self._twins))

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Every daemon serves; on the way out all is stopped, and nothing is left."""
        async with asyncio.TaskGroup() as self._tasks:
            for node in self.nodes.values():
                await node.start()
            yield
        for engine in self.engines.values():
            await engine.client.aclose()
        for node in self.nodes.values():
            await node.stop()
        async with asyncio.timeout(SETTLE_S):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.1)
        assert not self.network.fabric.regions, "memory that peers can still reach"
        assert not self.loop.ends, "processes that are still watched"

    def upset(self, what: Upset, whom: str) -> None:
        """Something happens to a process."""
        one: Any = self.nodes.get(whom) or self.engines.get(whom)
        if one is None:
            return
        match what:
            case Upset.LEAPT:
                one.process.leap_s += LEAP_S
            case Upset.SET_BACK:
                one.process.wall_leap_s -= WALL_LEAP_S
            case Upset.SET_AHEAD:
                one.process.wall_leap_s += WALL_LEAP_S
            case Upset.KILLED:
                one.kill()
            case Upset.RESTARTED:
                one.kill()
                self._tasks.create_task(self._started(one), context=Context())
            case Upset.MOVED if whom in self.nodes:
                one.kill()
                self._tasks.create_task(self._moved(one), context=Context())
            case Upset.SHORT if whom in self.nodes:
                one.revoke()
            case Upset.CLEARED if whom in self.nodes:
                one.clear()
            case Upset.DOUBLED if whom in self.nodes:
                self._tasks.create_task(self._doubled(one), context=Context())

    async def _started(self, one: Any) -> None:
        if isinstance(one, Engine):
            one.start()
        else:
            await one.start()

    async def _moved(self, node: Node) -> None:
        node.host = f"{node.spec.name}.{self.loop.time():.6f}"
        await node.start()
        await asyncio.sleep(MOVE_HEARD_S)
        self._tell_where()

    async def _doubled(self, node: Node) -> None:
        name = node.spec.name
        spec = self._spec(
            name, f"{name}-twin-{len(self._twins)}", [p.name for p in node.spec.peers]
        )
        twin = Node(self, spec, node.host)
        self._twins.append(twin)
        await twin.start()

    def _tell_where(self) -> None:
        """Everybody hears where everybody is."""
        for node in self.nodes.values():
            if node.process.alive and node.clients is not None:
                peers = [
                    PoolEndpoint(name=p.name, url=f"http://{self.nodes[p.name].host}:8100")
                    for p in node.spec.peers
                ]
                update = node.clients.remote.owners.update
                node.process.context.run(update, peers)

    async def heal(self) -> None:
        """Nothing goes wrong any more, clocks are set; whoever is down is started again."""
        self.network.plan = none
        await asyncio.sleep(MOVE_HEARD_S + 0.1)  # restarts under way
        for twin in self._twins:
            twin.kill()
        for node in self.nodes.values():
            node.process.wall_leap_s = 0.0  # daemons whose clocks differ refuse each other's calls
            if not node.process.alive or (node.state and node.state.phase is Phase.DRAINED):
                node.kill()
                await node.start()
        async with asyncio.timeout(SETTLE_S):
            while any(node.clients is None for node in self.nodes.values()):
                await asyncio.sleep(0.1)
        for engine in self.engines.values():
            if not engine.process.alive:
                engine.start()
        self._tell_where()

    async def works_again(self, keys: Sequence[bytes]) -> None:
        """Each engine stores and loads, and gets what the others stored; all within SETTLE_S."""
        share = len(keys) // len(self.engines)
        async with asyncio.timeout(SETTLE_S):
            for n, engine in enumerate(self.engines.values()):
                own = keys[n * share : (n + 1) * share]
                while await engine.store(own) != share or await engine.load(own) != share:
                    await asyncio.sleep(0.5)
            for engine in self.engines.values():
                for n in range(len(self.engines)):
                    while await engine.load(keys[n * share : (n + 1) * share]) != share:
                        await asyncio.sleep(0.5)

    async def settled(self) -> None:
        """Nothing is held, and everybody knows what the others have, within SETTLE_S."""
        async with asyncio.timeout(SETTLE_S):
            while not (all(node.idle() for node in self.nodes.values()) and self._in_step()):
                await asyncio.sleep(0.5)
        assert all(view == POISON for view in self.given_back), "written to after its end"

    def _in_step(self) -> bool:
        """Whether every index is EXACT and says what its owner holds."""
        for node in self.nodes.values():
            index = node.clients.remote.owners.index
            for peer in node.spec.peers:
                feed = self.nodes[peer.name].clients.feed
                if index.state(peer.name) is not FollowState.EXACT:
                    return False
                known = all(peer.name in index.prefix_runs([key]) for key in feed._held)
                if not known or index.keys(peer.name) != len(feed):
                    return False
        return True
