"""Who holds which blocks, as their feeds told: advisory, so a wrong entry costs a miss. Pure.

Bounded: an owner with more than `max_keys` keys, and owners beyond `max_owners`, are not followed;
they count as holding nothing, never as holding what they may have lost.
"""

from collections.abc import Callable, Mapping, Sequence

from kimi_connect.states import piece_keys
from kimi_runtime.spec.umbp import FeedBatch, FeedHello, FeedSnapshotPage, TierName
from kimi_runtime.umbp.feed import Changes, FeedFollower, FollowState
from kimi_runtime.umbp.key_table import KeyTable, bits_of


class OwnerKeys:
    """One owner's part of a table that all owners share."""

    def __init__(self, table: KeyTable) -> None:
        self._table = table
        self.number = table.new_owner(shown=True)
        self._staged: int | None = None

    def __len__(self) -> int:
        """How many keys the owner holds."""
        return self._table.count(self.number)

    def hold(self, keys: Sequence[bytes]) -> None:
        """The owner holds these."""
        self._table.add(self.number, keys)

    def lose(self, keys: Sequence[bytes]) -> None:
        """The owner holds these no more."""
        self._table.remove(self.number, keys)

    def clear(self) -> None:
        """The owner holds nothing any more."""
        self._table.retire(self.number)
        self.number = self._table.new_owner(shown=True)

    def stage(self, keys: Sequence[bytes]) -> None:
        """The next page of a snapshot."""
        if self._staged is None:
            self._staged = self._table.new_owner(shown=False)
        self._table.add(self._staged, keys)

    def swap(self) -> None:
        """What was staged is what the owner holds."""
        if self._staged is None:
            self.clear()
            return
        self._table.retire(self.number)
        self.number, self._staged = self._staged, None
        self._table.show(self.number)

    def unstage(self) -> None:
        """Forget what was staged."""
        if self._staged is not None:
            self._table.retire(self._staged)
            self._staged = None

    def staged(self) -> int:
        """How many keys a snapshot has brought so far."""
        return 0 if self._staged is None else self._table.count(self._staged)

    def forget(self) -> None:
        """The owner is gone: nothing of it stays."""
        self.unstage()
        self._table.retire(self.number)


MAX_NAMED = 1024
"""Sets of owners whose names are kept at hand."""


class Index:
    """One `FeedFollower` per owner, and one table of keys for all."""

    def __init__(self, *, max_owners: int = 4096, max_keys: int = 4_000_000) -> None:
        self.max_owners, self.max_keys = max_owners, max_keys
        self.refused_owners = 0
        self.overflows = 0
        """Times an owner's keys passed `max_keys` and were forgotten."""
        self._table = KeyTable()
        self._keys: dict[str, OwnerKeys] = {}
        self._followers: dict[str, FeedFollower] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        """Of sets of owners, as of `_generation`."""
        self._generation = 0

    def owners(self) -> Mapping[str, FollowState]:
        """Every owner and how far its entries can be trusted."""
        return {owner: follower.state for owner, follower in self._followers.items()}

    def state(self, owner: str) -> FollowState:
        """DEGRADED also for an owner that is not followed."""
        follower = self._followers.get(owner)
        return FollowState.DEGRADED if follower is None else follower.state

    def tier(self, owner: str) -> TierName | None:
        """The tier the owner's feed speaks of; None before its hello."""
        follower = self._followers.get(owner)
        return None if follower is None else follower.tier

    def keys(self, owner: str) -> int:
        """How many keys the owner is thought to hold."""
        follower = self._followers.get(owner)
        return 0 if follower is None else len(follower.keys)

    def held(self, owner: str) -> int | None:
        """`keys` of an owner whose entries are exact; None for others."""
        follower = self._followers.get(owner)
        if follower is None or follower.state is not FollowState.EXACT:
            return None
        return self._table.count(self._keys[owner].number)

    def resume_point(self, owner: str) -> tuple[int | None, int]:
        """`(epoch, after)` to ask the owner's feed for."""
        follower = self._followers.get(owner)
        return (None, 0) if follower is None else follower.resume_point()

    def apply(self, owner: str, line: FeedHello | FeedSnapshotPage | FeedBatch) -> bool:
        """Take a line of the owner's feed in. False: reconnect from `resume_point`, later.

        `owner` is the name we know the owner by; the feed's own name may differ and is not used.
        """
        return self._heard(owner, lambda follower: follower.apply(line))

    def take(self, owner: str, changes: Changes) -> bool:
        """Like `apply` of a batch."""
        return self._heard(owner, lambda follower: follower.take(changes))

    def _heard(self, owner: str, hear: Callable[[FeedFollower], bool]) -> bool:
        follower = self._followers.get(owner)
        if follower is None:
            if len(self._followers) >= self.max_owners:
                self.refused_owners += 1
                return False
            follower = self._follow(owner)
        followed = hear(follower)
        keys = self._keys[owner]
        if max(len(keys), keys.staged()) > self.max_keys:
            self.overflows += 1
            keys.forget()
            self._follow(owner)
            return False
        return followed

    def disconnected(self, owner: str) -> None:
        """The owner's stream ended: its entries stay, as DEGRADED."""
        follower = self._followers.get(owner)
        if follower is not None:
            follower.disconnected()

    def forget(self, owner: str) -> None:
        """The owner is gone for good."""
        if self._followers.pop(owner, None) is not None:
            self._keys.pop(owner).forget()

    @property
    def nbytes(self) -> int:
        """Bytes the keys take, about."""
        return self._table.nbytes

    def prefix_runs(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Length of the leading run of `keys` per owner, for owners that hold at least one."""
        runs: dict[str, int] = {}
        for run, owners in self._table.runs(keys):
            runs.update(dict.fromkeys(self._named(owners), run))
        return runs

    def _named(self, owners: int) -> tuple[str, ...]:
        """A set of owners by name: prompts meet the same few sets again and again."""
        if self._generation != self._table.generation or len(self._names) >= MAX_NAMED:
            self._generation = self._table.generation
            self._names.clear()
        known = self._names.get(owners)
        if known is None:
            names = {held.number: owner for owner, held in self._keys.items()}
            known = self._names[owners] = tuple(map(names.__getitem__, bits_of(owners)))
        return known

    def checkpoints(self, keys: Sequence[bytes], pieces: int) -> dict[str, tuple[int, ...]]:
        """Behind how many of `keys` an owner holds a state of `pieces` pieces, for owners that
        hold at least one within their leading run of `keys`.
        """
        runs = self.prefix_runs(keys)
        keys = keys[: max(runs.values(), default=0)]
        states = [piece_keys(key, 1)[0] for key in keys]
        found: dict[str, list[int]] = {owner: [] for owner in runs}
        names = {held.number: owner for owner, held in self._keys.items()}
        for blocks, holders in enumerate(self._table.holders(states), 1):
            if holders:
                for mask in self._table.holders(piece_keys(keys[blocks - 1], pieces)):
                    holders &= mask
            for owner in map(names.__getitem__, bits_of(holders)):
                if blocks <= runs.get(owner, 0):
                    found[owner].append(blocks)
        return {owner: tuple(blocks) for owner, blocks in found.items() if blocks}

    def _follow(self, owner: str) -> FeedFollower:
        keys = self._keys[owner] = OwnerKeys(self._table)
        follower = self._followers[owner] = FeedFollower(keys)
        return follower
