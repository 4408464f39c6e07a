"""KV that comes into a worker's memory without a request: early fetches, sessions' moves. Pure.

What arrives is cached like any block that was computed there, so it may be evicted again. Copies
take a part of the worker's link only, and only space that nobody is short of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kimi_runtime.router.moves import LINK_SHARE
from kimi_runtime.sim.cluster import Cluster
from kimi_runtime.sim.links import Transfer
from kimi_runtime.sim.sources import read_from
from kimi_runtime.sim.work import Read
from kimi_runtime.sim.worker import SimWorker

ROOM = 2
"""A copy needs this many times its space to be free or evictable, so that turns find room too."""


@dataclass(slots=True, eq=False)
class Copy:
    """Blocks on their way into `target`; `kept` are those that were there already."""

    target: SimWorker
    source: str
    keys: Sequence[bytes]
    """Of `blocks`, which are reserved for what comes."""
    kept: list[int]
    blocks: list[int]
    read: Read
    done: Callable[[bool], None]
    transfer: Transfer | None = None
    size_bytes: int = 0


@dataclass(slots=True)
class Copies:
    """Those under way."""

    cluster: Cluster
    moved_bytes: int = 0
    begun: int = 0
    failed: int = 0
    _open: dict[Copy, None] = field(default_factory=dict)

    def start(
        self, source: str, target: SimWorker, keys: Sequence[bytes], done: Callable[[bool], None]
    ) -> Copy | None:
        """Bring the leading run of `keys` that the source has; None if there's no room or no run.

        `done` is told later whether all of it arrived.
        """
        if target.failed:
            return None
        target.touch()
        kept = target.blocks.acquire(keys)
        lacking = keys[len(kept) :]
        read = read_from(self.cluster, source, target) if lacking else None
        count = 0 if read is None else read.hold(lacking)
        enough = target.blocks.available >= ROOM * count
        blocks = target.blocks.allocate(count) if count and enough else None
        if read is None or blocks is None:
            if read is not None:
                read.release()
            target.give_back(kept)
            return None
        size = count * self.cluster.spec.block_tokens * self.cluster.timing.kv_token_bytes
        made = Copy(target, source, lacking[:count], kept, blocks, read, done, size_bytes=size)
        self._open[made] = None
        self.begun += 1
        links = (*read.links, self.cluster.copies_link(target, LINK_SHARE))
        made.transfer = self.cluster.links.start(links, size, lambda: self._arrived(made))
        return made

    def cancel(self, copy: Copy) -> None:
        """Give it up; `done` is not told. What is over stays as it is."""
        if self._open.pop(copy, self) is self:
            return
        if copy.transfer is not None:
            self.cluster.links.cancel(copy.transfer)
        copy.read.release()
        copy.target.give_back([*copy.kept, *copy.blocks])

    def lost(self, worker: str) -> None:
        """A worker is gone: copies from it and to it end."""
        for copy in [c for c in self._open if worker in (c.source, c.target.name)]:
            self.cancel(copy)
            self.failed += 1
            copy.done(False)

    def close(self) -> None:
        """Give all of them up."""
        for copy in list(self._open):
            self.cancel(copy)

    def _arrived(self, copy: Copy) -> None:
        self._open.pop(copy, None)
        target = copy.target
        target.touch()
        sealed = [
            target.blocks.seal(block, key)
            for block, key in zip(copy.blocks, copy.keys, strict=True)
        ]
        copy.read.release()
        target.give_back([*copy.kept, *sealed])
        self.moved_bytes += copy.size_bytes
        copy.done(True)
