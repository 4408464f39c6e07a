"""Copying blocks between an arena and an engine's memory, with their tags. Blocking; for threads.

The functions look at `stop` again and again, so that a caller whose deadline passed can wait for
the copy to end instead of leaving a thread that still writes.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from kimi_connect.arena import Arena
from kimi_connect.copying import Copier, copier, matched
from kimi_connect.directory import Listed
from kimi_connect.tags import Leaves, block_tags, tag_of_leaves
from kimi_connect.wire import MAX_GROUPS, Granted, GroupTag, PinnedBlock

Stop = Callable[[], bool]

PIECE_BYTES = 256 << 10
"""Copied and tagged at a time: whole leaves, and what a core's own cache holds."""

SHARED_PIECE_BYTES = 1 << 20
"""Likewise where several threads copy: each waits for the interpreter whenever it has copied one,
which costs more than to tag what a core's own cache holds a part of.
"""

TOGETHER = 16
"""Blocks copied out before the first of them is checked."""

STOP_BYTES = 1 << 20
"""Copied between two looks at whether to stop (some 0.1 ms)."""


class Place(NamedTuple):
    """Where a block of a generation is written: its parts in the arena, in order."""

    generation: int
    parts: "list[memoryview]"

    @classmethod
    def of(cls, granted: Granted, size: int, arena: Arena) -> "Place":
        """The pages that were granted to a block of `size` bytes."""
        return cls(granted.generation, list(arena.parts(granted.extents, size)))


class CopiedOut(NamedTuple):
    """How far a copy out of the arena came.

    `good` leading blocks have their bytes and the right tags. `corrupt` is the position of a block
    that did not match; None: the run ended otherwise (all done, or stopped).
    """

    good: int
    corrupt: "int | None" = None


def copy_out(
    arena: Arena,
    keys: Sequence[bytes],
    pinned: Sequence[PinnedBlock],
    into: Sequence[memoryview],
    leaves: Leaves,
    stop: Stop,
    piece_bytes: int = PIECE_BYTES,
) -> CopiedOut:
    """Copy pinned blocks into `into`, then check each copy against its block's tags.

    Checking the copy, not the arena, leaves no moment at which the bytes could still change.
    """
    copies = [_out(arena, *one) for one in zip(keys, pinned, into, strict=False)]
    for start in range(0, len(copies), TOGETHER):
        some = copies[start : start + TOGETHER]
        fitting: list[_Copy] = []
        for copy in some:
            if copy is None:
                break
            fitting.append(copy)
        digests = _digests(fitting, leaves, stop, piece_bytes)
        for position, (copy, found) in enumerate(zip(fitting, digests, strict=False), start):
            if _tags(copy, found) != _tags_of(pinned[position]):
                return CopiedOut(position, position)
        done = start + len(digests)
        if len(digests) < len(fitting):
            return CopiedOut(done)
        if len(fitting) < len(some):
            return CopiedOut(done, done)
    return CopiedOut(len(copies))


def copy_local(
    arena: Arena,
    keys: Sequence[bytes],
    into: Sequence[memoryview],
    leaves: Leaves,
    stop: Stop,
    piece_bytes: int = PIECE_BYTES,
) -> int:
    """Copy leading blocks that the arena's directory lists, asking nobody; how many.

    Nothing keeps a block in place meanwhile: that its entry is unchanged after the copy says that
    its pages were its own all the time, and its tags say that the bytes are the key's. Whatever is
    not so ends the run; the daemon knows more.
    """
    done = 0
    while done < len(keys):
        some = slice(done, done + TOGETHER)
        listed = _listed(arena, keys[some], into[some])
        digests = _digests([copy for _, copy in listed], leaves, stop, piece_bytes)
        for (entry, copy), found in zip(listed, digests, strict=False):
            if _tags(copy, found) != _tags_of(entry.block) or not arena.directory.unchanged(entry):
                return done
            done += 1
        if len(digests) < TOGETHER:
            break
    return done


def copy_in(
    arena: Arena,
    keys: Sequence[bytes],
    granted: Sequence[Granted],
    blocks: Sequence[memoryview],
    group_bytes: Sequence[int],
    leaves: Leaves,
    stop: Stop,
) -> "list[tuple[int, tuple[GroupTag, ...]]]":
    """Write blocks into their reserved pages; (generation, tags) of those written whole.

    Tags are of the source: bytes that change on their way are found by whoever reads them.
    """
    places = [
        Place.of(grant, block.nbytes, arena) for grant, block in zip(granted, blocks, strict=False)
    ]
    return fill(keys, places, blocks, group_bytes, leaves, stop)


def fill(
    keys: Sequence[bytes],
    places: Sequence[Place],
    blocks: Sequence[memoryview],
    group_bytes: Sequence[int],
    leaves: Leaves,
    stop: Stop,
    piece_bytes: int = PIECE_BYTES,
) -> "list[tuple[int, tuple[GroupTag, ...]]]":
    """See `copy_in`; for places that were looked up before."""
    copies = []
    for key, place, block in zip(keys, places, blocks, strict=False):
        source = flat(block)
        groups = tuple(group_bytes) or (source.nbytes,)
        copy = _between(source, place.parts, into_one=False)
        copies.append(_Copy(key, groups, copy, source))
    digests = _digests(copies, leaves, stop, piece_bytes, before=True)
    return [
        (place.generation, tuple(map(GroupTag, copying.groups, _tags(copying, found))))
        for place, copying, found in zip(places, copies, digests, strict=False)
    ]


