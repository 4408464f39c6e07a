"""What pool daemons of a deployment ask of each other, beside the feed.

`Lend` pins blocks at their owner for as long as the reader says it needs, and answers where
in the owner's memory they lie; the reader copies them by the transport that the region names,
checks their tags and gives them back by `GiveBack`. `Offer` asks a peer to take
blocks, which it does in the same way if they are worth more than what it would lose for them.
"""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from kimi_runtime.spec.base import ReportModel, SpecModel
from kimi_runtime.spec.request import BlockKeyHex, RegionRef

MAX_LEND_KEYS = 256


class LendRequest(SpecModel):
    """The leading run of `keys`, as long as it takes at most `max_bytes`."""

    epoch: NonNegativeInt = Field(description="Of the owner, as its feed told.")
    keys: tuple[BlockKeyHex, ...] = Field(min_length=1, max_length=MAX_LEND_KEYS)
    max_bytes: PositiveInt
    within_ms: PositiveInt = Field(description="Until then the reader has copied them.")
    tenant: str = "default"
    reader: str = Field("", description="Who copies them for an engine; '' for an offer's sake.")


class LentExtent(ReportModel):
    """`pages` pages from page `first` of the region."""

    first: NonNegativeInt
    pages: PositiveInt


class LentTag(ReportModel):
    """The tag of one layer group of `size` bytes, in hex."""

    size: PositiveInt
    tag: str = Field(pattern=r"^[0-9a-f]{32}$")


class LentBlock(ReportModel):
    """One block: where its bytes lie and what they must be."""

    size: PositiveInt
    extents: tuple[LentExtent, ...]
    tags: tuple[LentTag, ...]


class LendAnswer(ReportModel):
    """The blocks that are lent under `pin`. In another epoch than asked for there are none.

    `cut`: the run goes on, and was cut short for its size. `region` is the memory of the pages,
    which are `page_bytes` each.
    """

    epoch: NonNegativeInt
    pin: NonNegativeInt = 0
    region: RegionRef
    page_bytes: PositiveInt
    cut: bool = False
    blocks: tuple[LentBlock, ...] = ()


class GiveBackRequest(SpecModel):
    """Nothing reads what was lent under `pin` any more.

    `corrupt` are positions of blocks that did not match their tags when they arrived; the owner
    looks whether they match at home.
    """

    epoch: NonNegativeInt
    pin: NonNegativeInt
    corrupt: tuple[NonNegativeInt, ...] = ()


class GiveBackAnswer(ReportModel):
    """Whether the pin held all the time."""

    held: bool


OfferFate = Literal["taken", "held", "no_room", "absent", "failed", "late", "closed", "busy"]
"""What became of an offered block: `held` is there already, `no_room` found nothing worth less, for
`absent` the offerer had it no more, `closed` takers drain or do not know the offerer."""


class OfferedBlock(SpecModel):
    """A block and what is known of its use."""

    key: BlockKeyHex
    size: PositiveInt
    worth: NonNegativeFloat = Field(
        description="Seconds that a byte of it saves, as the offerer expects."
    )
    uses: NonNegativeInt
    idle_ms: NonNegativeInt
    tenant: str = "default"
    priority: Annotated[int, Ge(0), Le(2)] = 1


class OfferRequest(SpecModel):
    """Take these from `owner`, who is in `epoch`, within a time."""

    owner: str
    epoch: NonNegativeInt
    purpose: Literal["drain", "replica"]
    blocks: tuple[OfferedBlock, ...] = Field(min_length=1, max_length=MAX_LEND_KEYS)
    within_ms: PositiveInt


class OfferAnswer(ReportModel):
    """What became of each block, in the order of the offer."""

    fates: tuple[OfferFate, ...]
