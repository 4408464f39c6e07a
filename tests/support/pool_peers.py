"""Pool daemons of one deployment that know each other, and faults between them."""

import asyncio
import contextlib
from pathlib import Path

from kimi_runtime.transfer import open_transport
from kimi_runtime.transfer.chaos import ChaosTransport
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.feed import FollowState
from kimi_runtime.umbp.remote import service
from pool_daemon import CALL_KEY, pool_spec

SOON_S = 30.0


async def until(state, within_s=SOON_S):
    """Wait until `state()` is true."""
    async with asyncio.timeout(within_s):
        while not state():
            await asyncio.sleep(0.002)


class Faults:
    """A chaos plan that a test changes as it goes: `fault` meets every batch until it is None.

    `before` is called as each batch begins, after its owner has lent the blocks.
    """

    seed = 0
    delay_s = 0.05

    def __init__(self, monkeypatch):
        self.fault, self.before = None, lambda: None

        async def faulty(name, **given):
            return ChaosTransport(await open_transport(name, **given), self)

        monkeypatch.setattr(service, "open_transport", faulty)

    def draw(self, dice):
        """The fault of the next batch."""
        self.before()
        return self.fault(dice) if callable(self.fault) else self.fault


def peer_spec(folder: Path, name: str, peers=(), **changes):
    """A daemon called `name` in a folder of its own; `peers` are (name, url)."""
    (folder / name).mkdir(exist_ok=True)
    endpoints = [{"name": one, "url": url} for one, url in peers]
    return pool_spec(folder / name, name=name, peers=endpoints, lends=True, **changes)


@contextlib.asynccontextmanager
async def peer(folder: Path, name: str, peers=(), **changes):
    """A running daemon and a client of it; every account is balanced at the end."""
    async with running(peer_spec(folder, name, peers, **changes)) as daemon:
        client = await open_pool(daemon.spec.socket, CALL_KEY)
        try:
            yield daemon, client
        finally:
            await client.aclose()
            pool, remote = daemon.clients.pool, daemon.clients.remote
            await until(lambda: not remote.fetcher.under_way)
            pool.check_integrity()
            held = {block.key for block in pool.blocks()}
            if daemon.clients.second is None:
                assert set(daemon.clients.feed._held) == held
            assert pool.reservations(quarantined=False) == 0


def owner_of(daemon, name):
    """What a daemon knows of one of its peers."""
    return next(owner for owner in daemon.clients.remote.owners if owner.name == name)


async def knows(daemon, name, blocks):
    """Wait until a daemon has heard that its peer holds so many blocks."""
    owners, owner = daemon.clients.remote.owners, owner_of(daemon, name)
    await until(lambda: owners.known(owner) == blocks and owners.state(owner) is FollowState.EXACT)