def intact_run(
    arena: Arena,
    keys: Sequence[bytes],
    blocks: Sequence[PinnedBlock],
    leaves: Leaves,
    stop: Stop,
) -> "tuple[list[list[memoryview]], bool]":
    """The parts of the leading blocks whose tags match where they lie; whether one did not."""
    run: list[list[memoryview]] = []
    for key, block in zip(keys, blocks, strict=False):
        if stop():
            break
        parts = [part.toreadonly() for part in arena.parts(block.extents, block.size)]
        groups = [group.size for group in block.tags]
        if sum(groups) != block.size or block_tags(key, groups, whole(parts), leaves) != tuple(
            group.tag for group in block.tags
        ):
            return run, True
        run.append(parts)
    return run, False


def whole(parts: Sequence[memoryview]) -> memoryview:
    """A block's bytes in one piece: its only part, or a copy of all of them."""
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


class _Copy(NamedTuple):
    """One block's copy, and what is tagged of it."""

    key: bytes
    groups: "tuple[int, ...]"
    copy: Copier
    checked: memoryview


def _listed(
    arena: Arena, keys: Sequence[bytes], into: Sequence[memoryview]
) -> "list[tuple[Listed, _Copy]]":
    """The leading blocks that the directory lists and that fit."""
    listed = []
    for key, target in zip(keys, into, strict=False):
        entry = arena.directory.find(key)
        if entry is None:
            break
        try:
            copy = _out(arena, key, entry.block, target)
        except ValueError:  # pages outside the arena: no entry of ours
            break
        if copy is None:
            break
        listed.append((entry, copy))
    return listed


def _out(arena: Arena, key: bytes, block: PinnedBlock, target: memoryview) -> "_Copy | None":
    """The copy of a block into `target`; None if it has another size."""
    target = flat(target)
    groups = tuple([size for size, _ in block.tags])
    if block.size != target.nbytes or sum(groups) != block.size:
        return None
    parts = list(arena.parts(block.extents, block.size))
    return _Copy(key, groups, _between(target, parts, into_one=True), target)


def _tags_of(block: PinnedBlock) -> "tuple[bytes, ...]":
    return tuple([tag for _, tag in block.tags])


def _digests(
    copies: "Sequence[_Copy]",
    leaves: Leaves,
    stop: Stop,
    piece_bytes: int,
    *,
    before: bool = False,
) -> "list[list[bytes]]":
    """Copy blocks; the leaves' digests of each one's groups, of those copied before the stop.

    A piece is hashed right after it was copied, while it is in the processor's cache, or right
    `before`, where its source is what is tagged: to read it is then the hash's, not the copy's.
    All else is done before the first copy of a batch or after the last: behind a copy, which fills
    the caches, the same lines take several times as long.
    """
    copied: list[list[bytes]] = []
    for _, groups, copy, checked in copies:
        digests: list[bytes] = []
        end = look_at = 0
        for size in groups:
            hashed: list[bytes] = []
            at, end = end, end + size
            while at < end:
                if at >= look_at:
                    if stop():
                        return copied
                    look_at = at + STOP_BYTES
                to = min(at + piece_bytes, end)
                if before:
                    hashed.append(leaves(checked[at:to]))
                copy(at, to)
                if not before:
                    hashed.append(leaves(checked[at:to]))
                at = to
            digests.append(b"".join(hashed))
        copied.append(digests)
    return copied


def _tags(block: _Copy, digests: "Sequence[bytes]") -> "tuple[bytes, ...]":
    groups = enumerate(zip(block.groups, digests, strict=True))
    return tuple([tag_of_leaves(block.key, n, size, found) for n, (size, found) in groups])


def _between(one: memoryview, parts: "Sequence[memoryview]", *, into_one: bool) -> Copier:
    """Copies a block that lies in `one` part on one side and in `parts` on the other."""
    if len(parts) == 1:
        return copier(one, parts[0]) if into_one else copier(parts[0], one)
    copiers = [
        copier(piece, part) if into_one else copier(part, piece)
        for part, piece in matched(parts, one)
    ]
    ends = list(accumulate(part.nbytes for part in parts))

    def copy(start: int, end: int) -> None:
        place = bisect_right(ends, start)
        while start < end:
            first = ends[place] - parts[place].nbytes
            last = min(end, ends[place])
            copiers[place](start - first, last - first)
            start, place = last, place + 1

    return copy


def check_store(
    keys: Sequence[bytes], blocks: Sequence[memoryview], group_bytes: Sequence[int]
) -> None:
    """ValueError unless there is one block per key, each as large as the layer groups."""
    if len(keys) != len(blocks):
        raise ValueError(f"{len(keys)} keys for {len(blocks)} blocks")
    if len(group_bytes) > MAX_GROUPS:
        raise ValueError(f"{len(group_bytes)} layer groups; a block has at most {MAX_GROUPS}")
    size = sum(group_bytes)
    for block in blocks:
        if size and block.nbytes != size:
            raise ValueError(f"a block of {block.nbytes} bytes for layer groups of {size}")
        if not block.nbytes:
            raise ValueError("a block has at least one byte")


def flat(view: memoryview) -> memoryview:
    """The bytes of a contiguous view; TypeError for another."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
