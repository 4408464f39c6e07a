"""Copying blocks between an arena and an engine's memory, with their tags. Blocking; for threads.

Both functions look at `stop` before every megabyte, so that a caller whose deadline passed can wait
for the copy to end instead of leaving a thread that still writes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kimi_connect.arena import Arena
from kimi_connect.copying import PIECE_BYTES, copy_bytes
from kimi_connect.tags import Leaves, block_tags
from kimi_connect.wire import Granted, GroupTag, PinnedBlock

Stop = Callable[[], bool]


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
    for position, (key, block, target) in enumerate(zip(keys, pinned, into, strict=False)):
        target = flat(target)
        if block.size != target.nbytes:
            return CopiedOut(position, position)
        at = 0
        for part in arena.parts(block.extents, block.size):
            for start in range(0, part.nbytes, PIECE_BYTES):
                if stop():
                    return CopiedOut(position)
                piece = part[start : start + PIECE_BYTES]
                copy_bytes(target[at : at + piece.nbytes], piece)
                at += piece.nbytes
        if not _intact(key, target, block.tags, leaves):
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
    for position, (key, target) in enumerate(zip(keys, into, strict=False)):
        entry = arena.directory.find(key)
        if entry is None:
            return position
        try:
            copied = copy_out(arena, [key], [entry.block], [target], leaves, stop)
        except ValueError:  # pages outside the arena: no entry of ours
            return position
        if not copied.good or not arena.directory.unchanged(entry):
            return position
    return min(len(keys), len(into))


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
    written: list[tuple[int, tuple[GroupTag, ...]]] = []
    for key, grant, block in zip(keys, granted, blocks, strict=False):
        source = flat(block)
        at = 0
        for part in arena.parts(grant.extents, source.nbytes):
            for start in range(0, part.nbytes, PIECE_BYTES):
                if stop():
                    return written
                piece = part[start : start + PIECE_BYTES]
                copy_bytes(piece, source[at : at + piece.nbytes])
                at += piece.nbytes
        groups = group_bytes or (source.nbytes,)
        tags = block_tags(key, groups, source, leaves)
        written.append((grant.generation, tuple(map(GroupTag, groups, tags))))
    return written


def check_store(
    keys: Sequence[bytes], blocks: Sequence[memoryview], group_bytes: Sequence[int]
) -> None:
    """ValueError unless there is one block per key, each as large as the layer groups."""
    if len(keys) != len(blocks):
        raise ValueError(f"{len(keys)} keys for {len(blocks)} blocks")
    size = sum(group_bytes)
    for block in blocks:
        if size and block.nbytes != size:
            raise ValueError(f"a block of {block.nbytes} bytes for layer groups of {size}")
        if not block.nbytes:
            raise ValueError("a block has at least one byte")


def _intact(key: bytes, block: memoryview, tags: Sequence[GroupTag], leaves: Leaves) -> bool:
    groups = [group.size for group in tags]
    if sum(groups) != block.nbytes:
        return False
    return block_tags(key, groups, block, leaves) == tuple(group.tag for group in tags)


def flat(view: memoryview) -> memoryview:
    """The bytes of a contiguous view; TypeError for another."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
