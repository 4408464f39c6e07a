"""Blocks that are written where they will lie: reserved, filled by their owner, then committed.

Until the commit nobody can read them. A reservation lives for the daemon's `reservation_ttl_s`; a
commit that comes later keeps nothing, and its pages are used again only once the writer has said,
by `commit`, by `abort` or by ending, that it writes to them no more.
"""

from collections.abc import Callable, Sequence

from kimi_connect.arena import Arena
from kimi_connect.blocks import whole
from kimi_connect.tags import Leaves, block_tags
from kimi_connect.wire import Commitment, Grant, Granted, GroupTag

Written = tuple[int, tuple[GroupTag, ...]]
"""A block that was written: its generation and its tags."""
Finish = Callable[[list[Written], list[int], float], list[Commitment]]
"""(written blocks, generations given up, seconds) -> what became of the written ones."""


class Placed:
    """The leading run of what was asked for.

    `parts` has for each block the writable stretches of the arena that it consists of, in order;
    None where the pool holds the block already. Use it as a context manager: what was not committed
    by its end is given back.
    """

    def __init__(
        self,
        finish: Finish,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        grants: Sequence[Granted],
        arena: "Arena | None",
        group_bytes: Sequence[int],
        leaves: Leaves,
    ) -> None:
        self._finish, self._keys, self._sizes = finish, keys, sizes
        self._grants, self._group_bytes, self._leaves = grants, group_bytes, leaves
        self._open = True
        self.parts: list[list[memoryview] | None] = []
        for grant, size in zip(grants, sizes, strict=True):
            if grant.grant is Grant.FULL:
                break
            mine = grant.grant is Grant.RESERVED
            assert arena is not None
            self.parts.append(list(arena.parts(grant.extents, size)) if mine else None)

    def __enter__(self) -> "Placed":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def commit(self, blocks: "int | None" = None, *, deadline_s: float = 1.0) -> int:
        """Tag the first `blocks` (None: all) as they lie there and make them visible.

        The rest is given back. Returns how many leading blocks the pool holds now. ValueError if
        this was committed or aborted before.
        """
        if not self._open:
            raise ValueError("these blocks were committed or given back already")
        count = len(self.parts) if blocks is None else min(blocks, len(self.parts))
        written: list[Written] = []
        places: list[int] = []
        for place in range(count):
            parts = self.parts[place]
            if parts is not None:
                written.append((self._grants[place].generation, self._tags(place, parts)))
                places.append(place)
        self._open = False
        states = self._finish(written, self._generations(count), deadline_s)
        lost = {
            place
            for place, state in zip(places, states, strict=True)
            if state is Commitment.EXPIRED
        }
        return min(lost, default=count)

    def abort(self) -> None:
        """Give everything back; nothing if it was committed."""
        if self._open:
            self._open = False
            if given_up := self._generations(0):
                self._finish([], given_up, 1.0)

    def _generations(self, start: int) -> list[int]:
        return [one.generation for one in self._grants[start:] if one.grant is Grant.RESERVED]

    def _tags(self, place: int, parts: Sequence[memoryview]) -> tuple[GroupTag, ...]:
        groups = self._group_bytes or (self._sizes[place],)
        tags = block_tags(self._keys[place], groups, whole(parts), self._leaves)
        return tuple(map(GroupTag, groups, tags))
