"""Which blocks every worker and pool holds, from their feeds.

What is known here is advisory: a wrong entry costs a miss, never a wrong answer. A broken feed is
followed again with growing pauses, from where it broke off if the owner still has that.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from kimi_runtime.errors import KimistackError
from kimi_runtime.router.client import PeerClient
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.router.view import KvSource
from kimi_runtime.spec.umbp import FeedBatch, FeedHello, FeedSnapshotPage
from kimi_runtime.umbp.feed import FollowState
from kimi_runtime.umbp.index import Index

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0

_log = logging.getLogger(__name__)


class Found(NamedTuple):
    """Tokens of a prompt's leading run: by worker in its own memory and in its pool; all pools."""

    own: dict[str, int]
    pooled: dict[str, int]
    pools: tuple[KvSource, ...]
    checkpoints: dict[str, tuple[int, ...]]
    """Positions of states in a worker's own memory, for the workers whose model needs one."""


class Feeds:
    """The followed owners: workers by name, and pools by name."""

    def __init__(
        self,
        workers: Sequence[PeerClient],
        pools: Sequence[PeerClient],
        *,
        evicted: Callable[[str, Sequence[bytes]], None] | None = None,
    ) -> None:
        """`evicted` hears of blocks that a worker gave up."""
        self._evicted = evicted
        self._clients = {client.name: client for client in (*workers, *pools)}
        self._pools = {client.name for client in pools}
        self._index = Index()
        self.held = self._index.held
        """How many blocks an owner holds; None unless its copy here is exact."""

    def add(self, client: PeerClient, *, pool: bool) -> None:
        """A new owner: `follow` it."""
        self._clients[client.name] = client
        if pool:
            self._pools.add(client.name)

    def remove(self, owner: str) -> None:
        """An owner that is gone for good, with all it was thought to hold."""
        self._clients.pop(owner, None)
        self._pools.discard(owner)
        self._index.forget(owner)

    @property
    def owners(self) -> Sequence[str]:
        """Names of everybody who is followed."""
        return list(self._clients)

    @property
    def pooled(self) -> bool:
        """Whether there is a pool."""
        return bool(self._pools)

    def pools_of(self, node: str) -> set[str]:
        """The pools that a worker on the node uses; of one that names no node any may be."""
        return self._pools & {node} if node else set(self._pools)

    def pool(self, name: str) -> PeerClient | None:
        """The pool's client; None if it is not one of ours."""
        return self._clients.get(name) if name in self._pools else None

    def states(self) -> dict[str, FollowState]:
        """How far each owner's copy can be trusted."""
        return {name: self._index.state(name) for name in self._clients}

    def keys_held(self) -> dict[str, int]:
        """How many blocks each owner is thought to hold."""
        return {name: self._index.keys(name) for name in self._clients}

    def cached_tokens(
        self,
        geometries: Mapping[str, Geometry],
        keys: Mapping[Geometry, Sequence[bytes]],
        nodes: Mapping[str, str],
        pieces: Mapping[str, int] | None = None,
    ) -> Found:
        """Who has how much of the prompt; see `pools_of`. `pieces` are those of a state, by worker,
        of workers whose model has one.

        While workers of several geometries run, no pool is named: each has blocks of any of them.
        """
        runs = {geometry: self._index.prefix_runs(run) for geometry, run in keys.items()}
        own = dict.fromkeys(geometries, 0)
        pooled = own.copy()
        last, held, in_pools, size, most = None, dict[str, int](), dict[str, int](), 0, 0
        for worker, geometry in geometries.items():
            if geometry is not last:  # hashing it takes longer than all the rest
                last, held, size = geometry, runs[geometry], geometry.block_tokens
                in_pools = {pool: held[pool] for pool in held.keys() & self._pools}
                most = max(in_pools.values(), default=0)
            if worker in held:
                own[worker] = held[worker] * size
            if most:
                node = nodes.get(worker, "")
                pooled[worker] = (in_pools.get(node, 0) if node else most) * size
        states = self._checkpoints(geometries, keys, pieces) if pieces else {}
        sources: tuple[KvSource, ...] = ()
        if self._pools and len(runs) == 1:
            (geometry,), (held,) = runs, runs.values()
            sources = tuple(
                KvSource(
                    *(name, name, self._index.tier(name) or "dram", run * geometry.block_tokens),
                    states[geometry].get(name, ()) if geometry in states else None,
                )
                for name, run in held.items()
                if name in self._pools
            )
        own_states = {
            worker: states[geometry].get(worker, ())
            for worker, geometry in (geometries.items() if states else ())
            if geometry in states
        }
        return Found(own, pooled, sources, own_states)

    def _checkpoints(
        self,
        geometries: Mapping[str, Geometry],
        keys: Mapping[Geometry, Sequence[bytes]],
        pieces: Mapping[str, int],
    ) -> dict[Geometry, dict[str, tuple[int, ...]]]:
        """Positions of states by owner, for the geometries whose model has states."""
        needed = {geometry: pieces[name] for name, geometry in geometries.items() if name in pieces}
        return {
            geometry: {
                owner: tuple(blocks * geometry.block_tokens for blocks in behind)
                for owner, behind in self._index.checkpoints(keys[geometry], count).items()
            }
            for geometry, count in needed.items()
        }

    async def follow(self, owner: str) -> None:
        """Keep one owner's copy up to date until cancelled."""
        index, client = self._index, self._clients[owner]
        backoff_s, told = FIRST_BACKOFF_S, ""
        while True:
            try:
                async with aclosing(client.feed(*index.resume_point(owner))) as lines:
                    async for line in lines:
                        told, backoff_s = "", FIRST_BACKOFF_S
                        if not index.apply(owner, line):
                            break  # a gap: ask again, for a snapshot
                        self._tell(owner, line)
                why = "it ended"
            except KimistackError as exc:
                why = str(exc)
            index.disconnected(owner)
            if why != told:  # also when it is reached at last, and not trusted
                _log.warning("feed lost", extra={"fields": {"owner": owner, "why": why}})
                told = why
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _tell(self, owner: str, line: FeedHello | FeedSnapshotPage | FeedBatch) -> None:
        if self._evicted is None or owner in self._pools or not isinstance(line, FeedBatch):
            return
        removed = [event.key for event in line.events if event.op == "remove"]
        if removed:
            self._evicted(owner, [bytes.fromhex(key) for key in removed if key is not None])
