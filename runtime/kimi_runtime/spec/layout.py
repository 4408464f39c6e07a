"""How KV blocks are laid out in memory: two sides move bytes only if their layouts are equal."""

import hashlib
from typing import Literal, Self

from pydantic import PositiveInt

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.model import ModelSpec

_ELEMENT_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4}


class KvLayout(SpecModel):
    """A block is contiguous [layers, block_tokens, row_dim], so a run of layers is one span.

    `layers` counts the layers that cache something, `row_dim` the elements of one token's row.
    """

    dtype: Literal["bf16", "fp8", "fp32"]
    block_tokens: PositiveInt
    layers: PositiveInt
    row_dim: PositiveInt

    @classmethod
    def of(
        cls, model: ModelSpec, *, block_tokens: int, dtype: Literal["bf16", "fp8", "fp32"] = "bf16"
    ) -> Self:
        """The layout of a model's MLA cache."""
        return cls(
            dtype=dtype,
            block_tokens=block_tokens,
            layers=len(model.full_attention_layers),
            row_dim=model.kv_row_dim,
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.block_tokens * self.row_dim * _ELEMENT_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layers * self.layer_bytes

    def layer_groups(self, groups: int) -> tuple[int, ...]:
        """Layers in each of `groups` consecutive groups, as equal as can be, the larger first.

        ConfigError if there are fewer layers than groups.
        """
        if not 1 <= groups <= self.layers:
            raise ConfigError(
                f"{self.layers} layers cannot be cut into {groups} groups; "
                f"use 1 to {self.layers} layer groups"
            )
        size, larger = divmod(self.layers, groups)
        return tuple(size + 1 if group < larger else size for group in range(groups))

    def group_bytes(self, groups: int) -> tuple[int, ...]:
        """Bytes of each layer group of one block; they add up to `block_bytes`."""
        return tuple(layers * self.layer_bytes for layers in self.layer_groups(groups))

    def digest(self) -> str:
        """32 hex digits that are equal exactly for equal layouts (a 128-bit BLAKE2b)."""
        canonical = f"kv1 {self.dtype} {self.block_tokens} {self.layers} {self.row_dim}"
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
