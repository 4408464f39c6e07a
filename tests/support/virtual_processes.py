"""The processes of a simulated cluster: daemons, and engines with an oracle over what they get."""

import asyncio
import errno
import fcntl
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from kimi_connect.arena import Arena
from kimi_connect.wire import Outcome
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.assembly import Memory
from kimi_runtime.umbp.client import PoolClient
from kimi_runtime.umbp.control.drain import drain
from kimi_runtime.umbp.daemon import _engines
from kimi_runtime.umbp.journal import NoJournal
from kimi_runtime.umbp.memory import open_arena
from kimi_runtime.umbp.proto import control_pb2
from kimi_runtime.umbp.retention import tool_gap_reuse
from kimi_runtime.umbp.rpc.peers import PeerService
from kimi_runtime.umbp.rpc.server import RpcServer
from kimi_runtime.umbp.state import DaemonState
from kimi_runtime.umbp.tiers.dram import OWN_WRITER
from pool_daemon import CALL_KEY, blocks_of, targets
from virtual_network import Face
from virtual_streams import process_ended
from virtual_time import Process

if TYPE_CHECKING:
    from virtual_cluster import Cluster

BLOCK = 6000
POISON = b"\xee" * BLOCK
DEADLINE_S = 2.0
GRACE_S = 1.0
"""What an operation may take beyond its deadline: to end what it began (`client.ANSWER_S`)."""


