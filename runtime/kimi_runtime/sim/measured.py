"""Step times of a machine that no published table describes: fitted to what was measured. Pure."""

from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeFloat

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.timing import Constants
from kimi_runtime.spec.base import SpecModel
from kimi_runtime.spec.hardware import NODES, NodeSpec
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.spec.published import published
from kimi_runtime.spec.sizes import kv_bytes_per_token


class MeasuredStep(SpecModel):
    """What makes a step long: seconds a step, a generating row, a prompt token, and so on."""

    fixed_s: NonNegativeFloat
    row_s: NonNegativeFloat
    token_s: NonNegativeFloat
    """Of a prompt's token."""
    kv_token_s: NonNegativeFloat
    """Of each KV token that the generating rows hold."""
    pair_s: NonNegativeFloat
    """Of each (new token, token it attends to) of prompts."""
    kv_dtype: Literal["bf16", "fp8"] = "bf16"


@dataclass(frozen=True, slots=True)
class MeasuredTiming:
    """One worker whose steps take what was measured. A hand-off takes its bytes alone."""

    model: ModelSpec
    node: NodeSpec
    tensor: int
    step: MeasuredStep

    @property
    def constants(self) -> Constants:
        """See `Timing`: here it is all in the steps."""
        return Constants(0.0, self.step.row_s, 0.0, 0.0, 0.0)

    @property
    def kv_token_s(self) -> float:
        """Of each KV token in a step."""
        return self.step.kv_token_s

    @property
    def kv_token_bytes(self) -> int:
        """Of a token's KV."""
        return kv_bytes_per_token(self.model, self.step.kv_dtype)

    def step_s(self, rows: int, kv_tokens: float, new_tokens: int = 0, pairs: float = 0.0) -> float:
        """Seconds of one step; 0 if there is nothing to do."""
        if not rows and not new_tokens:
            return 0.0
        step = self.step
        return (
            step.fixed_s
            + step.row_s * rows
            + step.token_s * new_tokens
            + step.kv_token_s * kv_tokens
            + step.pair_s * pairs
        )


def measured_timing(model: str, gpu: str, *, tensor: int, step: MeasuredStep) -> MeasuredTiming:
    """By the names people write; ConfigError for what is not published."""
    node = NODES.get(gpu)
    if node is None:
        raise ConfigError(f"no GPU {gpu!r} is known; use one of {', '.join(NODES)}")
    return MeasuredTiming(published(model), node, tensor, step)
