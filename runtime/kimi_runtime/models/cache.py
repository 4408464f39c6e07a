"""The paged KV cache: where a token's latent row lies, and how its history is read back."""

import torch
from torch import Tensor


class KvCache:
    """Rows [c | R(k_r)] of every layer, block by block.

    `pool` is [blocks, layers, block_tokens, row_dim]: one block is contiguous, and so is any run of
    its layers, which is what a hand-off sends while later layers are still being computed.
    """

    def __init__(self, pool: Tensor) -> None:
        self.blocks, self.layers, self.block_tokens, self.row_dim = pool.shape
        self._rows = pool.view(-1, self.row_dim)
        self._scratch = self._rows.new_empty((0, self.row_dim))

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self._rows.dtype

    def first_slots(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Slots in layer 0 of positions given by block numbers and offsets inside, int64 [T]."""
        return blocks * (self.layers * self.block_tokens) + offsets

    def write(self, layer: int, first_slots: Tensor, rows: Tensor) -> None:
        """Store rows [T, row_dim] of one layer."""
        self._rows.index_copy_(0, first_slots + layer * self.block_tokens, rows)

    def read(self, layer: int, first_slots: Tensor, rows: int) -> Tensor:
        """One layer's rows: first_slots [G * rows] int64 -> [G, rows, row_dim].

        The result is a copy that the next call overwrites: fresh memory for every span costs more
        in page faults than the copying.
        """
        if len(self._scratch) < len(first_slots):
            self._scratch = self._rows.new_empty((len(first_slots), self.row_dim))
        read = self._scratch[: len(first_slots)]
        torch.index_select(self._rows, 0, first_slots + layer * self.block_tokens, out=read)
        return read.view(-1, rows, self.row_dim)
