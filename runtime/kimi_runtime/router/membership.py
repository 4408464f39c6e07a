"""Workers and pools that come and go: the fleet's file, read again whenever it changes.

Whoever writes the file replaces it as a whole. A worker that is no longer in it gets nothing new
and is forgotten once nothing of this router can still be there. A file that cannot be read changes
nothing: what was known still holds.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from kimi_runtime import clock
from kimi_runtime.router.client import PeerClient
from kimi_runtime.router.discovery import Fleet, Member
from kimi_runtime.router.follow import Feeds
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.spec.fleet_file import FleetFile
from kimi_runtime.spec.router import FleetSpec, PoolEndpoint, WorkerEndpoint

LOOK_S = 0.5

_log = logging.getLogger(__name__)


class Membership:
    """Keeps a router's fleet and feeds in line with a FleetSpec. Its tasks belong to `tasks`."""

    def __init__(
        self,
        fleet: Fleet,
        feeds: Feeds,
        ledger: Ledger,
        tasks: asyncio.TaskGroup,
        client: Callable[[str, str], PeerClient],
        *,
        linger_s: float,
        told: Callable[[FleetSpec], None] = lambda _: None,
    ) -> None:
        """`linger_s`: the longest a request that was sent to a worker may need it.

        `told` hears of every file that was taken, after its workers and pools were.
        """
        self._told = told
        self._fleet, self._feeds, self._ledger, self._group = fleet, feeds, ledger, tasks
        self._client, self._linger_s = client, linger_s
        self._workers: dict[str, WorkerEndpoint] = {}
        self._pools: dict[str, PoolEndpoint] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    async def watch(self, path: Path) -> None:
        """Follow the file until cancelled; then all it started ends too."""
        file = FleetFile(path, "the fleet's file", _complain)
        try:
            while True:
                found = file.changed()
                if found is not None:
                    self._take(found)
                self._settle(now_s=clock.now_s())
                await asyncio.sleep(LOOK_S)
        finally:
            for name in list(self._tasks):
                self._end(name)

    def update(self, spec: FleetSpec, *, now_s: float) -> None:
        """Have exactly these workers and pools."""
        workers = {one.name: one for one in spec.workers}
        pools = {one.name: one for one in spec.pools}
        for name in self._workers.keys() - workers.keys():
            self._fleet.leave(name, now_s=now_s)
        for name, worker in workers.items():
            self._have_worker(name, worker)
        for name, pool in list(self._pools.items()):
            if pools.get(name) != pool:
                self._end(name)
                self._feeds.remove(name)
                del self._pools[name]
        for name in pools.keys() - self._pools.keys():
            self._pools[name] = pools[name]
            self._feeds.add(self._client(name, pools[name].url), pool=True)
            self._start(name, [self._feeds.follow(name)])

    def _take(self, spec: FleetSpec) -> None:
        self.update(spec, now_s=clock.now_s())
        self._told(spec)
        counts = {"workers": len(spec.workers), "pools": len(spec.pools)}
        _log.info("fleet changed", extra={"fields": counts})

    def _have_worker(self, name: str, worker: WorkerEndpoint) -> None:
        if self._workers.get(name) == worker:
            self._fleet.come_back(name)
            return
        if name in self._workers:
            self._drop(name)
        client = self._client(name, worker.url)
        member = Member(worker, client)
        self._workers[name] = worker
        self._fleet.join(member)
        self._feeds.add(client, pool=False)
        self._start(name, [self._fleet.watch(member), self._feeds.follow(name)])

    def _settle(self, *, now_s: float) -> None:
        """Forget workers that left and that no request can still name."""
        for name in list(self._workers):
            left_s = self._fleet[name].left_s
            late = left_s is not None and now_s - left_s > self._linger_s
            if late and not self._ledger.in_flight(name):
                self._drop(name)

    def _drop(self, name: str) -> None:
        self._end(name)
        self._feeds.remove(name)
        self._fleet.drop(name)
        del self._workers[name]

    def _start(self, name: str, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        self._tasks[name] = [self._group.create_task(one, name=f"follow {name}") for one in work]

    def _end(self, name: str) -> None:
        for task in self._tasks.pop(name, []):
            task.cancel()


def _complain(why: str) -> None:
    _log.error("fleet unchanged", extra={"fields": {"why": why}})
