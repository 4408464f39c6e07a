"""What KV blocks look like to those who move them without computing on them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

BlockView = Callable[[int], memoryview]
"""The bytes of a block, by its number."""


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """What both sides must agree on; `identity` covers the model as well as the layout."""

    identity: str
    block_tokens: int
    layer_group_bytes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(self.layer_group_bytes)

    def group_starts(self) -> list[int]:
        """Where each layer group begins in a block, and where the last one ends."""
        return list(accumulate(self.layer_group_bytes, initial=0))
