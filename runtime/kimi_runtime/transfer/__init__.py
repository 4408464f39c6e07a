"""Opening a transport by its name."""

from typing import Literal, assert_never

from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.chaos import ChaosPlan, ChaosTransport

TransportName = Literal["loopback", "shm"]


async def open_transport(
    name: TransportName, *, peer: str, chaos: ChaosPlan | None = None
) -> Transport:
    """The transport `name` of the process called `peer`, with the faults of `chaos` if given."""
    transport: Transport
    match name:
        case "loopback":
            from kimi_runtime.transfer.loopback import LoopbackTransport

            transport = LoopbackTransport(peer)
        case "shm":
            from kimi_runtime.transfer.shm import ShmTransport

            transport = ShmTransport(peer)
        case _:
            assert_never(name)
    return transport if chaos is None else ChaosTransport(transport, chaos)
