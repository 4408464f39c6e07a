"""The engine's side of its node's pool: load and store blocks, whatever the daemon does.

A missing, slow or restarting daemon is an outcome, never an exception: the engine computes what it
does not get. The connection is made again by itself, with backoff, by the next call that needs it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kimi_connect import payloads, wire
from kimi_connect.blocks import check_store, intact_run
from kimi_connect.connection import ANSWER_S
from kimi_connect.payloads import DEFAULT_TENANT
from kimi_connect.storing import Stored
from kimi_connect.wire import Gap, HintKind, Op, Outcome, Priority, Stretch
from kimi_runtime import clock
from kimi_runtime.transfer.background import in_thread
from kimi_runtime.umbp.block_pool import LoadResult
from kimi_runtime.umbp.lending import Lent
from kimi_runtime.umbp.link import LinkLost, answered
from kimi_runtime.umbp.loading import load_local, load_part
from kimi_runtime.umbp.relink import Relink
from kimi_runtime.umbp.speed import MeasuredCost
from kimi_runtime.umbp.storing import Putting, store_part
from kimi_runtime.umbp.tags import leaves
from kimi_runtime.umbp.tiers.dram import COST as DRAM_COST

__all__ = ["Outcome", "PoolClient", "open_pool"]

KEYS_A_CALL = 256
BOUNDARIES_A_CALL = 256
"""A daemon looks for a state at each of them before it does anything else."""


async def open_pool(
    socket: Path,
    call_key: bytes,
    *,
    name: str = "engine",
    group_bytes: Sequence[int] = (),
    connect_s: float = 1.0,
) -> "PoolClient":
    """A client of the daemon behind `socket`; also when no daemon is there yet.

    `group_bytes` are the sizes of a block's layer groups, one tag each; empty: one tag a block.
    """
    client = PoolClient(socket, call_key, name=name, group_bytes=group_bytes, connect_s=connect_s)
    await client.held([])
    return client


class PoolClient:
    """Calls may run concurrently. Cancelling one frees what it held."""

    def __init__(
        self,
        socket: Path,
        call_key: bytes,
        *,
        name: str,
        group_bytes: Sequence[int],
        connect_s: float,
    ) -> None:
        self.blocks: Counter[Outcome] = Counter()
        """Blocks asked for, by what became of them."""
        self.stored_blocks = 0
        self._group_bytes = tuple(group_bytes)
        self._daemon = Relink(socket, call_key, name, connect_s)
        self._copying = MeasuredCost(DRAM_COST)

    @property
    def available(self) -> bool:
        """Whether there is a connection now."""
        return self._daemon.available

    @property
    def connects(self) -> int:
        """Connections made so far."""
        return self._daemon.connects

    async def held(self, keys: Sequence[bytes], *, deadline_s: float = 1.0) -> int:
        """Length of the leading run the pool holds; 0 without a daemon. Renews nothing."""
        ends_s = clock.now_s() + deadline_s
        run = 0
        try:
            link = await self._daemon.connected(ends_s)
            while run < len(keys):
                part = list(keys[run : run + wire.MAX_KEYS])
                answer = await link.call(
                    Op.HELD, payloads.pack_keys(part), within_s=ends_s - clock.now_s()
                )
                count = payloads.unpack_number(answered(answer, Op.COUNT))
                run += count
                if count < len(part):
                    break
        except (LinkLost, TimeoutError, wire.WireError):
            return run
        return run

    async def quote(
        self, keys: Sequence[bytes], *, block_bytes: int, deadline_s: float = 1.0
    ) -> list[Stretch]:
        """The leading run the pool has, by where it is, with the seconds until it were loaded.

        Blocks are about `block_bytes` large. Nothing without a daemon. Renews nothing. What is not
        quoted counts as looked up and lost: `load` is for the others.
        """
        ends_s, run = clock.now_s() + deadline_s, 0
        stretches: list[Stretch] = []
        try:
            link = await self._daemon.connected(ends_s)
            while run < len(keys):
                part = list(keys[run : run + wire.MAX_KEYS])
                asked = payloads.pack_quote(part, block_bytes)
                answer = await link.call(Op.QUOTE, asked, within_s=ends_s - clock.now_s())
                quoted = payloads.unpack_quoted(answered(answer, Op.QUOTED))
                stretches += quoted
                run += (count := sum(stretch.blocks for stretch in quoted))
                if count < len(part):
                    break
        except (LinkLost, wire.WireError):
            self._daemon.unseen(Outcome.UNAVAILABLE, len(keys) - run)
        except TimeoutError:
            self._daemon.unseen(Outcome.LATE, len(keys) - run)
        copy_s = block_bytes / self._copying.cost.bytes_per_s
        return [s._replace(seconds=s.seconds + copy_s * s.blocks) for s in stretches]

    async def deepest(self, boundaries: Sequence[bytes], *, pieces: int, deadline_s: float) -> int:
        """How many of `boundaries` lead up to the last one whose state the pool has whole, of
        `pieces` pieces (`kimi_connect.states`); 0 without a daemon or a state.
        """
        ends_s = clock.now_s() + deadline_s
        try:
            link = await self._daemon.connected(ends_s)
            for start in reversed(range(0, len(boundaries), BOUNDARIES_A_CALL)):
                part = list(boundaries[start : start + BOUNDARIES_A_CALL])
                asked = payloads.pack_deepest(part, pieces)
                answer = await link.call(Op.DEEPEST, asked, within_s=ends_s - clock.now_s())
                found = payloads.unpack_number(answered(answer, Op.COUNT))
                if found:
                    return start + min(found, len(part))
        except (LinkLost, TimeoutError, wire.WireError):
            return 0
        return 0

    async def load(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str = DEFAULT_TENANT,
    ) -> LoadResult:
        """Copy the leading run of `keys` into `into`, verified after the copy, in time.

        `into` has one writable view per key. ValueError if the lengths differ.
        """
        if len(keys) != len(into):
            raise ValueError(f"{len(keys)} keys for {len(into)} targets")
        ends_s = clock.now_s() + deadline_s
        outcome = Outcome.HIT
        done = await load_local(self._daemon, keys, into, ends_s, self._copying)
        while done < len(keys) and outcome is Outcome.HIT:
            part = slice(done, done + KEYS_A_CALL)
            count, outcome = await load_part(self._daemon, keys[part], into[part], ends_s, tenant)
            done += count
        if done > KEYS_A_CALL:
            self._daemon.tell_of(Op.TOUCH, keys[:done])
        self.blocks[Outcome.HIT] += done
        if outcome is not Outcome.HIT:
            self.blocks[outcome] += len(keys) - done
        return LoadResult(done, outcome)

    async def lend(
        self, keys: Sequence[bytes], *, deadline_s: float, tenant: str = DEFAULT_TENANT
    ) -> Lent:
        """The leading run of `keys` where it lies in the arena, checked there, to be given back.

        At most `KEYS_A_CALL` blocks at a time: what is lent can't be evicted.
        """
        ends_s = clock.now_s() + deadline_s
        try:
            link = await self._daemon.connected(ends_s)
            within_s = ends_s - clock.now_s()
            asked = payloads.pack_pin(list(keys[:KEYS_A_CALL]), within_s, tenant)
            answer = await link.call(Op.PIN, asked, within_s=within_s)
            pin, gap, blocks = payloads.unpack_pinned(answered(answer, Op.PINNED))
        except (LinkLost, wire.WireError):
            self._daemon.unseen(Outcome.UNAVAILABLE, len(keys))
            return Lent(None, 0, [], Outcome.UNAVAILABLE)
        except TimeoutError:
            self._daemon.unseen(Outcome.LATE, len(keys))
            return Lent(None, 0, [], Outcome.LATE)
        arena = link.arena
        assert arena is not None
        if not blocks:
            missed = Outcome.MISS if gap is Gap.NONE else wire.outcome_of(gap)
            return Lent(None, 0, [], missed)
        try:
            (parts, corrupt), late = await in_thread(
                lambda stop: intact_run(arena, keys, blocks, leaves, stop), ends_s=ends_s
            )
        except BaseException:
            link.tell(Op.UNPIN, payloads.pack_unpin(pin, 0, corrupt=False))
            raise
        outcome = Outcome.CORRUPT if corrupt else wire.outcome_of(gap)
        return Lent(link, pin, parts, Outcome.LATE if late else outcome)

    async def store(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str = DEFAULT_TENANT,
        priority: Priority = Priority.NORMAL,
        group_bytes: Sequence[int] | None = None,
    ) -> int:
        """Put blocks, evicting colder ones; how many leading ones the pool holds now.

        Stops at the first block the pool has no room for. ValueError if the lengths differ or a
        block is not as large as its layer groups: `group_bytes`, or the client's own.
        """
        groups = self._group_bytes if group_bytes is None else tuple(group_bytes)
        check_store(keys, blocks, groups)
        how = Putting(groups, clock.now_s() + deadline_s, tenant, priority)
        done = 0
        part = Stored(0, 0, 0)
        try:
            while done < len(keys):
                some = slice(done, done + KEYS_A_CALL)
                part = await store_part(self._daemon, keys[some], blocks[some], how)
                done += part.kept
                if part.kept < part.asked or not part.asked:
                    break
            if done > part.fresh:
                self._daemon.tell_of(Op.TOUCH, keys[:done])
        except (LinkLost, TimeoutError, wire.WireError):
            pass
        self.stored_blocks += done
        return done

    async def prefault(self) -> None:
        """Map the whole arena now, so that no put or get has to; nothing without a daemon."""
        arena = self._daemon.arena
        if arena is not None:
            await in_thread(arena.prefault, ends_s=math.inf)

    def used(self, keys: Sequence[bytes]) -> None:
        """These were found in the engine's own memory: they are worth keeping in the pool too."""
        self._daemon.tell_of(Op.USED, keys)

    def hint(
        self,
        session: bytes,
        kind: HintKind,
        keys: Sequence[bytes] = (),
        *,
        expected_s: "float | None" = None,
        child: bytes = b"",
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """Tell the pool where a session stands; nothing happens without a connection.

        `session` and `child` are 16 bytes (ValueError). ACTIVE and PAUSED name all blocks of the
        session, or none if they are those told before; COMPACTED those it gives up; FORKED those
        that `child` goes on from, or none for all. `expected_s` is how long a pause is to take.
        """
        fields = payloads.HintFields(session, kind, list(keys), expected_s, child, tenant)
        payload = payloads.pack_hint(fields)
        self._daemon.tell(Op.HINT, payload)

    async def aclose(self) -> None:
        """End the connection; pins and reservations end with it."""
        try:
            await self._daemon.finish(within_s=ANSWER_S)
        finally:
            self._daemon.close()
