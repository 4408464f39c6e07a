"""The engines of a node that are connected to its daemon, and what they can be told is there.

Losing a connection ends its pins and puts its reservations in quarantine; they are freed when the
client comes back and says what it still writes, or when its process has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kimi_connect import wire
from kimi_connect.arena import Arena
from kimi_connect.states import deepest
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.peers import ProcessWatch
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.proving import Proving
from kimi_runtime.umbp.quote import quote
from kimi_runtime.umbp.remote.service import Remote
from kimi_runtime.umbp.second_tier import SecondTier
from kimi_runtime.umbp.tiers.dram import OWN_WRITER

log = logging.getLogger(__name__)


class Client(Protocol):
    """A connection of an engine, as those who keep account of them see it."""

    number: int
    name: str
    instance: bytes | None
    """Which client of which process it is, over its reconnects; None until it has proved itself."""

    def abort(self) -> None:
        """Close without flushing."""

    def open_process(self) -> int | None:
        """A pidfd of the client's process; None where there is none to be had."""


@dataclass(slots=True)
class Clients:
    """Every connected client and what is known of it."""

    pool: Pool
    arena: Arena
    arena_path: str
    call_keys: Sequence[bytes]
    changed: Callable[[], None]
    feed: FeedLog
    second: SecondTier | None = None
    remote: Remote | None = None
    proving: Proving = field(default_factory=Proving)
    crowded: asyncio.Event = field(default_factory=asyncio.Event)
    """Memory is fuller than it is to be: room is to be made."""
    draining: bool = False
    """Nothing new is taken: the daemon is to be stopped. What it has is served."""
    refused: int = 0
    """Connections that failed the challenge or broke the protocol."""
    _connections: dict[int, Client] = field(default_factory=dict)
    _watches: dict[bytes, ProcessWatch] = field(default_factory=dict)
    _number: int = 0

    def __len__(self) -> int:
        """How many are connected and authenticated."""
        return sum(connection.instance is not None for connection in self._connections.values())

    def next_number(self) -> int:
        """A number for a connection, never given before."""
        self._number += 1
        return self._number

    def held(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of `keys` that a PIN would find here, on SSD or at a peer."""
        return sum(stretch.blocks for stretch in self.quote(keys, 0))

    def quote(self, keys: Sequence[bytes], block_bytes: int) -> list[wire.Stretch]:
        """That run, by where it is and how long it takes to come."""
        fetcher = None if self.remote is None else self.remote.fetcher
        return list(quote(keys, block_bytes, self.pool, self.second, fetcher))

    def lacks(self, keys: Sequence[bytes]) -> bool:
        """Whether an SSD or a peer could go on with the run that memory has of `keys`."""
        on_ssd = self.second is not None and self.second.promoter.lacks(keys)
        return on_ssd or (self.remote is not None and self.remote.fetcher.lacks(keys))

    def deepest(self, boundaries: Sequence[bytes], pieces: int) -> int:
        """One more than the last boundary whose state is here, on SSD or at a peer; 0 for none."""
        block = self.pool.block
        return deepest(
            boundaries, pieces, lambda key: block(key) is not None or self.elsewhere(key)
        )

    def elsewhere(self, key: bytes) -> bool:
        """Whether the SSD, or any peer, is said to have a block; peers also that can't be asked."""
        on_ssd = self.second is not None and bool(self.second.tier.held([key]))
        return on_ssd or (self.remote is not None and self.remote.owners.listed(key))

    def close(self) -> None:
        """End every connection."""
        for connection in list(self._connections.values()):
            self.closed(connection)  # now, while there is an arena whose stocks can be taken back
            connection.abort()
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

    def opened(self, connection: Client) -> None:
        """A connection is there, not yet authenticated."""
        self._connections[connection.number] = connection

    def welcomed(self, connection: Client, hello: wire.Hello) -> None:
        """A client has proved itself; an older connection of the same client is over."""
        for other in list(self._connections.values()):
            if other.instance == hello.instance:
                self.closed(other)
                other.abort()
        connection.instance = hello.instance
        self.pool.reclaim(writer=hello.instance, writing=hello.writing)
        self._watch(connection, hello.instance)

    def closed(self, connection: Client) -> None:
        """A connection is lost or replaced."""
        if self._connections.pop(connection.number, None) is None:
            return
        instance, connection.instance = connection.instance, None
        self.pool.reader_gone(connection.number)
        self.pool.funnel.gone(connection.number)
        if instance is None:
            return
        held = self.pool.quarantine(instance)
        if held and instance not in self._watches:
            log.warning(
                "umbp: %d reservations of %s stay in quarantine until it reconnects or lets go of "
                "the arena: its process can't be watched from here",
                held,
                connection.name,
            )
        if not held:
            self._unwatch(instance)

    def process_ended(self, instance: bytes) -> None:
        """Nothing of this client can write any more."""
        self._watches.pop(instance, None)
        for connection in list(self._connections.values()):
            if connection.instance == instance:  # inherited by a child, which has no mapping
                self.closed(connection)
                connection.abort()
        freed = self.pool.writer_gone(instance)
        if freed:
            log.info("umbp: freed %d reservations of a process that ended", freed)

    def sweep(self) -> None:
        """Free what writers hold who are not connected, not watched, and no longer hold the arena.

        Those of a daemon before, as a rule: all that is known of them is their name. What readers
        left to lapse is counted as lost.
        """
        self.pool.funnel.sweep(lambda pin: self.pool.pinned_blocks(pin) > 0)
        connected = {connection.instance for connection in self._connections.values()}
        for writer in self.pool.writers() - connected - self._watches.keys() - {OWN_WRITER}:
            if not self.arena.held_by(writer):
                self.process_ended(writer)

    def _watch(self, connection: Client, instance: bytes) -> None:
        self._unwatch(instance)
        try:
            pidfd = connection.open_process()
        except ProcessLookupError:
            self.process_ended(instance)
            return
        if pidfd is not None:
            self._watches[instance] = ProcessWatch(pidfd, lambda: self.process_ended(instance))

    def _unwatch(self, instance: bytes) -> None:
        watch = self._watches.pop(instance, None)
        if watch is not None:
            watch.close()
