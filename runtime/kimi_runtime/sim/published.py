"""Figures others measured on the MI355X, with their sources: `published_series.json`, as models."""

from functools import lru_cache
from pathlib import Path

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from kimi_runtime.spec.base import SpecModel

FILE = Path(__file__).with_name("published_series.json")


class Point(SpecModel):
    """One measurement in a closed loop of `concurrency` requests."""

    concurrency: PositiveInt
    total_tokens_per_s: PositiveFloat = Field(description="Input and output, of the whole system.")
    ttft_s: PositiveFloat
    tpot_s: PositiveFloat


class Series(SpecModel):
    """One system under rising load. `input` and `output` are ranges of uniform lengths."""

    name: str
    source: str
    fitted: bool = Field(description="Used to fit constants; the others test them.")
    model: str
    tensor: PositiveInt
    prefill: int = Field(ge=0, description="Prefill workers; 0: aggregated.")
    decode: PositiveInt
    input: tuple[PositiveInt, PositiveInt]
    output: tuple[PositiveInt, PositiveInt]
    points: tuple[Point, ...]

    @property
    def mean_input(self) -> float:
        """Tokens of a prompt, on average."""
        return sum(self.input) / 2

    @property
    def mean_output(self) -> float:
        """Tokens of an answer, on average."""
        return sum(self.output) / 2


class MoeTable(SpecModel):
    """Microseconds of one MoE layer on one rank, by tokens, for each model and parallelism."""

    model_config = ConfigDict(extra="allow", frozen=True)

    source: str
    tokens: tuple[PositiveInt, ...]

    def seconds(self, name: str) -> tuple[float, ...] | None:
        """The column of that name; None if nobody published it."""
        column = (self.model_extra or {}).get(name)
        return None if column is None else tuple(1e-6 * float(value) for value in column)


class Published(SpecModel):
    """All of the file."""

    moe_kernel_us: MoeTable
    series: tuple[Series, ...]


@lru_cache(maxsize=1)
def published_figures() -> Published:
    """The file, read once."""
    return Published.model_validate_json(FILE.read_bytes())
