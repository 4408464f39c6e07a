"""At which positions a model's recurrent state is worth keeping. Pure integers.

A prompt can only be taken up again where a state was kept, and a state costs as much space as the
KV of thousands of tokens, so there are few: at the end of each turn, where the next one goes on; at
every `every_tokens`, for whoever shares only a front; and where a hit was refused for want of one.
All are ends of blocks: a state is named after the block it lies behind.
"""

from collections.abc import Collection
from dataclasses import dataclass

EVERY_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """Positions in tokens. `every_tokens` is a multiple of `block_tokens` (ValueError)."""

    block_tokens: int
    every_tokens: int = EVERY_TOKENS

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.every_tokens % self.block_tokens or self.every_tokens <= 0:
            raise ValueError(
                f"checkpoints every {self.every_tokens} tokens are no ends of blocks of "
                f"{self.block_tokens}; take a multiple"
            )

    def turn_end(self, known: int) -> int:
        """Where the turn that has `known` tokens so far is kept: behind its last full block."""
        return known - known % self.block_tokens

    def wanted(self, position: int, known: int, refused: Collection[int] = ()) -> bool:
        """Whether the state at a position is to be kept. `refused` are positions at which somebody
        found all blocks and no state.
        """
        if position <= 0 or position % self.block_tokens:
            return False
        return (
            position % self.every_tokens == 0
            or position == self.turn_end(known)
            or position in refused
        )

    def stop(self, start: int, known: int, refused: Collection[int] = ()) -> int:
        """Where a chunk that begins at `start` ends at the latest, of a prompt of `known` tokens:
        the first position behind `start` whose state is wanted, which is there only between chunks.
        """
        grid = start - start % self.every_tokens + self.every_tokens
        stops = [
            grid,
            self.turn_end(known),
            *(one for one in refused if self.wanted(one, 0, refused)),
        ]
        return min((one for one in stops if start < one <= known), default=known)
