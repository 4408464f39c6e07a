"""The worker's wire format: token ids in, token ids out.

`POST /generate` takes a `GenerateRequest` and streams one `GenerateChunk` per line of JSON. The
last line of a stream that ended well has `finish`; one that failed has `error`. A stream that ends
without either was cut: the client must treat it as failed.
"""

from enum import StrEnum
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from kimi_runtime.spec.base import ReportModel, SpecModel

TokenId = Annotated[int, Ge(0), Le(2**31 - 1)]
BANS = -100.0
"""The least bias: it excludes an id, whatever its logit."""
BlockKeyHex = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    HANDED_OFF = "handed_off"


class Priority(StrEnum):
    """The class of a request; ageing keeps a lower one from starving."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


class Sampling(SpecModel):
    """How ids are drawn. Temperature 0 is greedy and ignores the other filters."""

    temperature: Annotated[float, Ge(0), Le(2)] = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: NonNegativeInt = Field(0, description="Keep the k most likely ids; 0 keeps all.")
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    presence_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] = 0.0
    repetition_penalty: Annotated[float, Gt(0), Le(10)] = 1.0
    logit_bias: dict[TokenId, Annotated[float, Ge(BANS), Le(100)]] = Field(
        {}, description="Added to the ids' logits; an id with -100 is never drawn."
    )
    seed: int | None = Field(None, description="Equal seeds give equal ids, whatever the batch.")
    max_tokens: NonNegativeInt = Field(
        description="0 computes the prompt's KV and samples nothing."
    )
    min_tokens: NonNegativeInt = 0
    stop_ids: tuple[TokenId, ...] = ()
    stop_strings: tuple[str, ...] = Field(
        (), description="Over the decoded text of the output ids."
    )
    ignore_eos: bool = False
    logprobs: Annotated[int, Ge(0), Le(20)] | None = Field(
        None, description="None: none. n: the sampled id's and the n most likely ids'."
    )


class Grammar(SpecModel):
    """A constraint on the output ids, in llguidance's Lark dialect or as a JSON schema."""

    kind: Literal["lark", "json_schema"]
    text: str
    starts_after: tuple[TokenId, ...] = Field(
        (), description="Unconstrained until one of these ids was emitted; empty: from the start."
    )
    closing_margin: NonNegativeInt | None = Field(
        None,
        description="Steer the output to a valid end before max_tokens cuts it off: from when the "
        "shortest end is this many tokens away from the budget. It bounds how much one token can "
        "lengthen the shortest end. None: the output may be cut off anywhere.",
    )


class RegionRef(ReportModel):
    """A memory region of a peer, as one transport needs it to open a session.

    `transport` names the transport that registered it; `address` is that transport's own (a file
    path for shm, host:port for tcp, a packed descriptor for verbs).
    """

    transport: str
    peer: str
    address: str
    key: NonNegativeInt
    size_bytes: NonNegativeInt
    epoch: NonNegativeInt


class HandOffBlock(ReportModel):
    """One block of a hand-off: where its bytes lie in the region, and their tags by layer group."""

    key: BlockKeyHex | None = Field(description="None for the partial tail, which has no key.")
    offset: NonNegativeInt
    size_bytes: PositiveInt
    tokens: PositiveInt
    tags: tuple[str, ...] = Field(description="Hex, one per layer group, over the group's bytes.")


class HandOff(ReportModel):
    """What a prefill worker offers: the KV of `tokens` prompt tokens, pinned for `lease_s`."""

    ticket: str
    worker: str
    release_url: str
    layout: str = Field(description="Layout digest; both sides must agree or nothing is read.")
    region: RegionRef
    also: tuple[RegionRef, ...] = Field(
        (), description="The same memory by other transports; the order is the owner's, best first."
    )
    tokens: NonNegativeInt = Field(description="Of the whole prompt, also while it is computed.")
    blocks: tuple[HandOffBlock, ...]
    lease_s: Annotated[float, Gt(0)] = Field(description="From when all blocks are computed.")
    progress_url: str | None = Field(
        None,
        description="Where `HandOffProgress` tells which blocks can be read, while the prompt is "
        "still being computed; `blocks` is empty then. None: all of them are in `blocks`.",
    )

    state_bytes: NonNegativeInt = Field(
        0,
        description="Of the state behind `tokens`, of a model that has one: it follows the last "
        "block in blocks of its own, told by `progress_url` when the prompt is computed.",
    )

    @property
    def regions(self) -> tuple[RegionRef, ...]:
        """Every way to reach the blocks."""
        return (self.region, *self.also)


