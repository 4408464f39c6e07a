"""Who waits for blocks to read into. Pure; the simulator runs it too.

Nobody holds a block while it waits. What a request found here goes back to the cache, where it is
the last to be forgotten, and is taken again together with the room for the rest, or not at all. So
there may be many who wait, and long: no circle of requests that each hold what another waits for
can close, and those who compute have all blocks but those that are read into just now.

Nobody is passed for ever: the line is served by rank, whoever is not first gets nothing however
little it wants, and what those of the scheduler's queue lack who were there before is left to them.
To compute what could be read takes as much room as to read it, so that leaving the line early
gains nobody anything.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.request import Request, order_of
from kimi_runtime.engine.scheduler import Scheduler

ROOM_DEADLINES = 6
"""For how many deadlines of one transfer the pool's blocks may wait for room: about as long as a
crowded memory takes to drain. Until then, computing them would find no room either.
"""


@dataclass(slots=True, eq=False)
class Place:
    """A request that is to have `total` blocks: the leading run of `keys` that is here, and others
    to read into, which `granted` is called with.
    """

    request: Request
    keys: Sequence[bytes]
    total: int
    granted: Callable[[list[int]], None]


class RoomLine:
    """Requests that are not in the scheduler's queue yet, because they are to be read for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._blocks = scheduler, scheduler.blocks
        self._places: list[Place] = []

    @property
    def waiting(self) -> bool:
        """Whether anybody waits."""
        return bool(self._places)

    @property
    def unclaimed(self) -> int:
        """Of the available blocks, those that nobody waits for, in this line or the queue. Below
        zero: so many more are waited for than are available.
        """
        scheduler = self._scheduler
        lacked = sum(scheduler.lacks(place.request) for place in self._places)
        return self._blocks.available - scheduler.lacking - lacked

    def enter(self, place: Place) -> None:
        """Grant the room at once, or take the request's blocks from it and let it wait."""
        request, blocks = place.request, self._blocks
        request.coming = min(place.total * request.chain.block_tokens, len(request.tokens))
        if not self._places and blocks.is_run(request.blocks, place.keys):  # it may keep them
            lacking = max(place.total - len(request.blocks), 0)
            if self._scheduler.has_room(request, lacking, total=place.total):
                fresh = blocks.allocate(lacking)
                assert fresh is not None, "room that was there is gone"
                request.computed = len(request.blocks) * request.chain.block_tokens
                place.granted(fresh)
                return
        give_back(request, blocks)
        insort(self._places, place, key=_order)
        self.retry()

    def leave(self, place: Place) -> None:
        """It waits no longer, if it still did; `retry` grants the next its turn."""
        if place in self._places:
            self._places.remove(place)

    def retry(self) -> None:
        """Blocks were given back: whoever is first may have them now."""
        while self._places and self._fits(self._places[0]):
            place = self._places.pop(0)
            fresh = take_up(place.request, self._blocks, place.keys, place.total)
            assert fresh is not None, "room that was there is gone"
            place.granted(fresh)

    def _fits(self, place: Place) -> bool:
        def needed() -> int:
            return self._blocks.needed(place.keys, place.total)

        return self._scheduler.make_room(place.request, needed, total=place.total)


def give_back(request: Request, blocks: KvBlocks) -> None:
    """The request holds nothing any more; what has a key stays cached."""
    held, request.blocks, request.computed = request.blocks, [], 0
    blocks.release(held)


def take_up(
    request: Request, blocks: KvBlocks, keys: Sequence[bytes], total: int = 0
) -> list[int] | None:
    """Give the request the leading run of `keys` that is here; blocks for the rest of `total`.

    None if there are fewer; the run is the request's nonetheless.
    """
    request.blocks = blocks.acquire(keys)
    request.computed = len(request.blocks) * request.chain.block_tokens
    return blocks.allocate(max(total - len(request.blocks), 0))


def _order(place: Place) -> tuple[float, int]:
    return order_of(place.request)
