"""Who holds which blocks, as their feeds told: advisory, so a wrong entry costs a miss. Pure.

Bounded: an owner with more than `max_keys` keys, and owners beyond `max_owners`, are not followed;
they count as holding nothing, never as holding what they may have lost.
"""

from collections.abc import Mapping, Sequence

from kimi_runtime.spec.umbp import FeedBatch, FeedHello, FeedSnapshotPage, TierName
from kimi_runtime.umbp.feed import FeedFollower, FollowState


class Index:
    """One `FeedFollower` per owner."""

    def __init__(self, *, max_owners: int = 4096, max_keys: int = 4_000_000) -> None:
        self.max_owners, self.max_keys = max_owners, max_keys
        self.refused_owners = 0
        self.overflows = 0
        """Times an owner's keys passed `max_keys` and were forgotten."""
        self._followers: dict[str, FeedFollower] = {}

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

    def resume_point(self, owner: str) -> tuple[int | None, int]:
        """`(epoch, after)` to ask the owner's feed for."""
        follower = self._followers.get(owner)
        return (None, 0) if follower is None else follower.resume_point()

    def apply(self, owner: str, line: FeedHello | FeedSnapshotPage | FeedBatch) -> bool:
        """Take a line of the owner's feed in. False: reconnect from `resume_point`, later.

        `owner` is the name we know the owner by; the feed's own name may differ and is not used.
        """
        follower = self._followers.get(owner)
        if follower is None:
            if len(self._followers) >= self.max_owners:
                self.refused_owners += 1
                return False
            follower = self._followers[owner] = FeedFollower()
        followed = follower.apply(line)
        if len(follower.keys) > self.max_keys:
            self.overflows += 1
            self._followers[owner] = FeedFollower()
            return False
        return followed

    def disconnected(self, owner: str) -> None:
        """The owner's stream ended: its entries stay, as DEGRADED."""
        follower = self._followers.get(owner)
        if follower is not None:
            follower.disconnected()

    def forget(self, owner: str) -> None:
        """The owner is gone for good."""
        self._followers.pop(owner, None)

    def prefix_runs(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Length of the leading run of `keys` per owner, for owners that hold at least one.

        Costs one set lookup per owner and per block of a run.
        """
        runs: dict[str, int] = {}
        for owner, follower in self._followers.items():
            held = follower.keys
            run = next((n for n, key in enumerate(keys) if key not in held), len(keys))
            if run:
                runs[owner] = run
        return runs
