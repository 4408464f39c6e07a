"""The other daemons: who they are, what they hold as their feeds tell, and how they behave.

What is known of their blocks is advisory: a wrong entry costs a miss. Who is asked is EXACT, so
that an owner that is gone, restarted or behind is not asked for what it had.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kimi_runtime import clock
from kimi_runtime.errors import KimistackError
from kimi_runtime.spec.fleet_file import FleetFile
from kimi_runtime.spec.router import PoolEndpoint
from kimi_runtime.umbp.feed import FollowState
from kimi_runtime.umbp.index import Index
from kimi_runtime.umbp.remote.calls import OwnerCalls
from kimi_runtime.umbp.remote.choice import owner_to_ask
from kimi_runtime.umbp.remote.health import OwnerHealth
from kimi_runtime.umbp.rpc.tls import Tls
from kimi_runtime.umbp.speed import MeasuredCost
from kimi_runtime.umbp.tiers.base import TierCost

LOOK_S = 0.5
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0

SPEED_PRIOR = TierCost(latency_s=5e-3, bytes_per_s=1e9)
"""Before anything was fetched; benchmarks/umbp_peers.py measures a machine's own figure."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Owner:
    """One other daemon."""

    endpoint: PoolEndpoint
    calls: OwnerCalls
    health: OwnerHealth = field(default_factory=OwnerHealth)
    blocks: Counter[str] = field(default_factory=Counter)
    """Blocks asked for, by what became of them."""
    bytes: int = 0
    seconds: float = 0.0
    """Of fetches that brought something."""
    speed: MeasuredCost = field(default_factory=lambda: MeasuredCost(SPEED_PRIOR))
    """Of fetches, from the request to checked bytes in memory."""
    fetching: int = 0
    """Fetches under way."""

    @property
    def name(self) -> str:
        """As it is listed."""
        return self.endpoint.name


class Owners:
    """Every other daemon, followed by tasks of `tasks`. `own_name` is never one of them."""

    def __init__(
        self,
        own_name: str,
        http: aiohttp.ClientSession,
        call_keys: Sequence[bytes],
        tasks: asyncio.TaskGroup,
        *,
        tls: Tls | None = None,
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        self.index = Index()
        self._tls = tls
        self._own_name, self._http, self._call_keys = own_name, http, call_keys
        self._group, self._now_s = tasks, now_s
        self._owners: dict[str, Owner] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._known: set[str] = set()
        self._unread: list[str] = []

    def __iter__(self) -> Iterator[Owner]:
        """All of them."""
        return iter(list(self._owners.values()))

    def __len__(self) -> int:
        """How many."""
        return len(self._owners)

    def state(self, owner: Owner) -> FollowState:
        """How far its feed can be trusted."""
        return self.index.state(owner.name)

    def known(self, owner: Owner) -> int:
        """How many blocks it is thought to hold."""
        return self.index.keys(owner.name)

    def run(self, keys: Sequence[bytes]) -> int:
        """The most that one usable owner has of the leading run of `keys`."""
        runs = self.index.prefix_runs(keys)
        return max((runs.get(owner.name, 0) for owner in self.usable()), default=0)

    def choose(self, keys: Sequence[bytes]) -> tuple[Owner, int, int] | None:
        """Whom to ask for `keys`, the length of the run it has, and its epoch; None: nobody."""
        usable = {owner.name: owner for owner in self.usable()}
        runs = self.index.prefix_runs(keys)
        busy = {name: owner.fetching for name, owner in usable.items()}
        chosen = owner_to_ask(runs, usable, busy, keys[0])
        if chosen is None:
            return None
        epoch = self.index.resume_point(chosen)[0]
        return None if epoch is None else (usable[chosen], runs[chosen], epoch)

    def awaited(self) -> list[str]:
        """Those whose feeds have never told all, or the list of them while it was never read."""
        return self._unread or sorted(self._owners.keys() - self._known)

    def doubt(self, owner: Owner) -> None:
        """The owner is not what its feed said: ask it nothing until the feed has begun anew."""
        if self._owners.get(owner.name) is owner:
            self.index.disconnected(owner.name)

    def update(self, endpoints: Sequence[PoolEndpoint]) -> None:
        """Have exactly these."""
        wanted = {one.name: one for one in endpoints if one.name != self._own_name}
        for name, owner in list(self._owners.items()):
            if wanted.get(name) != owner.endpoint:
                self._leave(name)
        for name in wanted.keys() - self._owners.keys():
            url = wanted[name].url
            calls = OwnerCalls(self._http, name, url, self._call_keys, tls=self._tls)
            self._owners[name] = Owner(wanted[name], calls)
            follow = self._follow(self._owners[name])
            self._following[name] = self._group.create_task(follow, name=f"umbp-follow {name}")

    async def watch(self, path: Path) -> None:
        """Have who is in the file, until cancelled. One that can't be read changes nothing."""
        file = FleetFile(path, "the list of peers", _complain)
        self._unread = [f"the list {path}"]
        while True:
            found = await asyncio.to_thread(file.changed)
            if found is not None:
                self._unread = []
                self.update(found.pools)
                log.info("umbp: %d peers are listed", len(self))
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """Follow nobody any more."""
        for name in list(self._owners):
            self._leave(name)

    def named(self, name: str) -> Owner | None:
        """The one that is listed as `name`."""
        return self._owners.get(name)

    def holders(self, key: bytes) -> int:
        """How many of them hold a block, as far as can be trusted."""
        held = self.index.prefix_runs([key])
        return sum(self.index.state(name) is FollowState.EXACT for name in held)

    def listed(self, key: bytes) -> bool:
        """Whether any of them is said to hold a block, also one that can't be asked now."""
        return bool(self.index.prefix_runs([key]))

    def usable(self) -> list[Owner]:
        """Those that may be asked now."""
        now_s = self._now_s()
        return [
            owner
            for owner in self._owners.values()
            if self.state(owner) is FollowState.EXACT and owner.health.usable(now_s)
        ]

    def _leave(self, name: str) -> None:
        del self._owners[name]
        self._known.discard(name)
        self._following.pop(name).cancel()
        self.index.forget(name)

    async def _follow(self, owner: Owner) -> None:
        try:
            await self._follow_feed(owner)
        finally:
            await owner.calls.aclose()

    async def _follow_feed(self, owner: Owner) -> None:
        index, name = self.index, owner.name
        backoff_s, told = FIRST_BACKOFF_S, ""
        while True:
            try:
                async with aclosing(owner.calls.feed(*index.resume_point(name))) as lines:
                    async for line in lines:
                        if self._owners.get(name) is not owner:
                            return  # taken off the list: its index is gone
                        if not index.apply(name, line):
                            break  # a gap: ask again, for a snapshot
                        if index.state(name) is FollowState.EXACT:
                            told, backoff_s = "", FIRST_BACKOFF_S
                            self._known.add(name)
                why = "it ended"
            except KimistackError as exc:
                why = str(exc)
            index.disconnected(name)
            if why != told:  # also when it starts and then shows an expired certificate
                log.warning("umbp: the feed of %s is lost: %s", name, why)
                told = why
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


def _complain(why: str) -> None:
    log.error("umbp: the peers are as before: %s", why)
