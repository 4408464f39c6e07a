"""Bringing a request's KV in before it is scheduled: local blocks, then a hand-off, then the pool.

This happens outside the scheduler, so nobody else's steps wait. Bytes arrive in blocks reserved for
the request; a block counts only after its tag was checked. Every wait has a deadline, and every
failure means that the missing tokens are computed instead.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kimi_connect.wire import Outcome, Stretch
from kimi_runtime import clock
from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.fetch_price import Worth, worth_fetching
from kimi_runtime.engine.freed import Freed
from kimi_runtime.engine.geometry import BlockView
from kimi_runtime.engine.pace import PrefillPace
from kimi_runtime.engine.pull import Pulled
from kimi_runtime.engine.request import Fetched, Request
from kimi_runtime.engine.scheduler import SealedBlock
from kimi_runtime.engine.state_blocks import blocks_of_state, gather, state_bindings
from kimi_runtime.engine.states import StateMemory
from kimi_runtime.engine.take import HandOffReader, blocks_lacking
from kimi_runtime.spec.request import HandOff
from kimi_runtime.umbp.checkpoints import Checkpoints

_DISTRUSTED_KEYS = 65_536


class LoadResult(Protocol):
    """How many leading blocks were loaded and verified, and why it is not all of them."""

    @property
    def blocks(self) -> int:
        """Length of the leading run."""

    @property
    def outcome(self) -> Outcome:
        """HIT if that is all of them."""


class Pool(Protocol):
    """What the engine needs of the node's KV pool; `umbp.client.PoolClient` is one.

    A missing or slow pool is an outcome or a number, never an exception.
    """

    async def load(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str,
    ) -> LoadResult:
        """Copy the leading run of `keys` into `into`, verified. Writes nothing after it returns."""

    async def store(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str,
    ) -> int:
        """Keep leading blocks; returns how many are held now."""

    async def quote(
        self, keys: Sequence[bytes], *, block_bytes: int, deadline_s: float
    ) -> Sequence[Stretch]:
        """The leading run of `keys` the pool has, with seconds to load; none if it is silent."""

    def used(self, keys: Sequence[bytes]) -> None:
        """Tell the pool of blocks found here, which it would otherwise think nobody needs."""


class Fetcher:
    """Fills requests' blocks from elsewhere."""

    def __init__(
        self,
        blocks: KvBlocks,
        view: BlockView,
        counters: EngineCounters,
        *,
        reader: HandOffReader | None,
        pool: Pool | None,
        deadline_s: float,
        freed: Freed,
        states: StateMemory | None = None,
        checkpoints: Checkpoints | None = None,
        keep: Callable[[Iterable[SealedBlock]], None] | None = None,
    ) -> None:
        """`states` are those of a model that has them; `checkpoints` keeps them in the pool.

        `keep` is given the full blocks that a hand-off brought: a node's pool that has the blocks
        computed there without those before them has ends of prompts that nobody finds.
        """
        self._blocks, self._view, self._counters = blocks, view, counters
        self._reader, self._pool = reader, pool
        self._deadline_s, self._freed = deadline_s, freed
        self._states, self._checkpoints, self._keep = states, checkpoints, keep
        self.pace = PrefillPace()
        """How fast prompts are computed here, which what is fetched is weighed against."""
        self._reserving = asyncio.Lock()
        self._reserved: dict[int, list[int]] = {}
        self._quarantined: list[int] = []
        self._distrusted: OrderedDict[bytes, None] = OrderedDict()

    def distrust(self, keys: Sequence[bytes]) -> None:
        """Use what these keys name no more: not the blocks here, and none brought in."""
        self._blocks.forget(keys)
        for key in keys:
            self._distrusted[key] = None
        while len(self._distrusted) > _DISTRUSTED_KEYS:
            self._distrusted.popitem(last=False)

    def holders(self) -> list[list[int]]:
        """Reserved and quarantined blocks, for `KvBlocks.check_integrity`."""
        return [*self._reserved.values(), self._quarantined]

    async def fetch(self, request: Request, take: HandOff | None) -> None:
        """Give the request what KV there is. If this raises, the request holds nothing."""
        if self._states is not None:
            if take is None or not await self._with_state(request, self._states, take):
                await self._from_checkpoint(request, self._states)
            return
        if take is None and self._pool is None:
            return
        size = request.chain.block_tokens
        request.blocks = self._blocks.acquire(request.reusable_keys)
        request.computed = len(request.blocks) * size
        if self._pool is not None and request.blocks:
            self._pool.used(request.reusable_keys[: len(request.blocks)])
        try:
            if take is not None:
                await self._from_hand_off(request, take)
            if self._pool is not None and request.computed % size == 0:
                await self._from_pool(self._pool, request)
        except BaseException:
            blocks, request.blocks, request.computed = request.blocks, [], 0
            self._blocks.release(blocks)
            self._freed()
            raise

    async def _with_state(self, request: Request, states: StateMemory, take: HandOff) -> bool:
        """Take all of a hand-off over, and the state behind it; False if that is not to be had.

        Blocks that are here already are not read. Any number of blocks is no use without the state.
        """
        known, size = len(request.tokens) - 1, request.chain.block_tokens
        told = take.progress_url is not None and take.state_bytes == states.state_bytes
        keys = request.reusable_keys
        if not told or take.tokens != known or len(self._trusted(keys)) < len(keys):
            self._failed(request, "state")
            return False
        if not self._may_read(request, take):
            return False
        request.blocks = self._blocks.acquire(keys)
        lacking = range(len(request.blocks), -(-known // size))
        extra = blocks_of_state(states.state_bytes, self._view(0).nbytes)
        bindings = [request.chain.binding(n, request.tokens[:known]) for n in lacking]
        bindings += state_bindings(request.chain, request.tokens[:known], extra)
        pulled, whole = Pulled(0), False
        try:
            pulled = await self._pull(request, take, lacking.start, bindings)
            whole = pulled.blocks == len(bindings)
            if whole:
                copies = [self._view(n) for n in self._reserved[request.number][len(lacking) :]]
                gather(copies, states.state(request.number))
        finally:
            self._settle(
                request,
                len(lacking) if whole else 0,
                "hand_off",
                still_written=pulled.still_written,
            )
            if not whole:
                blocks, request.blocks, request.computed = request.blocks, [], 0
                self._blocks.release(blocks)
                self._freed()
        self._counters.hand_offs_taken += whole
        return whole

    async def _from_checkpoint(self, request: Request, states: StateMemory) -> None:
        """Go on from the deepest boundary of which the pool brings blocks and state."""
        if self._checkpoints is None:
            return
        keys = self._trusted(request.reusable_keys)
        found, run = await self._checkpoints.deepest(keys, deadline_s=self._deadline_s)
        if run > found:
            request.refused.add(run * request.chain.block_tokens)
        reserved = await self._reserve(request, found, within_s=self._deadline_s) if found else None
        if reserved is None:
            return
        restored = 0
        try:
            result = await self._checkpoints.restore(
                keys[:found],
                [self._view(block) for block in reserved],
                states.state(request.number),
                deadline_s=self._deadline_s,
                tenant=request.tenant,
            )
            restored = result.blocks
            if result.outcome not in (Outcome.HIT, Outcome.MISS):
                self._counters.pool_failures[result.outcome.value] += 1
        finally:
            self._settle(request, restored, "pool")
            if not restored:
                states.drop(request.number)

    async def _from_hand_off(self, request: Request, take: HandOff) -> None:
        if not self._may_read(request, take):
            return
        trusted = len(self._trusted(request.reusable_keys))
        indices, matching = blocks_lacking(request, take, trusted)
        if not matching:
            self._failed(request, "keys")
        if not indices:
            self._counters.hand_offs_taken += matching
            return
        bindings = [request.chain.binding(index, request.tokens) for index in indices]
        pulled = Pulled(0)
        try:
            pulled = await self._pull(request, take, indices.start, bindings)
        finally:
            self._settle(request, pulled.blocks, "hand_off", still_written=pulled.still_written)
        if pulled.failure is None:
            self._counters.hand_offs_taken += matching

    def _may_read(self, request: Request, take: HandOff) -> bool:
        """Whether anything of the hand-off may be read; it is noted why not."""
        refusal = "no_transport" if self._reader is None else self._reader.refusal(take)
        if refusal is not None:
            self._failed(request, refusal)
        return refusal is None

    async def _pull(
        self, request: Request, take: HandOff, first: int, bindings: Sequence[bytes]
    ) -> Pulled:
        """Reserve room for the hand-off's blocks from number `first` on, and read them there.

        What was reserved is left to be settled.
        """
        # A worker short of blocks would be worst off computing the prompt: wait while the lease
        # leaves time for the transfer itself.
        room_s = max(0.0, take.lease_s - 2 * self._deadline_s)
        reserved = await self._reserve(request, len(bindings), within_s=room_s)
        if reserved is None:
            self._failed(request, "no_room")
            return Pulled(0, failure="no_room")
        assert self._reader is not None
        result = await self._reader.pull(take, first, bindings, reserved)
        request.hand_off_bytes += result.moved_bytes
        request.hand_off_early_bytes += result.early_bytes
        self._counters.hand_off_bytes += result.moved_bytes
        self._counters.hand_off_early_bytes += result.early_bytes
        self._counters.hand_off_blocks += result.blocks
        if result.transport is not None:
            self._counters.hand_off_transports[result.transport] += 1
        if result.failure is not None:
            self._failed(request, result.failure)
        return result

    def _failed(self, request: Request, why: str) -> None:
        """What the hand-off did not bring is computed, and whoever asked is told why."""
        self._counters.hand_off_failures[why] += 1
        request.hand_off_failure = why

    async def _from_pool(self, pool: Pool, request: Request) -> None:
        lacking = self._trusted(request.reusable_keys[len(request.blocks) :])
        until_s = clock.now_s() + self._deadline_s
        worth = await self._worth(pool, request, lacking)
        if worth.refused:
            self._counters.pool_failures["dear"] += 1
        if not worth.blocks:
            return
        keys = lacking[: worth.blocks]
        reserved = await self._reserve(request, len(keys), within_s=self._deadline_s)
        if reserved is None:
            self._counters.pool_failures["no_room"] += 1
            return
        loaded = 0
        try:
            views = [self._view(block) for block in reserved]
            left_s = max(0.001, until_s - clock.now_s())
            if worth.within_s is not None:
                left_s = min(left_s, worth.within_s)
            result = await pool.load(keys, views, deadline_s=left_s, tenant=request.tenant)
            loaded = result.blocks
            if result.outcome not in (Outcome.HIT, Outcome.MISS):
                self._counters.pool_failures[result.outcome.value] += 1
        finally:
            self._settle(request, loaded, "pool")

    async def _worth(self, pool: Pool, request: Request, keys: Sequence[bytes]) -> Worth:
        """How much of what the pool has of `keys` to fetch."""
        stretches: Sequence[Stretch] = ()
        if keys:
            size = self._view(0).nbytes
            stretches = await pool.quote(keys, block_bytes=size, deadline_s=self._deadline_s)
        return worth_fetching(
            stretches,
            block_tokens=request.chain.block_tokens,
            before=request.computed,
            compute=self.pace.seconds,
        )

    def _trusted(self, keys: list[bytes]) -> list[bytes]:
        """The leading run of `keys` that is not distrusted."""
        if not self._distrusted:
            return keys
        return keys[: next((n for n, key in enumerate(keys) if key in self._distrusted), None)]

    def _settle(
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

    async def _reserve(
        self, request: Request, count: int, *, within_s: float
    ) -> Sequence[int] | None:
        """`count` blocks for bytes to arrive in; None if there was no room in time. In order of
        arrival, so that a large fetch is not passed by small ones for ever.
        """
        try:
            async with asyncio.timeout(within_s), self._reserving:
                while (reserved := self._blocks.allocate(count)) is None:
                    self._freed.fetch.clear()
                    await self._freed.fetch.wait()
        except TimeoutError:
            return None
        self._reserved[request.number] = reserved
        return reserved
