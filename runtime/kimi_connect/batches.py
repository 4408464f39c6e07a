"""Copying the blocks of a whole batch, on as many threads as the client was given."""

from collections.abc import Sequence

from kimi_connect.arena import Arena
from kimi_connect.blocks import (
    SHARED_PIECE_BYTES,
    CopiedOut,
    Place,
    Stop,
    copy_local,
    copy_out,
    fill,
)
from kimi_connect.connection import now_s
from kimi_connect.copiers import Copiers, leading
from kimi_connect.placing import Written
from kimi_connect.tags import Leaves
from kimi_connect.wire import PinnedBlock


class Batches:
    """The functions of `kimi_connect.blocks`, each run of a batch in a thread of its own.

    What counts is what leads: a block behind one that was not copied is as good as not copied.
    """

    def __init__(self, threads: int, group_bytes: Sequence[int], leaves: Leaves) -> None:
        self._copiers = Copiers(threads)
        self._group_bytes, self._leaves = group_bytes, leaves

    def copy_local(
        self, arena: Arena, keys: Sequence[bytes], into: Sequence[memoryview], ends_s: float
    ) -> int:
        """See `blocks.copy_local`."""
        if self._copiers.alone:
            return copy_local(arena, keys, into, self._leaves, _until(ends_s))

        def work(run: slice) -> int:
            given = (arena, keys[run], into[run], self._leaves, _until(ends_s))
            return copy_local(*given, SHARED_PIECE_BYTES)

        return leading(self._copiers.run([view.nbytes for view in into[: len(keys)]], work))

    def copy_out(
        self,
        arena: Arena,
        keys: Sequence[bytes],
        blocks: Sequence[PinnedBlock],
        into: Sequence[memoryview],
        stop: Stop,
        ends_s: float,
    ) -> CopiedOut:
        """See `blocks.copy_out`. `stop` is called from the caller's thread alone."""
        if self._copiers.alone:
            return copy_out(arena, keys, blocks, into, self._leaves, stop)

        def work(run: slice) -> CopiedOut:
            stopped = stop if run.start == 0 else _until(ends_s)
            given = (arena, keys[run], blocks[run], into[run], self._leaves, stopped)
            return copy_out(*given, SHARED_PIECE_BYTES)

        runs = self._copiers.run([block.size for block in blocks], work)
        good = leading([(run, copied.good) for run, copied in runs])
        bad = [run.start + one.corrupt for run, one in runs if one.corrupt is not None]
        return CopiedOut(good, good if good in bad else None)

    def fill(
        self,
        keys: Sequence[bytes],
        places: Sequence[Place],
        views: Sequence[memoryview],
        ends_s: float,
    ) -> "list[Written]":
        """See `blocks.fill`: what was written whole, up to the first that was not."""
        if self._copiers.alone:
            return fill(keys, places, views, self._group_bytes, self._leaves, _until(ends_s))

        def work(run: slice) -> "list[Written]":
            given = (keys[run], places[run], views[run], self._group_bytes, self._leaves)
            return fill(*given, _until(ends_s), SHARED_PIECE_BYTES)

        runs = self._copiers.run([view.nbytes for view in views], work)
        whole = leading([(run, len(written)) for run, written in runs])
        return [one for _, written in runs for one in written][:whole]

    def close(self) -> None:
        """End the threads."""
        self._copiers.close()


def _until(ends_s: float) -> Stop:
    return lambda: now_s() >= ends_s
