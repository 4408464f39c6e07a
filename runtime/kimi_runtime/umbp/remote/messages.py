"""Between what daemons send each other and what they mean by it.

The messages of `peers.proto` bound nothing; the models of `spec/peers.py` do. What a model refuses
is a ValueError, from either side of the wire.
"""

from kimi_connect.payloads import DEFAULT_TENANT
from kimi_runtime.spec.peers import (
    GiveBackRequest,
    LendAnswer,
    LendRequest,
    LentBlock,
    LentExtent,
    LentTag,
    OfferAnswer,
    OfferedBlock,
    OfferRequest,
)
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.umbp.proto import peers_pb2 as wire


def lend_message(asked: LendRequest) -> wire.LendRequest:
    """As it is sent."""
    return wire.LendRequest(
        epoch=asked.epoch,
        keys=[bytes.fromhex(key) for key in asked.keys],
        max_bytes=asked.max_bytes,
        within_ms=asked.within_ms,
        tenant=asked.tenant,
        reader=asked.reader,
    )


def lend_request(message: wire.LendRequest) -> LendRequest:
    """As it is meant."""
    return LendRequest(
        epoch=message.epoch,
        keys=tuple(key.hex() for key in message.keys),
        max_bytes=message.max_bytes,
        within_ms=message.within_ms,
        tenant=message.tenant or DEFAULT_TENANT,
        reader=message.reader,
    )


def lent_message(answer: LendAnswer) -> wire.LendAnswer:
    """As it is sent."""
    region = answer.region
    return wire.LendAnswer(
        epoch=answer.epoch,
        pin=answer.pin,
        region=wire.Region(
            transport=region.transport,
            peer=region.peer,
            address=region.address,
            key=region.key,
            size_bytes=region.size_bytes,
            epoch=region.epoch,
        ),
        page_bytes=answer.page_bytes,
        cut=answer.cut,
        blocks=[
            wire.Block(
                size=block.size,
                extents=[wire.Extent(first=e.first, pages=e.pages) for e in block.extents],
                tags=[wire.Tag(size=tag.size, tag=bytes.fromhex(tag.tag)) for tag in block.tags],
            )
            for block in answer.blocks
        ],
    )


def lend_answer(message: wire.LendAnswer) -> LendAnswer:
    """As it is meant."""
    region = message.region
    return LendAnswer(
        epoch=message.epoch,
        pin=message.pin,
        region=RegionRef(
            transport=region.transport,
            peer=region.peer,
            address=region.address,
            key=region.key,
            size_bytes=region.size_bytes,
            epoch=region.epoch,
        ),
        page_bytes=message.page_bytes,
        cut=message.cut,
        blocks=tuple(
            LentBlock(
                size=block.size,
                extents=tuple(LentExtent(first=e.first, pages=e.pages) for e in block.extents),
                tags=tuple(LentTag(size=tag.size, tag=tag.tag.hex()) for tag in block.tags),
            )
            for block in message.blocks
        ),
    )


def give_back_message(back: GiveBackRequest) -> wire.GiveBackRequest:
    """As it is sent."""
    return wire.GiveBackRequest(epoch=back.epoch, pin=back.pin, corrupt=back.corrupt)


def give_back_request(message: wire.GiveBackRequest) -> GiveBackRequest:
    """As it is meant."""
    return GiveBackRequest(epoch=message.epoch, pin=message.pin, corrupt=tuple(message.corrupt))


def offer_message(asked: OfferRequest) -> wire.OfferRequest:
    """As it is sent."""
    return wire.OfferRequest(
        owner=asked.owner,
        epoch=asked.epoch,
        purpose=asked.purpose,
        blocks=[
            wire.OfferedBlock(**block.model_dump(exclude={"key"}), key=bytes.fromhex(block.key))
            for block in asked.blocks
        ],
        within_ms=asked.within_ms,
    )


def offer_request(message: wire.OfferRequest) -> OfferRequest:
    """As it is meant."""
    fields = {
        "owner": message.owner,
        "epoch": message.epoch,
        "purpose": message.purpose,
        "blocks": tuple(map(_offered, message.blocks)),
        "within_ms": message.within_ms,
    }
    return OfferRequest.model_validate(fields)


def offer_answer(message: wire.OfferAnswer) -> OfferAnswer:
    """As it is meant."""
    return OfferAnswer.model_validate({"fates": tuple(message.fates)})


def _offered(block: wire.OfferedBlock) -> OfferedBlock:
    return OfferedBlock(
        key=block.key.hex(),
        size=block.size,
        worth=block.worth,
        uses=block.uses,
        idle_ms=block.idle_ms,
        tenant=block.tenant or DEFAULT_TENANT,
        priority=block.priority,
    )
