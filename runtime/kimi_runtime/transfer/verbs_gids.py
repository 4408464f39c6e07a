"""Which address of a RoCE port to use. Pure."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kimi_runtime.errors import ConfigError


class GidKind(StrEnum):
    """How packets that carry a GID look on the wire."""

    IB = "ib"
    ROCE_V1 = "roce-v1"
    ROCE_V2 = "roce-v2"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table; `raw` is its 16 bytes."""

    index: int
    kind: GidKind
    raw: bytes

    def __str__(self) -> str:
        address = ipaddress.IPv6Address(self.raw)
        return f"{self.index}: {self.kind.value} {address.ipv4_mapped or address}"

    @property
    def is_ipv4(self) -> bool:
        """Whether it stands for an IPv4 address."""
        return ipaddress.IPv6Address(self.raw).ipv4_mapped is not None


def choose_gid(gids: Sequence[Gid], index: int | None, *, port: str) -> Gid:
    """The entry at `index`; for None the first RoCE v2 one of an IPv4 address, else of IPv6.

    Link-local addresses don't leave a subnet and come last. RoCE v1 is never chosen by itself, for
    it is not routed; an InfiniBand port has one entry that counts. ConfigError names what is there.
    """
    there = ", ".join(str(gid) for gid in gids) or "none"
    if index is not None:
        for gid in gids:
            if gid.index == index:
                return gid
        raise ConfigError(f"{port} has no GID {index}; it has {there}")
    usable = [gid for gid in gids if gid.kind is not GidKind.ROCE_V1]
    if not usable:
        raise ConfigError(
            f"{port} has no RoCE v2 address ({there}); give its network interface an IPv4 address, "
            "or name a GID index"
        )
    return min(usable, key=lambda gid: (not gid.is_ipv4, _is_link_local(gid), gid.index))


def _is_link_local(gid: Gid) -> bool:
    return ipaddress.IPv6Address(gid.raw).is_link_local
