"""Tags of blocks that are handed over, made in a thread; those of full blocks are made once."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.geometry import BlockView, KvGeometry
from kimi_runtime.umbp.tags import tag

Tags = tuple[str, ...]


class Untagged(NamedTuple):
    """Layer groups `first` to `end` of a block, and what their tags are bound to."""

    binding: bytes
    block: int
    first: int
    end: int


class BlockTags:
    """Remembers the tags of about twice as many full blocks as there are."""

    def __init__(self, geometry: KvGeometry, blocks: KvBlocks, view: BlockView) -> None:
        self._blocks, self._view = blocks, view
        self._starts = geometry.group_starts()
        self._known: OrderedDict[bytes, Tags] = OrderedDict()

    @property
    def groups(self) -> int:
        """Layer groups of a block."""
        return len(self._starts) - 1

    async def of(self, parts: Sequence[Untagged]) -> list[Tags]:
        """The tags of each part, in hex. Whoever asks keeps the blocks from changing meanwhile."""
        known = {
            part: self._known[part.binding][part.first : part.end]
            for part in parts
            if part.binding in self._known
        }
        new = [part for part in parts if part not in known]
        made = dict(zip(new, await asyncio.to_thread(self._make, new), strict=True))
        self._remember(made)
        known.update(made)
        return [known[part] for part in parts]

    def _make(self, parts: Sequence[Untagged]) -> list[Tags]:
        return [
            tuple(self._tag(part.binding, part.block, n) for n in range(part.first, part.end))
            for part in parts
        ]

    def _tag(self, binding: bytes, block: int, group: int) -> str:
        start, end = self._starts[group], self._starts[group + 1]
        return tag(binding, group, self._view(block)[start:end]).hex()

    def _remember(self, made: dict[Untagged, Tags]) -> None:
        """Keep the tags of full blocks: equal keys mean equal bytes, so they stay true.

        The rest of a partial tail's block is whatever was there before, so its tags do not.
        """
        for part, tags in made.items():
            if len(tags) == self.groups and self._blocks.held([part.binding]):
                self._known[part.binding] = tags
        while len(self._known) > 2 * self._blocks.total:
            self._known.popitem(last=False)
