"""How a worker meets the peers that KV is handed to and taken from across hosts."""

import ipaddress
import re
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from kimi_runtime.spec.base import SpecModel

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