class Node:
    """A daemon: started, killed and started again at the same place or another."""

    def __init__(self, cluster: "Cluster", spec: UmbpSpec, host: str) -> None:
        self.cluster, self.spec, self.host = cluster, spec, host
        self.process = Process(spec.name)
        self.process.alive = False
        self.clients: Any = None
        self.state: Any = None
        self._face: Face | None = None
        self._memory: Any = None
        self._stop = asyncio.Event()
        self._starting = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._corrupt = 0

    async def start(self) -> None:
        """Serve from now on; nothing happens if it does."""
        async with self._starting:
            if self._serving is not None and not self.process.alive:
                await asyncio.wait({self._serving})
            if not self.process.alive:
                await self._start()

    async def _start(self) -> None:
        wall_leap_s = self.process.wall_leap_s
        self.process = Process(self.spec.name)
        self.process.wall_leap_s = wall_leap_s
        self._corrupt, self.clients = self.corrupt, None
        self.state = self._face = None
        self._stop = asyncio.Event()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = self.process.start(self._serve(started))
        await asyncio.wait({self._serving, started}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done() and self.process.alive:
            self._serving.result()

    async def _serve(self, started: "asyncio.Future[None]") -> None:
        spec, process = self.spec, self.process
        state = DaemonState(spec.name, [CALL_KEY])
        arena, journal, kept = open_arena(spec, own_writer=OWN_WRITER)
        memory = Memory(arena, journal, kept)
        try:
            async with _engines(spec, state, memory, None, tool_gap_reuse) as made:
                server = RpcServer(state.call_keys, state.refused)
                PeerService(state.remote).add_to(server)
                face = Face(process, server, state, spec.feed_interval)
                self.clients, self.state, self._face = made, state, face
                faces = self.cluster.network.faces
                faces[self.host] = [one for one in faces[self.host] if one.process.alive] + [face]
                started.set_result(None)
                await self._stop.wait()
                state.pulse.close()
        finally:
            if process.alive:
                arena.retire()
                spec.arena.unlink()
            elif self.clients is not None and self.clients.second is not None:
                self.clients.second.tier.log.close()
            arena.close()

    async def stop(self) -> None:
        """Stop in order."""
        self._stop.set()
        if self._serving is not None:
            await asyncio.wait({self._serving})
            if self.process.alive:
                self._serving.result()
        self.process.alive = False

    def kill(self) -> None:
        """End it where it stands."""
        if not self.process.alive:
            return
        self.process.kill()
        if self.clients is not None:
            pool = self.clients.pool
            pool._shelf.journal = pool._reservations.journal = NoJournal()
            if self.clients.second is not None:
                volume = self.clients.second.tier.log._volume
                volume.health.write_failed(OSError(errno.EIO, "killed"))  # writes nothing more
        process_ended(self.cluster.loop, self.process)
        if self._face is not None:
            self._face.gone()

    @property
    def corrupt(self) -> int:
        """Blocks dropped because what an engine read of them had other tags."""
        clients = self.clients
        return self._corrupt + (0 if clients is None else clients.pool.counters.corrupt)

    def revoke(self) -> None:
        """Take back what it can of its engines' stocks; nothing happens if it does not serve."""
        if self.clients is not None and self.process.alive:
            self.clients.pool.revoke()

    def clear(self) -> None:
        """Forget every block in memory; nothing happens if it does not serve."""
        if self.clients is not None and self.process.alive:
            self.clients.pool.clear()

    async def drain(self, within_s: float) -> Any:
        """As `kimistack umbp drain`; None if it does not serve, or ended meanwhile."""
        if self.clients is None or not self.process.alive:
            return None
        asked = control_pb2.DrainRequest(within_ms=int(1e3 * within_s))
        return await outcome_of(self.process.start(drain(self.state, asked)))

    def idle(self) -> bool:
        """Whether nothing is under way, held or half done."""
        c = self.clients
        pool, second = c.pool, c.second
        pool.revoke()
        pool.check_integrity()
        pool.funnel.check()
        return not (
            c.remote.fetcher.under_way
            or c.remote.lender.loans
            or (second and (second.promoter.under_way or second.writer.queued))
            or pool.open_pins
            or pool.stocks
            or pool.reservations(quarantined=False)
            or pool.reservations(quarantined=True)
            or pool.funnel.open
        )


async def outcome_of(task: "asyncio.Task[Any]") -> Any:
    """What became of a process' task; None if the process was killed."""
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


class Engine:
    """An engine of a node; what it is given is compared with what the key stands for."""

    def __init__(self, cluster: "Cluster", name: str, node: Node) -> None:
        self.cluster, self.name, self.node = cluster, name, node
        self.loaded = 0
        self.start()

    def start(self) -> None:
        """A new process."""
        self.process = Process(self.name)
        given = {"name": self.name, "group_bytes": (), "connect_s": 1.0}
        self.client = self.process.context.run(
            lambda: PoolClient(self.node.spec.socket, CALL_KEY, **given)
        )

    async def store(self, keys: Sequence[bytes]) -> int | None:
        """Put blocks; None if it was killed meanwhile."""
        blocks = blocks_of(keys, BLOCK)
        return await self._do(self.client.store(keys, blocks, deadline_s=DEADLINE_S))

    async def load(self, keys: Sequence[bytes]) -> int:
        """Get blocks; how many came. AssertionError if one is wrong."""
        into = targets(len(keys), BLOCK)
        got = await self._do(self.client.load(keys, into, deadline_s=DEADLINE_S))
        if got is None:
            return 0
        self.loaded += got.blocks
        assert into[: got.blocks] == blocks_of(keys[: got.blocks], BLOCK), "wrong bytes"
        assert (got.outcome is Outcome.HIT) == (got.blocks == len(keys))
        for view in into:
            view[:] = POISON
        self.cluster.given_back += into
        return got.blocks

    async def lend(self, keys: Sequence[bytes], for_s: float) -> None:
        """Read blocks where they lie, for so long."""
        lent = await self._do(self.client.lend(keys, deadline_s=DEADLINE_S))
        if lent is None:
            return
        await asyncio.sleep(for_s)
        copies = [b"".join(parts) for parts in lent.parts]
        if await self._do(lent.give_back()):
            assert copies == blocks_of(keys[: len(copies)], BLOCK), "wrong bytes under a pin"

    def used(self, keys: Sequence[bytes]) -> None:
        """Say that they were used again."""
        if self.process.alive:
            self.process.context.run(self.client.used, keys)

    def kill(self) -> None:
        """End it where it stands."""
        if not self.process.alive:
            return
        self.process.kill()
        process_ended(self.cluster.loop, self.process)
        daemon = self.client._daemon
        daemon._closed = True
        arena, daemon.arena = daemon.arena, None
        if arena is not None:  # soon: what was killed in the middle of a step gets to its next wait
            self.cluster.loop.call_soon(_let_go, arena)

    async def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a call within its time."""
        if not self.process.alive:
            work.close()
            return None
        start_s = self.cluster.loop.time()
        result = await outcome_of(self.process.start(work))
        took_s = self.cluster.loop.time() - start_s
        assert took_s <= DEADLINE_S + GRACE_S, f"{took_s:.2f} s, {DEADLINE_S} s were given"
        return result


def _let_go(arena: Arena) -> None:
    """What the kernel does as a process ends, though a copy that is not over keeps its pages."""
    arena._set_lock(fcntl.F_UNLCK, 0, 0)
    arena.close()
