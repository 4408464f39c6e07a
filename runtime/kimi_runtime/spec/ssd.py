"""The SSD tier's options."""

from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import Field, model_validator

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.units import Bytes, format_bytes

MAX_SEGMENTS = 4096
"""One file descriptor each."""

DIRECT_ALIGN = 4096

SEGMENT_BYTES = 256 << 20
MIN_CAPACITY_BYTES = 16 << 20


class SsdSpec(SpecModel):
    """Where a node's log of KV blocks lies, how much disk it may take, and how it is written.

    One segment is kept free for compaction, so blocks can take at most `capacity - segment`, and of
    that at most `fill`: what remains dead bounds how often compaction copies a live byte, to
    1 / (1 - fill).
    """

    folder: Path
    capacity: Annotated[Bytes, Gt(0)] = Field(description="Most disk the log may take, 2TiB.")
    segment: Annotated[Bytes, Gt(0)] = Field(
        SEGMENT_BYTES, description="Size of one file; a block must fit."
    )
    fill: Annotated[float, Gt(0), Le(1)] = 0.85
    align: Annotated[int, Ge(128), Le(65536)] = Field(
        DIRECT_ALIGN, description="Where records begin. A log keeps what it was made with."
    )
    direct: bool = Field(False, description="O_DIRECT: bypass the page cache.")
    durability: Literal["strict", "none"] = Field(
        "none", description="strict: on stable storage before a write is reported done."
    )
    verify_at_start: Literal["unsealed", "all"] = Field(
        "unsealed",
        description="Whose bodies a start reads: of files that were not closed cleanly, or all.",
    )
    io_threads: Annotated[int, Ge(1), Le(64)] = 4
    max_pending: Annotated[Bytes, Gt(0)] = Field(
        256 << 20, description="Bytes of writes under way beyond which new ones are dropped."
    )

    @classmethod
    def sized(cls, folder: Path, capacity: int) -> Self:
        """A log in `folder` whose segments suit its capacity, in bytes; ConfigError if too small.

        Of 256 MiB, but at most a sixteenth of a small log and at least a 4096th of a large one.
        """
        if capacity < MIN_CAPACITY_BYTES:
            raise ConfigError(
                f"an SSD tier of {format_bytes(capacity)} is too small; give it at least "
                f"{format_bytes(MIN_CAPACITY_BYTES)}"
            )
        wanted = max(min(SEGMENT_BYTES, capacity // 16), -(-capacity // MAX_SEGMENTS))
        return cls(folder=folder, capacity=capacity, segment=-(-wanted // (1 << 20)) << 20)

    @property
    def segments(self) -> int:
        """Files the capacity has room for."""
        return self.capacity // self.segment

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.align & (self.align - 1):
            raise ValueError(f"align: {self.align} is not a power of two")
        if self.direct and self.align % DIRECT_ALIGN:
            raise ValueError(f"align: O_DIRECT needs a multiple of {DIRECT_ALIGN}")
        if self.segment % self.align or self.segment < 8 * self.align:
            raise ValueError(f"segment: a multiple of align, at least {8 * self.align} bytes")
        if not 3 <= self.segments <= MAX_SEGMENTS:
            raise ValueError(
                f"capacity: {format_bytes(self.capacity)} is {self.segments} segments of "
                f"{format_bytes(self.segment)}; 3 to {MAX_SEGMENTS} are possible"
            )
        return self
