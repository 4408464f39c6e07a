"""Copying blocks between an arena and an engine's memory, with their tags. Blocking; for threads.

The functions look at `stop` before every piece, so that a caller whose deadline passed can wait
for the copy to end instead of leaving a thread that still writes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kimi_connect.arena import Arena
from kimi_connect.copying import copy_bytes
from kimi_connect.directory import Listed
from kimi_connect.tags import Leaves, block_tags, tag_of_leaves
from kimi_connect.wire import MAX_GROUPS, Granted, GroupTag, PinnedBlock

Stop = Callable[[], bool]

PIECE_BYTES = 256 << 10
"""Copied and tagged at a time: whole leaves, and what a core's own cache holds."""


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
) -> CopiedOut:
    """Copy pinned blocks into `into`, then check each copy against its block's tags.

    Checking the copy, not the arena, leaves no moment at which the bytes could still change.
    """
    for position, (block, copy) in enumerate(
        zip(
            pinned,
            [_out(arena, *one) for one in zip(keys, pinned, into, strict=False)],
            strict=False,
        )
    ):
        tags = None if copy is None else _copied(copy, leaves, stop)
        if copy is not None and tags is None:
            return CopiedOut(position)
        if tags != _tags_of(block):
            return CopiedOut(position, position)
    return CopiedOut(min(len(pinned), len(into)))


def copy_local(
    arena: Arena,
    keys: Sequence[bytes],
    into: Sequence[memoryview],
    leaves: Leaves,
    stop: Stop,
) -> int:
    """Copy leading blocks that the arena's directory lists, asking nobody; how many.

    Nothing keeps a block in place meanwhile: that its entry is unchanged after the copy says that
    its pages were its own all the time, and its tags say that the bytes are the key's. Whatever is
    not so ends the run; the daemon knows more.
    """
    listed = _listed(arena, keys, into)
    for position, (entry, copy) in enumerate(listed):
        tags = _copied(copy, leaves, stop)
        if tags != _tags_of(entry.block) or not arena.directory.unchanged(entry):
            return position
    return len(listed)


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
) -> "list[tuple[int, tuple[GroupTag, ...]]]":
    """See `copy_in`; for places that were looked up before."""
    copies = []
    for key, place, block in zip(keys, places, blocks, strict=False):
        source = flat(block)
        groups = tuple(group_bytes) or (source.nbytes,)
        copies.append(_Copy(key, groups, _cut(groups, place.parts, [source], checked=source)))
    written: list[tuple[int, tuple[GroupTag, ...]]] = []
    for place, copy in zip(places, copies, strict=False):
        tags = _copied(copy, leaves, stop)
        if tags is None:
            break
        written.append((place.generation, tuple(map(GroupTag, copy.groups, tags))))
    return written


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
    """One block's copy, cut up: for each layer group, what is tagged after which copies.

    All of a batch is looked up and cut up before the first byte of it is copied. Behind a copy
    that has filled the processor's caches, the same lines take several times as long.
    """

    key: bytes
    groups: "tuple[int, ...]"
    pieces: "list[list[tuple[memoryview, list[tuple[memoryview, memoryview]]]]]"


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
    return _Copy(key, groups, _cut(groups, [target], parts, checked=target))


def _tags_of(block: PinnedBlock) -> "tuple[bytes, ...]":
    return tuple([tag for _, tag in block.tags])


def _copied(copy: _Copy, leaves: Leaves, stop: Stop) -> "tuple[bytes, ...] | None":
    """Copy a block and tag it; None if it was stopped.

    A piece is tagged right after it was copied, while it is in the processor's cache.
    """
    tags = []
    for group, pieces in enumerate(copy.pieces):
        digests = []
        for checked, pairs in pieces:
            if stop():
                return None
            for to, of in pairs:
                copy_bytes(to, of)
            digests.append(leaves(checked))
        tags.append(tag_of_leaves(copy.key, group, copy.groups[group], b"".join(digests)))
    return tuple(tags)


def _cut(
    groups: Sequence[int],
    into: Sequence[memoryview],
    source: Sequence[memoryview],
    *,
    checked: memoryview,
) -> "list[list[tuple[memoryview, list[tuple[memoryview, memoryview]]]]]":
    """A block that lies in parts, on one side or the other, in pieces that end with the groups.

    `checked` is the side that is in one part: what is tagged.
    """
    in_one = len(into) == len(source) == 1
    spans = [] if in_one else _spans(into, source)
    of_target = checked is into[0]
    cut, start = [], 0
    for size in groups:
        pieces = []
        for at in range(start, start + size, PIECE_BYTES):
            end = min(at + PIECE_BYTES, start + size)
            if in_one:
                pair = (into[0][at:end], source[0][at:end])
                pieces.append((pair[0] if of_target else pair[1], [pair]))
            else:
                pieces.append((checked[at:end], _stretch(spans, at, end)))
        cut.append(pieces)
        start += size
    return cut


def _stretch(
    spans: "list[tuple[int, memoryview, memoryview]]", start: int, end: int
) -> "list[tuple[memoryview, memoryview]]":
    """The copies of the bytes from `start` to `end`; forgets the spans that lie before."""
    while spans[0][0] + spans[0][1].nbytes <= start:
        del spans[0]
    pairs = []
    for first, target, piece in spans:
        if first >= end:
            break
        low, high = max(start, first) - first, min(end, first + piece.nbytes) - first
        pairs.append((target[low:high], piece[low:high]))
    return pairs


def _spans(
    into: Sequence[memoryview], source: Sequence[memoryview]
) -> "list[tuple[int, memoryview, memoryview]]":
    """Where the bytes of one side's parts belong in the other's: offset, target, source."""
    one = into[0] if len(into) == 1 else None
    at, spans = 0, []
    for part in source if one is not None else into:
        end = at + part.nbytes
        pair = (one[at:end], part) if one is not None else (part, source[0][at:end])
        spans.append((at, *pair))
        at = end
    return spans


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
