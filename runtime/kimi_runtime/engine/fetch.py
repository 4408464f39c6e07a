"""Bringing a request's KV in before it is scheduled: local blocks, then a hand-off, then the pool.

This happens outside the scheduler, so nobody else's steps wait. Bytes arrive in blocks reserved for
the request; a block counts only after its tag was checked. Every wait has a deadline, and every
failure means that the missing tokens are computed instead. While a request waits for room it holds
nothing (`engine.room`), so what it has is looked at again afterwards.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from kimi_connect.wire import Outcome, Stretch
from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.fetch_price import Worth, worth_fetching
from kimi_runtime.engine.geometry import BlockView
from kimi_runtime.engine.landing import Landing
from kimi_runtime.engine.pace import PrefillPace
from kimi_runtime.engine.pull import Pulled
from kimi_runtime.engine.request import Request
from kimi_runtime.engine.room import ROOM_DEADLINES
from kimi_runtime.engine.state_blocks import blocks_of_state, gather, state_bindings
from kimi_runtime.engine.states import StateMemory
from kimi_runtime.engine.take import HandOffReader, blocks_lacking
from kimi_runtime.spec.request import HandOff
from kimi_runtime.umbp.block_pool import BlockPool
from kimi_runtime.umbp.checkpoints import Checkpoints

_DISTRUSTED_KEYS = 65_536


class Pool(BlockPool, Protocol):
    """What the engine needs of the node's KV pool; `umbp.client.PoolClient` is one."""

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
        landing: Landing,
        reader: HandOffReader | None,
        pool: Pool | None,
        deadline_s: float,
        states: StateMemory | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`states` are those of a model that has them; `checkpoints` keeps them in the pool."""
        self._blocks, self._view, self._counters = blocks, view, counters
        self._landing, self._reader, self._pool = landing, reader, pool
        self._deadline_s, self._room_s = deadline_s, ROOM_DEADLINES * deadline_s
        self._states, self._checkpoints = states, checkpoints
        self.pace = PrefillPace()
        """How fast prompts are computed here, which what is fetched is weighed against."""
        self._distrusted: OrderedDict[bytes, None] = OrderedDict()

    def distrust(self, keys: Sequence[bytes]) -> None:
        """Use what these keys name no more: not the blocks here, and none brought in."""
        self._blocks.forget(keys)
        for key in keys:
            self._distrusted[key] = None
        while len(self._distrusted) > _DISTRUSTED_KEYS:
            self._distrusted.popitem(last=False)

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
            self._landing.give_back(request)
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
        extra = blocks_of_state(states.state_bytes, self._view(0).nbytes)
        full = -(-known // size)

        def bindings() -> list[bytes]:
            lacking = range(len(request.blocks), full)
            chain, ids = request.chain, request.tokens[:known]
            made = [chain.binding(index, ids) for index in lacking]
            return made + state_bindings(chain, ids, extra)

        pulled, whole = Pulled(0), False
        try:
            pulled = await self._pull(request, take, full + extra, bindings)
            lacking = full - len(request.blocks)
            whole = pulled.failure is None and pulled.blocks == lacking + extra
            if whole:
                copies = [self._view(one) for one in self._landing.reserved(request)[lacking:]]
                gather(copies, states.state(request.number))
        finally:
            self._landing.settle(
                request, lacking if whole else 0, "hand_off", still_written=pulled.still_written
            )
            if not whole:
                self._landing.give_back(request)
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
        if not found or not await self._landing.room(request, (), found, within_s=self._room_s):
            return
        restored = 0
        try:
            result = await self._checkpoints.restore(
                keys[:found],
                [self._view(block) for block in self._landing.reserved(request)],
                states.state(request.number),
                deadline_s=self._deadline_s,
                tenant=request.tenant,
            )
            restored = result.blocks
            if result.outcome not in (Outcome.HIT, Outcome.MISS):
                self._counters.pool_failures[result.outcome.value] += 1
        finally:
            self._landing.settle(request, restored, "pool")
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

        def bindings() -> list[bytes]:
            indices, _ = blocks_lacking(request, take, trusted)
            return [request.chain.binding(index, request.tokens) for index in indices]

        pulled = Pulled(0)
        try:
            pulled = await self._pull(request, take, indices.stop, bindings)
        finally:
            self._landing.settle(
                request, pulled.blocks, "hand_off", still_written=pulled.still_written
            )
        if pulled.failure is None:
            self._counters.hand_offs_taken += matching

    def _may_read(self, request: Request, take: HandOff) -> bool:
        """Whether anything of the hand-off may be read; it is noted why not."""
        refusal = "no_transport" if self._reader is None else self._reader.refusal(take)
        if refusal is not None:
            self._failed(request, refusal)
        return refusal is None

    async def _pull(
        self, request: Request, take: HandOff, total: int, bindings: Callable[[], list[bytes]]
    ) -> Pulled:
        """Reserve room for the hand-off's blocks, so that the request has `total`, and read them.

        `bindings` tells what the blocks are bound to that follow those it has by then. What was
        reserved is left to be settled.
        """
        # A worker short of blocks would be worst off computing the prompt: wait while the lease
        # leaves time for the transfer itself.
        room_s = max(0.0, take.lease_s - 2 * self._deadline_s)
        keys = self._trusted(request.reusable_keys)
        if not await self._landing.room(request, keys, total, within_s=room_s):
            self._failed(request, "no_room")
            return Pulled(0, failure="no_room")
        assert self._reader is not None
        wanted, first = bindings(), len(request.blocks)
        if not wanted:  # others brought or computed it meanwhile
            return Pulled(0)
        targets = self._landing.reserved(request)[: len(wanted)]
        result = await self._reader.pull(take, first, wanted, targets)
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
        keys = self._trusted(request.reusable_keys)
        worth = await self._worth(pool, request, keys[len(request.blocks) :])
        if worth.refused:
            self._counters.pool_failures["dear"] += 1
        if not worth.blocks:
            return
        total = len(request.blocks) + worth.blocks
        if not await self._landing.room(request, keys, total, within_s=self._room_s):
            self._counters.pool_failures["no_room"] += 1
            return
        loaded = 0
        try:
            lacking = self._trusted(keys)[len(request.blocks) : total]
            views = [self._view(block) for block in self._landing.reserved(request)[: len(lacking)]]
            if lacking:
                within_s = min(self._deadline_s, worth.within_s or self._deadline_s)
                result = await pool.load(lacking, views, deadline_s=within_s, tenant=request.tenant)
                loaded = result.blocks
                if result.outcome not in (Outcome.HIT, Outcome.MISS):
                    self._counters.pool_failures[result.outcome.value] += 1
        finally:
            self._landing.settle(request, loaded, "pool")

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
