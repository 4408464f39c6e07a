"""Checking what a daemon took over, beside its work: what is damaged is not advertised for long.

Nothing is served unchecked meanwhile: whoever copies a block, here or elsewhere, checks its copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_runtime.umbp.records import Block
from kimi_runtime.umbp.tiers.dram import DramTier

BATCH_BYTES = 32 << 20


@dataclass(slots=True)
class Proving:
    """How far it has come, in blocks."""

    intact: int = 0
    damaged: int = 0
    left: int = 0

    async def run(self, tier: DramTier, blocks: Sequence[Block]) -> None:
        """Copy and check each block; those that don't match their tags are dropped."""
        self.left = len(blocks)
        # a batch is warmed from its end, batches one after another: the order of use stays
        for batch in _batches(sorted(blocks, key=lambda block: block.generation)):
            keys = [block.key for block in reversed(batch)]
            sizes = [block.size for block in reversed(batch)]
            into = memoryview(bytearray(sum(sizes)))
            while keys:
                before = tier.pool.counters.corrupt
                good = await tier.load(keys, into)
                damaged = tier.pool.counters.corrupt > before
                self.intact += good
                self.damaged += damaged
                done = max(1, good + damaged)  # one that has gone meanwhile is passed over
                self.left -= done
                keys = keys[done:]


def _batches(blocks: Sequence[Block]) -> list[list[Block]]:
    batches: list[list[Block]] = []
    size = 0
    for block in blocks:
        if not batches or size + block.size > BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(block)
        size += block.size
    return batches
