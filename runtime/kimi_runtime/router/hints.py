"""What pools are told of sessions (`POST /hint`): in batches, on the side, never waited for.

Hints are advice. What a pool is too slow for or cannot be told is dropped and counted; the next
hint of the same session says all that the lost one did, except the blocks of a turn.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

from kimi_runtime.errors import KimistackError
from kimi_runtime.router.client import PeerClient
from kimi_runtime.spec.umbp import HintBatch, HintRequest

BATCH_S = 0.05
"""Hints of this time travel together. Half of all tools are back within 0.3 s."""
BATCH_KEYS = 65_536
"""About 2.3 MB of JSON; one hint of a longer session travels alone."""
MAX_PENDING = 4096
TELL_S = 5.0

_log = logging.getLogger(__name__)

_Slot = tuple[str, str, str]


class Hints:
    """What each pool is still to be told. `pool` finds its client, None once it is gone."""

    def __init__(self, pool: Callable[[str], PeerClient | None]) -> None:
        self._pool = pool
        self._pending: dict[str, OrderedDict[_Slot, HintRequest]] = {}
        self._wanted = asyncio.Event()
        self._failing: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        """Hints by what became of them."""

    @property
    def pending(self) -> int:
        """Hints that are not told yet."""
        return sum(map(len, self._pending.values()))

    def tell(self, pool: str, hint: HintRequest) -> None:
        """Tell it soon. A newer word of where a session stands takes the place of an older one."""
        pending = self._pending.setdefault(pool, OrderedDict())
        slot = _slot(hint)
        older = pending.pop(slot, None)
        if older is not None:
            self.outcomes["merged"] += 1
            if not hint.keys and hint.kind in ("active", "paused"):
                hint = hint.model_copy(update={"keys": older.keys})
        pending[slot] = hint
        if len(pending) > MAX_PENDING:
            pending.popitem(last=False)
            self.outcomes["dropped"] += 1
        self._wanted.set()

    async def run(self) -> None:
        """Tell pools until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            busy: dict[str, asyncio.Task[None]] = {}
            while True:
                await self._wanted.wait()
                await asyncio.sleep(BATCH_S)
                self._wanted.clear()
                busy = {name: task for name, task in busy.items() if not task.done()}
                for name in list(self._pending):
                    if name not in busy:
                        busy[name] = tasks.create_task(self._tell_all(name), name=f"hint {name}")

    async def _tell_all(self, name: str) -> None:
        """Until nothing is left; what comes for a pool meanwhile is told by the same task."""
        while self._pending.get(name):
            batch = _batch(self._pending[name])
            client = self._pool(name)
            if client is None:
                self.outcomes["dropped"] += len(batch) + len(self._pending.pop(name))
                return
            try:
                await client.hint(HintBatch.model_construct(hints=batch), within_s=TELL_S)
            except KimistackError as exc:
                self.outcomes["failed"] += len(batch)
                if name not in self._failing:
                    _log.warning("pool not told", extra={"fields": {"pool": name, "why": str(exc)}})
                self._failing.add(name)
            else:
                self.outcomes["told"] += len(batch)
                self._failing.discard(name)
        del self._pending[name]


def _batch(pending: OrderedDict[_Slot, HintRequest]) -> tuple[HintRequest, ...]:
    batch: list[HintRequest] = []
    keys = 0
    while pending:
        slot, hint = next(iter(pending.items()))
        keys += len(hint.keys)
        if batch and keys > BATCH_KEYS:
            break
        batch.append(hint)
        del pending[slot]
    return tuple(batch)


def _slot(hint: HintRequest) -> _Slot:
    """Hints of one slot say the same thing at different times."""
    stands = hint.kind in ("active", "paused", "ended")
    return hint.tenant, hint.session, "" if stands else f"{hint.kind} {hint.child or ''}"
