"""Opening a transport by its name."""

from typing import Literal, assert_never

from kimi_runtime.errors import ConfigError
from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.chaos import ChaosPlan, ChaosTransport

TransportName = Literal["loopback", "shm", "tcp", "verbs"]


async def open_transport(
    name: TransportName, *, peer: str, chaos: ChaosPlan | None = None
) -> Transport:
    """The transport `name` of the process called `peer`, with the faults of `chaos` if given.

    Raises ConfigError for one that this build does not have.
    """
    transport: Transport
    match name:
        case "loopback":
            from kimi_runtime.transfer.loopback import LoopbackTransport

            transport = LoopbackTransport(peer)
        case "shm":
            from kimi_runtime.transfer.shm import ShmTransport

            transport = ShmTransport(peer)
        case "tcp" | "verbs":
            raise ConfigError(
                f"transfer: {name} is not in this build, which moves KV between processes of one "
                "host; use shm, or one worker for both roles"
            )
        case _:
            assert_never(name)
    return transport if chaos is None else ChaosTransport(transport, chaos)
