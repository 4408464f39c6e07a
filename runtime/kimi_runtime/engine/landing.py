"""Blocks that bytes arrive in: from when room is asked for until they are a request's, or nobody's.

Bytes arrive in blocks reserved for one request; a block counts only after its tag was checked.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.freed import Freed
from kimi_runtime.engine.request import Fetched, Request
from kimi_runtime.engine.room import Place, RoomLine, give_back, take_up
from kimi_runtime.engine.scheduler import Scheduler, SealedBlock

Keep = Callable[[Iterable[SealedBlock]], None]


class Landing:
    """Gives requests room to read into, and what was read."""

    def __init__(
        self, scheduler: Scheduler, counters: EngineCounters, freed: Freed, *, keep: Keep | None
    ) -> None:
        """`keep` is given the full blocks that a hand-off brought: a node's pool that has the
        blocks computed there without those before them has ends of prompts that nobody finds.
        """
        self._blocks, self._counters = scheduler.blocks, counters
        self._freed, self._keep = freed, keep
        self._line = RoomLine(scheduler)
        self._reserved: dict[int, list[int]] = {}
        self._quarantined: list[int] = []
        freed.room = self._line.retry

    def holders(self) -> list[list[int]]:
        """Reserved and quarantined blocks, for `KvBlocks.check_integrity`."""
        return [*self._reserved.values(), self._quarantined]

    @property
    def unclaimed(self) -> int:
        """Of the available blocks, those that nobody waits for."""
        return self._line.unclaimed

    def reserved(self, request: Request) -> list[int]:
        """The blocks that bytes for the request arrive in."""
        return self._reserved.get(request.number, [])

    async def room(
        self, request: Request, keys: Sequence[bytes], total: int, *, within_s: float
    ) -> bool:
        """Reserve blocks so that the request has `total` with the leading run of `keys` found here.

        That run is the request's from then on, and may be another than it had: while it waits, it
        holds nothing. False if there was no room in time; it has the run in that case too.
        """
        granted = asyncio.Event()

        def grant(fresh: list[int]) -> None:
            self._reserved[request.number] = fresh
            granted.set()

        place = Place(request, keys, total, grant)
        self._line.enter(place)
        if granted.is_set():
            return True
        self._freed()  # what it gave back may let another start
        try:
            async with asyncio.timeout(within_s):
                await granted.wait()
        except TimeoutError:
            if not granted.is_set():
                self._line.leave(place)
                take_up(request, self._blocks, keys)
                self._freed()
        except BaseException:
            self._line.leave(place)
            self.settle(request, 0, "pool")
            raise
        return granted.is_set()

    def settle(
        self, request: Request, good: int, source: Fetched, *, still_written: bool = False
    ) -> None:
        """The first `good` reserved blocks are the request's now; the others are given back."""
        reserved = self._reserved.pop(request.number, [])
        size, keys = request.chain.block_tokens, request.reusable_keys
        brought: list[SealedBlock] = []
        for block in reserved[:good]:
            index = len(request.blocks)
            shared = index < len(keys)
            request.blocks.append(self._blocks.seal(block, keys[index]) if shared else block)
            request.fetched[index] = source
            if shared and source == "hand_off":
                brought.append(SealedBlock(keys[index], request.blocks[-1], request.tenant))
        if self._keep is not None:
            self._keep(brought)
        most = len(request.tokens) - request.samples
        request.computed = min(len(request.blocks) * size, most)
        lost = reserved[good:]
        if still_written:
            self._quarantined.extend(lost)
            self._counters.quarantined_blocks = len(self._quarantined)
        else:
            self._blocks.release(lost)
            self._freed()

    def give_back(self, request: Request) -> None:
        """The request holds nothing any more."""
        give_back(request, self._blocks)
        self._freed()
