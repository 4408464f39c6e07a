"""Keeping and restoring a model's recurrent state with the blocks of the same boundary.

A hit is the deepest boundary at which the pool brings both: all blocks up to it and the state at
its end. One without the other is none, so what is asked for first is the state. A state that is
missing, damaged or late costs a shallower hit, at an earlier boundary that has one.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kimi_connect.blocks import flat
from kimi_connect.states import PIECE_BYTES, piece_count, piece_keys, pieces
from kimi_connect.wire import HintKind, Outcome
from kimi_runtime import clock
from kimi_runtime.umbp.block_pool import BlockPool

_TRIES = 4
"""Boundaries that are tried, each within half of the time that is left."""


class StatePool(BlockPool, Protocol):
    """What is needed of the node's pool."""

    async def held(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """Length of the leading run of `keys` the pool has."""

    async def deepest(self, boundaries: Sequence[bytes], *, pieces: int, deadline_s: float) -> int:
        """How many of `boundaries` lead up to the last one whose state the pool has whole."""

    def hint(
        self, session: bytes, kind: HintKind, keys: Sequence[bytes] = (), *, tenant: str
    ) -> None:
        """Tell the pool what is wanted, and by ENDED that it no longer is: that goes first."""


class Restored(NamedTuple):
    """The first `blocks` targets have their bytes, and the state is the one at the last one's end.

    With 0 blocks there is no state either. `refused` blocks were there in all: where they are more,
    a checkpoint at the end of them would have made a deeper hit. `outcome` says why the hit is not
    the deepest that was there; HIT if it is.
    """

    blocks: int
    refused: int
    outcome: Outcome


class Checkpoints:
    """States of `state_bytes` in a pool, in pieces of `piece_bytes`, as all who share them have
    them. Calls may run concurrently.
    """

    def __init__(
        self, pool: StatePool, state_bytes: int, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._pool, self.state_bytes, self._piece_bytes = pool, state_bytes, piece_bytes
        self._pieces = piece_count(state_bytes, piece_bytes)

    async def deepest(self, keys: Sequence[bytes], *, deadline_s: float) -> tuple[int, int]:
        """Blocks of the deepest boundary with both, and how many leading blocks there are."""
        ends_s = clock.now_s() + deadline_s
        run = await self._pool.held(keys, deadline_s=deadline_s)
        left_s = max(0.0, ends_s - clock.now_s())
        if not run:
            return 0, 0
        found = await self._pool.deepest(keys[:run], pieces=self._pieces, deadline_s=left_s)
        return found, run

    async def keep(
        self, keys: Sequence[bytes], state: memoryview, *, deadline_s: float, tenant: str
    ) -> bool:
        """Keep the state at the end of the blocks `keys`; False if it is not there whole now.

        It is refused where the pool lacks one of the blocks: a state without them is no use, and
        takes the space of thousands. ValueError for a state of another size.
        """
        state = self._checked(state)
        ends_s = clock.now_s() + deadline_s
        if not keys or await self._pool.held(keys, deadline_s=deadline_s) < len(keys):
            return False
        own = piece_keys(keys[-1], self._pieces)
        stored = await self._pool.store(
            own,
            pieces(state, self._piece_bytes),
            deadline_s=max(0.0, ends_s - clock.now_s()),
            tenant=tenant,
            group_bytes=(),
        )
        # a pool that was short of room may have taken a part, or given up the block for it; and a
        # put that waits for no answer may find only then that its pages were no longer its own
        left_s, whole = max(0.0, ends_s - clock.now_s()), [keys[-1], *own]
        kept = stored == self._pieces and (
            await self._pool.held(whole, deadline_s=left_s) == len(whole)
        )
        if stored and not kept:
            self._pool.hint(keys[-1], HintKind.ACTIVE, own, tenant=tenant)
            self._pool.hint(keys[-1], HintKind.ENDED, tenant=tenant)
        return kept

    async def restore(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        state: memoryview,
        *,
        deadline_s: float,
        tenant: str,
    ) -> Restored:
        """Fill `into` and `state` from the deepest boundary of `keys` that brings both.

        What lies behind the blocks that are counted is undefined, and nothing writes to it after
        the call. ValueError for a state of another size.
        """
        state = self._checked(state)
        ends_s = clock.now_s() + deadline_s
        found, run = await self.deepest(keys, deadline_s=deadline_s)
        outcome, loaded = Outcome.HIT, 0
        for _ in range(_TRIES):
            left_s = ends_s - clock.now_s()
            if not found or left_s <= 0:
                break
            failure = await self._load_state(keys[found - 1], state, left_s / 2, tenant)
            if failure is not None:
                outcome, bound = failure, found - 1
            else:
                left_s = max(0.0, ends_s - clock.now_s())
                lacking = slice(loaded, found)
                result = await self._pool.load(
                    keys[lacking], into[lacking], deadline_s=left_s, tenant=tenant
                )
                loaded += result.blocks
                if loaded >= found:
                    return Restored(found, run, outcome)
                outcome, bound = result.outcome, loaded
            left_s = max(0.0, ends_s - clock.now_s())
            found = await self._pool.deepest(keys[:bound], pieces=self._pieces, deadline_s=left_s)
        return Restored(0, run, Outcome.MISS if outcome is Outcome.HIT else outcome)

    async def _load_state(
        self, boundary: bytes, state: memoryview, deadline_s: float, tenant: str
    ) -> Outcome | None:
        """Why the state did not come whole; None if it did."""
        result = await self._pool.load(
            piece_keys(boundary, self._pieces),
            pieces(state, self._piece_bytes),
            deadline_s=deadline_s,
            tenant=tenant,
        )
        return None if result.blocks == self._pieces else result.outcome

    def _checked(self, state: memoryview) -> memoryview:
        state = flat(state)
        if state.nbytes != self.state_bytes:
            raise ValueError(
                f"a state of {state.nbytes} bytes where the layout says {self.state_bytes}"
            )
        return state
