"""One step of the engine, as integers: what the scheduler decides and the runner computes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kimi_runtime.errors import KimistackError
from kimi_runtime.spec.request import TokenLogprob

if TYPE_CHECKING:  # numpy stays out of whoever only plans
    from kimi_runtime.engine.sampler import RequestSampler


class Row(NamedTuple):
    """Tokens `start .. start + len(ids)` of one request, computed in this step.

    `blocks` is the request's block table: block `blocks[p // block_tokens]` holds the KV of
    position p. It covers every position up to the row's last one. Positions before `start` are
    already there.
    """

    request: int
    start: int
    ids: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: bool
    """Draw the next id from the logits after the row's last token."""
    keep_state: bool = False
    """The state after the row's last token is worth keeping, of a model that has one."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to compute now. Rows are independent of each other; each request has at most one."""

    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(row.ids) for row in self.rows)


class Sampled(NamedTuple):
    """The id drawn for a row with `sample`."""

    request: int
    id: int
    logprob: TokenLogprob | None = None


class RowsFailed(KimistackError):
    """Some rows of a step came to nothing; the others are as if those had not been there.

    `errors` has the reason for each failed request, `sampled` what the rest drew, in row order. The
    KV of a failed request must not be used again.
    """

    def __init__(self, errors: Mapping[int, KimistackError], sampled: Sequence[Sampled]) -> None:
        reasons = "; ".join(f"request {number}: {error}" for number, error in errors.items())
        super().__init__(f"{len(errors)} of the step's rows failed: {reasons}")
        self.errors = dict(errors)
        self.sampled = tuple(sampled)


class Runner(Protocol):
    """Computes steps. Blocks until the step is done; called from one thread at a time."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, all layers."""

    @property
    def layer_group_bytes(self) -> tuple[int, ...]:
        """Sizes of the layer groups inside a block, in order; they sum to `block_bytes`."""

    def run(
        self,
        plan: StepPlan,
        samplers: Mapping[int, "RequestSampler"],
        *,
        group_done: Callable[[int], None] | None = None,
    ) -> Sequence[Sampled]:
        """Compute every row's KV and draw ids for the rows with `sample`, in row order.

        `group_done` is called in this thread with the number of each layer group, in order, once
        every row's KV of that group can be read from the blocks; a runner that knows no such
        moment before the step's end does not call it.

        `samplers` has an entry for each request with `sample`; the caller tells the sampler what
        was accepted afterwards, `run` does not. Raises RowsFailed when some rows have no finite
        result or nothing they may draw; the other rows' ids are in it.
        """

    def block(self, number: int) -> memoryview:
        """The writable bytes of a KV block (`block_bytes` long), valid as long as the runner."""