class HandOffPart(ReportModel):
    """Consecutive layer groups of one block that can be read now."""

    block: NonNegativeInt = Field(description="Number of the block in the prompt, from 0.")
    key: BlockKeyHex | None = Field(description="None for the partial tail, which has no key.")
    offset: NonNegativeInt = Field(description="Of the whole block in the region, bytes.")
    group: NonNegativeInt = Field(description="The first of the layer groups.")
    tags: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="Hex, one per layer group, over the group's bytes."
    )


class HandOffProgress(ReportModel):
    """One line of `GET /handoff/{ticket}/progress?after=N`: the parts after the first N.

    How many parts there are is the one measure of progress. It only rises, a part never changes,
    and `first` is N plus what earlier lines of the stream had: whoever finds another number has
    lost count and reads no more. A line without parts says that the owner is alive.
    """

    epoch: NonNegativeInt = Field(description="Of the region; another one is another memory.")
    first: NonNegativeInt
    parts: tuple[HandOffPart, ...] = ()
    end: Literal["complete", "withdrawn", "failed"] | None = Field(
        None,
        description="complete: these are all. withdrawn: no more will come. failed: no more will "
        "come, and what came must not be used.",
    )


class KvPlan(SpecModel):
    """Where the request's KV comes from and goes to."""

    keys: tuple[BlockKeyHex, ...] = Field(
        (),
        description="The router's keys; the worker has its own and counts a mismatch.",
    )
    sources: tuple[str, ...] = Field((), description="Owners to fetch from, best first.")
    take: HandOff | None = Field(None, description="Pull the blocks this worker lacks from here.")
    offer: bool = Field(False, description="End with a HandOff instead of sampling.")
    early: bool = Field(
        False,
        description="With `offer`: tell the HandOff, with `progress_url`, as soon as the prompt is "
        "being computed. For workers whose capabilities say `layer_streaming`.",
    )


class GenerateRequest(SpecModel):
    """One generation."""

    request_id: Annotated[str, Field(min_length=1, max_length=256)]
    ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    sampling: Sampling
    grammar: Grammar | None = None
    kv: KvPlan = KvPlan()
    deadline_ms: PositiveInt = Field(description="From arrival; then the request is cancelled.")
    priority: Priority = Priority.INTERACTIVE
    tenant: str = "default"
    adapter: str = ""
    router: str = Field("", description="Name of the router replica that sent it.")


class TokenLogprob(ReportModel):
    """The natural-log probability of a sampled id, and of the most likely ids at its position."""

    id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


class KvUsage(ReportModel):
    """Where the KV of the prompt's tokens came from; the four token counts add up to the prompt."""

    hbm_tokens: NonNegativeInt = 0
    pool_tokens: NonNegativeInt = 0
    hand_off_tokens: NonNegativeInt = 0
    computed_tokens: NonNegativeInt = 0
    hand_off_bytes: NonNegativeInt = 0
    hand_off_early_bytes: NonNegativeInt = Field(
        0, description="Of `hand_off_bytes`, those read before their owner had the whole prompt."
    )
    hand_off_failure: str | None = Field(
        None,
        description="Why not all that was lacking was taken from the hand-off; the rest came from "
        "the pool or was computed. None: all of it was, or there was no hand-off.",
    )


class ErrorBody(ReportModel):
    """An error as it crosses a process boundary."""

    status: Annotated[int, Ge(400), Le(599)]
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: NonNegativeFloat | None = None


class Timing(ReportModel):
    """How long a worker took over the parts of a prompt, in seconds, one after the other."""

    prepared_s: NonNegativeFloat = Field(
        description="From arrival until what is read from elsewhere was there."
    )
    queued_s: NonNegativeFloat = Field(description="From then until it was first computed on.")
    prefill_s: NonNegativeFloat = Field(
        description="From then to the first id, or to the prompt's end where nothing is sampled; "
        "steps that it shared with others are in it."
    )


class GenerateChunk(ReportModel):
    """One line of a stream."""

    ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    usage: KvUsage | None = Field(None, description="With `finish`, and with the first ids.")
    timing: Timing | None = Field(
        None, description="With `usage`, from engines that measure it: what routers learn from."
    )
    hand_off: HandOff | None = Field(
        None, description="With `finish`, or before it where it was to be told early."
    )
    error: ErrorBody | None = None
