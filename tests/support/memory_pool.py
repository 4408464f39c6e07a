"""A pool in this process: what the engine sees of one, with the faults a test asks for."""

from collections.abc import Sequence

from kimi_connect.wire import Outcome, Source, Stretch
from kimi_runtime.umbp.block_pool import LoadResult


class MemoryPool:
    """Keeps every block. `outcome` other than HIT ends every load after `loads_before` blocks."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.outcome = Outcome.HIT
        self.loads_before = 0
        self.loaded_blocks = 0
        self.used_blocks = 0
        self.tenants: set[str] = set()
        self.source, self.seconds = Source.MEMORY, 0.0
        """Of a quote."""

    async def held(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))

    async def quote(
        self, keys: Sequence[bytes], *, block_bytes: int, deadline_s: float
    ) -> list[Stretch]:
        held = await self.held(keys, deadline_s=deadline_s)
        return [Stretch(held, self.source, self.seconds)] if held else []

    def used(self, keys: Sequence[bytes]) -> None:
        self.used_blocks += len(keys)

    async def load(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str,
    ) -> LoadResult:
        held = await self.held(keys, deadline_s=deadline_s)
        outcome = Outcome.HIT if held == len(keys) else Outcome.MISS
        if self.outcome is not Outcome.HIT:
            held, outcome = min(held, self.loads_before), self.outcome
        for key, view in zip(keys[:held], into, strict=False):
            view[:] = self.blocks[key]
        for view in into[held:]:
            view[:] = b"\xee" * len(view)
        self.loaded_blocks += held
        return LoadResult(held, outcome)

    async def store(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str,
    ) -> int:
        self.tenants.add(tenant)
        for key, block in zip(keys, blocks, strict=True):
            self.blocks.setdefault(key, bytes(block))
        return len(keys)
