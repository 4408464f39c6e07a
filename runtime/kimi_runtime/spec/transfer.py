"""How a worker meets the peers that KV is handed to and taken from across hosts."""

import ipaddress
import re
from typing import Annotated, Self

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from kimi_runtime.spec.base import SpecModel
from kimi_runtime.units import Seconds

_NAME = re.compile(
    r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*\.?"
)


def _dialled(host: str) -> str:
    """An address or a name that a peer can dial, without port and brackets."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        if not _NAME.fullmatch(host):
            raise ValueError(
                f"{host!r} is neither an address nor a name of a host; write it without port, "
                "scheme and brackets"
            ) from None
        return host
    if address.is_unspecified:
        raise ValueError(f"{host} stands for every address of a host; peers need one to dial")
    return host


Dialled = Annotated[str, AfterValidator(_dialled)]


class RdmaCard(SpecModel):
    """How `verbs` uses a network card; what is None is found on the card."""

    devices: tuple[str, ...] = Field(
        (), description="Devices that may be used: the first with an active port is. Empty: any."
    )
    port: Annotated[int, Ge(1), Le(255)] = 1
    gid_index: Annotated[int, Ge(0), Le(255)] | None = Field(
        None, description="None: the RoCE v2 address of IPv4, else of IPv6."
    )
    traffic_class: Annotated[int, Ge(0), Le(255)] = Field(
        0, description="What the network does lossless; DSCP in its upper six bits."
    )
    service_level: Annotated[int, Ge(0), Le(15)] = 0
    pkey_index: Annotated[int, Ge(0), Le(65535)] = Field(
        0, description="Of the partition in the port's table; 0 is the default one."
    )
    queue_pairs: Annotated[int, Ge(1), Le(64)] = Field(4, description="Of one session.")
    send_depth: Annotated[int, Ge(1), Le(16384)] = Field(
        128, description="Requests under way on one queue pair."
    )


class TransferNetwork(SpecModel):
    """Where `tcp` and `verbs` listen, what peers dial, and how bytes are moved."""

    host: str | None = Field(None, description="Address to listen on; None: the worker's host.")
    port: Annotated[NonNegativeInt, Le(65535)] = Field(0, description="0: any free one.")
    advertised: Dialled | None = Field(
        None,
        description="What peers dial; None: what is listened on, or the address that this host's "
        "name stands for where that is a wildcard.",
    )
    streams: Annotated[PositiveInt, Le(64)] = Field(
        4, description="Connections of one tcp session."
    )
    rdma: RdmaCard = RdmaCard()


Chance = Annotated[float, Ge(0), Le(1)]


class TransferChaos(SpecModel):
    """Faults that a process injects into what it reads from its peers, to test what they cost.

    Chances are per batch of a transfer, and exclude each other.
    """

    seed: int = 0
    delay: Chance = Field(0.0, description="It starts later, by `delay_time`.")
    drop: Chance = Field(0.0, description="Nothing moves; the deadline ends it.")
    duplicate: Chance = Field(0.0, description="It moves twice.")
    corrupt: Chance = Field(0.0, description="It reports success, and one bit is wrong.")
    stall: Chance = Field(0.0, description="A part moves, then nothing; the deadline ends it.")
    rehome: Chance = Field(0.0, description="The region is gone, as after a restart of its owner.")
    delay_time: Annotated[Seconds, Ge(0)] = 0.01

    @model_validator(mode="after")
    def _exclusive(self) -> Self:
        chances = (
            *(self.delay, self.drop, self.duplicate),
            *(self.corrupt, self.stall, self.rehome),
        )
        if sum(chances) > 1 + 1e-9:
            raise ValueError(
                f"chances of faults that exclude each other add up to {sum(chances):g}; "
                "at most 1 can be shared out"
            )
        return self
