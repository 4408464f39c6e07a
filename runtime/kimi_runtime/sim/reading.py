"""Bringing KV into a simulated worker before a request is scheduled, as `engine.fetch` does. Pure.

Blocks that are here already, then what a named source has, then the node's pool. Room for what
arrives is waited for in production's own line; meanwhile nothing is kept here or at the source. A
read has a deadline; what it did not bring is computed.
"""

from collections.abc import Callable, Sequence

from kimi_runtime.engine.request import Request
from kimi_runtime.engine.room import ROOM_DEADLINES, Place, RoomLine, take_up
from kimi_runtime.engine.scheduler import Scheduler, SealedBlock
from kimi_runtime.sim.links import Links
from kimi_runtime.sim.pool import SimPool
from kimi_runtime.sim.timeline import Timeline
from kimi_runtime.sim.work import Read, Work

DEADLINE_S = 5.0
ROOM_S = ROOM_DEADLINES * DEADLINE_S


class Reader:
    """Reads for one worker. `touch` is called before blocks change, `schedule` when all is read,
    `brought` with full blocks from elsewhere than the node's pool: it may lack them.
    """

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        *,
        token_bytes: int,
        state_bytes: int,
        timeline: Timeline,
        links: Links,
        pool: SimPool | None,
        touch: Callable[[], None],
        schedule: Callable[[Work], None],
        brought: Callable[[list[SealedBlock]], None],
    ) -> None:
        self._name, self._blocks, self._token_bytes = name, scheduler.blocks, token_bytes
        self._line = RoomLine(scheduler)
        self._state_bytes, self._stateful = state_bytes, state_bytes > 0
        self._timeline, self._links, self.pool = timeline, links, pool
        self._touch, self._schedule, self._brought = touch, schedule, brought
        self.late = 0

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for room to read into."""
        return self._line.waiting

    @property
    def unclaimed(self) -> int:
        """Of the worker's available blocks, those that nobody waits for."""
        return self._line.unclaimed

    def begin(self, work: Work) -> None:
        """Give the request what KV there is, then schedule it."""
        request = work.request
        if self.pool is None and work.read is None:
            self._schedule(work)
            return
        keys = request.reusable_keys
        if self._stateful:  # what is here is without the state at its end
            self._refuse(request)
        else:
            take_up(request, self._blocks, keys)
        if self.pool is not None and request.blocks:
            self.pool.used(keys[: len(request.blocks)], now_s=self._timeline.now_s)
        self._next(work)

    def _refuse(self, request: Request) -> None:
        """Where all blocks are and no state, one is to be kept this time."""
        run = 0 if self.pool is None else self.pool.pool.held(request.reusable_keys)
        if self.pool is not None and run > self.pool.held(request.reusable_keys):
            request.refused.add(run * request.chain.block_tokens)

    def stop(self, work: Work) -> None:
        """Give up whatever is being read for it."""
        read, work.read = work.read, None
        place, work.place = work.place, None
        if place is not None:
            self._line.leave(place)
        if work.transfer is not None:
            self._links.cancel(work.transfer)
        if work.deadline is not None:
            work.deadline.cancel()
        reserved, work.blocks = work.blocks, []
        self._blocks.release(reserved)
        work.transfer = work.deadline = None
        if read is not None:
            read.release()

    def retry(self) -> None:
        """Blocks were given back: whoever waits for room may have it now."""
        self._line.retry()

    def _next(self, work: Work) -> None:
        """The named source first, then the node's pool, then nothing is left to read."""
        request = work.request
        read, work.read = work.read, None
        lacking = request.reusable_keys[len(request.blocks) :]
        if request.computed % request.chain.block_tokens or (self._stateful and request.computed):
            read, lacking = None, []  # it ends in a private tail, or with its state
        if read is not None:
            # what the last token is computed from may end with a full block: then there is no tail
            most = len(request.tokens) - request.samples
            read.tail = read.tail and bool(most % request.chain.block_tokens)
            read.count = read.hold(lacking[: max(read.until - len(request.blocks), 0)])
            if not read.count and not read.tail:
                read.release()
                read = None
        if read is None:
            read = self._from_pool(lacking)
        if read is None:
            if not self._from_ssd(work, lacking):
                self._schedule(work)
            return
        self._wait_for_room(work, read)

    def _wait_for_room(self, work: Work, read: Read) -> None:
        """Who gets room at once goes on; who has to wait keeps nothing at the source meanwhile."""
        request = work.request
        total = len(request.blocks) + read.count + read.tail
        keys = [] if self._stateful else request.reusable_keys
        place = Place(request, keys, total, lambda fresh: self._room(work, fresh))
        work.read, work.place = read, place
        if work.room_until_s is None:
            work.room_until_s = self._timeline.now_s + ROOM_S
        work.deadline = self._timeline.at(work.room_until_s, lambda: self._over(work, read))
        self._line.enter(place)
        if work.place is place and not read.tail:
            read.release()
            read.count = 0

    def _room(self, work: Work, fresh: list[int]) -> None:
        """There is room now. What is here, and what the source has, may have changed."""
        place, read, request = work.place, work.read, work.request
        assert place is not None
        assert read is not None
        work.place = None
        if work.deadline is not None:
            work.deadline.cancel()
        if read.tail:
            read.count = max(len(fresh) - 1, 0)
        elif not read.count:
            read.count = read.hold(request.reusable_keys[len(request.blocks) : place.total])
        surplus = fresh[read.count + read.tail :]
        self._blocks.release(surplus)
        self._move(work, read, fresh[: len(fresh) - len(surplus)])

    def _from_pool(self, keys: Sequence[bytes]) -> Read | None:
        pool = self.pool
        if pool is None or not keys or not pool.held(keys):
            return None
        pins: list[int] = []

        def pin(keys: Sequence[bytes]) -> int:
            number, held = pool.pin(keys, now_s=self._timeline.now_s)
            pins.append(number)
            return held

        def unpin() -> None:
            while pins:
                pool.unpin(pins.pop())

        return Read("pool", (f"{self._name}/host",), pin, unpin, count=pin(keys))

    def _from_ssd(self, work: Work, keys: Sequence[bytes]) -> bool:
        """Wait for the pool to read the next of `keys` from its SSD; False if nothing will come."""
        now_s = self._timeline.now_s
        if work.ssd_until_s is None:
            work.ssd_until_s = now_s + DEADLINE_S
        if self.pool is None or not keys or now_s >= work.ssd_until_s:
            return False
        if not self.pool.bring(keys, lambda: self._look_again(work), tenant=work.request.tenant):
            return False
        work.deadline = self._timeline.at(work.ssd_until_s, lambda: self._look_again(work))
        return True

    def _look_again(self, work: Work) -> None:
        """What was waited for is in the pool's memory, or it is late."""
        if work.left or work.deadline is None:
            return
        self._touch()
        work.deadline.cancel()
        work.deadline = None
        self._next(work)

    def _move(self, work: Work, read: Read, reserved: list[int]) -> None:
        work.deadline = self._timeline.after(DEADLINE_S, lambda: self._over(work, read))
        work.blocks = reserved
        request = work.request
        tokens = read.count * request.chain.block_tokens
        if read.tail:
            tokens = len(request.tokens) - len(request.blocks) * request.chain.block_tokens
        size, began_s = tokens * self._token_bytes, self._timeline.now_s
        size += self._state_bytes if tokens else 0
        work.transfer = self._links.start(
            read.links, size, lambda: self._arrived(work, read, began_s)
        )

    def _arrived(self, work: Work, read: Read, began_s: float) -> None:
        self._touch()
        if work.deadline is not None:
            work.deadline.cancel()
        work.read_s += self._timeline.now_s - began_s
        reserved, work.blocks = work.blocks, []
        work.read = work.transfer = work.deadline = None
        request, keys = work.request, work.request.reusable_keys
        first = len(request.blocks)
        shared = keys[first : first + len(reserved)]
        sealed = self._blocks.seal_run(reserved[: len(shared)], shared)
        request.blocks += [*sealed, *reserved[len(shared) :]]
        request.fetched.update(dict.fromkeys(range(first, len(request.blocks)), read.source))
        brought = []
        if read.links != (f"{self._name}/host",):
            tenant = request.tenant
            brought = [SealedBlock(*one, tenant) for one in zip(shared, sealed, strict=True)]
        most = len(request.tokens) - request.samples
        request.computed = min(len(request.blocks) * request.chain.block_tokens, most)
        read.release()
        if self.pool is not None and read.source == "pool" and not brought:
            self.pool.loaded(keys[: len(request.blocks)], now_s=self._timeline.now_s)
        self._brought(brought)
        self._next(work)

    def _over(self, work: Work, read: Read) -> None:
        """It came too late, or there was no room for it: what is here has to do."""
        if work.read is not read:
            return
        self._touch()
        self.late += 1
        waited = work.place is not None
        self.stop(work)
        if waited and not self._stateful:
            take_up(work.request, self._blocks, work.request.reusable_keys)
        self._schedule(work)
        self.retry()
