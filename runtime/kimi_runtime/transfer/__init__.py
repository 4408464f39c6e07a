"""Opening a transport by its name."""

from typing import Literal, assert_never

from kimi_runtime.errors import ConfigError
from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.chaos import ChaosPlan, ChaosTransport
from kimi_runtime.transfer.network import NetworkSettings

TransportName = Literal["loopback", "shm", "tcp", "verbs"]


async def open_transport(
    name: TransportName,
    *,
    peer: str,
    chaos: ChaosPlan | None = None,
    network: NetworkSettings | None = None,
) -> Transport:
    """The transport `name` of the process called `peer`, with the faults of `chaos` if given.

    Those between hosts need `network`. Raises ConfigError for what is missing on this host.
    """
    transport: Transport
    match name:
        case "loopback":
            from kimi_runtime.transfer.loopback import LoopbackTransport

            transport = LoopbackTransport(peer)
        case "shm":
            from kimi_runtime.transfer.shm import ShmTransport

            transport = ShmTransport(peer)
        case "tcp":
            from kimi_runtime.transfer.tcp import TcpTransport

            transport = TcpTransport(peer, _given(name, network))
        case "verbs":
            try:
                from kimi_runtime.transfer.verbs import VerbsTransport
            except ImportError as exc:
                raise ConfigError(
                    f"transfer: verbs needs pyverbs, which this Python does not have ({exc}); "
                    "install Debian's python3-pyverbs for its own Python, or use tcp"
                ) from exc

            transport = VerbsTransport(peer, _given(name, network))
        case _:
            assert_never(name)
    return transport if chaos is None else ChaosTransport(transport, chaos)


def _given(name: str, network: NetworkSettings | None) -> NetworkSettings:
    if network is None:
        raise ConfigError(f"transfer: {name} needs network settings: the call key and an address")
    return network
