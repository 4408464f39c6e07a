"""Where a transport that crosses hosts listens, how others reach it, and who may."""

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kimi_runtime.errors import ConfigError, PeerGone
from kimi_runtime.spec.transfer import TransferNetwork

_BACKLOG = 256


@dataclass(frozen=True, slots=True)
class RdmaSettings:
    """How `verbs` uses a network card.

    The first of `devices` (empty: of all) with an active port is used. `gid_index` None: the RoCE
    v2 address of IPv4. `traffic_class` and `service_level` must match what the network does
    lossless; 0 is its default. `pkey_index` names the partition in the port's table.
    `queue_pairs` per session, each with at most `send_depth` requests under way.
    """

    devices: Sequence[str] = ()
    port: int = 1
    gid_index: int | None = None
    traffic_class: int = 0
    service_level: int = 0
    pkey_index: int = 0
    queue_pairs: int = 4
    send_depth: int = 128


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """What `tcp` and `verbs` need to meet their peers.

    `host` and `port` are listened on, once memory is registered; port 0 takes any free one.
    `advertised` is what peers dial; None: `host`, or this host's own address where that is a
    wildcard. `call_keys` are the deployment's, newest first; a peer with any of them is accepted.
    `streams` is the number of connections one tcp session may use at once.
    """

    call_keys: Sequence[bytes]
    host: str = "127.0.0.1"
    port: int = 0
    advertised: str | None = None
    streams: int = 4
    rdma: RdmaSettings = RdmaSettings()

    def __post_init__(self) -> None:
        if not self.call_keys:
            raise ConfigError("a transport between hosts needs the deployment's call key")
        if self.streams < 1:
            raise ConfigError(f"{self.streams} streams move nothing; use 1 or more")

    @classmethod
    def of(cls, wanted: TransferNetwork, call_keys: Sequence[bytes], *, host: str) -> Self:
        """What a process's file says; it listens on `host` unless the file names another."""
        return cls(
            call_keys,
            host=wanted.host or host,
            port=wanted.port,
            advertised=wanted.advertised,
            streams=wanted.streams,
            rdma=RdmaSettings(**wanted.rdma.model_dump()),
        )


def listen(settings: NetworkSettings) -> socket.socket:
    """A listening socket; ConfigError if its address can't be had."""
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(
            (settings.host, settings.port), family=family, backlog=_BACKLOG
        )
    except OSError as exc:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port} for KV transfers "
            f"({exc.strerror}); name an address of this host and a free port"
        ) from exc
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, settings: NetworkSettings) -> str:
    """`host:port` for peers to dial."""
    host, port = settings.advertised or settings.host, listener.getsockname()[1]
    if settings.advertised is None and _is_wildcard(host):
        host = _own_address(listener.family)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`; PeerGone for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise PeerGone(f"{address!r} is no address of the form host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def _own_address(family: int) -> str:
    """The address that this host's name stands for: a pod's address, in a pod."""
    name = socket.gethostname()
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, family)]
    except OSError:
        found = []
    for address in found:
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    raise ConfigError(
        f"the name of this host, {name}, stands for no address that peers could dial; "
        "set `advertised` to one"
    )
