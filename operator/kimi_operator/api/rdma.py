"""How KV moves between pods, and how pods reach the network cards that move it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from kimi_operator.api.base import ApiModel, Folder, Name, Rule, StringMap, implies, presettable

KIMISTACK_BACKENDS = ("verbs", "tcp", "shm")
OTHER_BACKENDS = ("mori", "mooncake")
Port = Annotated[int, Field(ge=1, le=65535)]


class TransferPorts(ApiModel):
    """Ports of the hand-off, for engines that take them.

    On the host's network every instance has a block of ports of its own instead.
    """

    bootstrap: Port = Field(8998, description="Where a prefill instance announces a hand-off.")
    handshake: Port = Field(6301, description="Where memory regions are exchanged.")
    notify: Port = Field(61005, description="Where a finished transfer is reported.")
    ping: Port = Field(36367, description="Where workers register with a router.")
    transfer: Port = presettable(
        8200, "Where an instance of engine kimistack hands KV over by tcp or verbs."
    )


class Transfer(ApiModel):
    """How KV blocks move from prefill to decode. Both legs get the same."""

    backend: Literal["verbs", "tcp", "shm", "mori", "mooncake"] | None = presettable(
        None,
        "verbs (RDMA), tcp or shm (one host) for engine kimistack, mori or mooncake for the "
        "others; none: verbs (tcp with rdma.allowTCP and no rdma.mode), and mori for the others.",
    )
    mode: Literal["read", "write"] = Field(
        "read", description="Decode reads, or prefill writes. kimistack reads."
    )
    ports: TransferPorts = Field(TransferPorts(), description="For engines that take them.")
    host_memory: bool = presettable(
        False,
        "With tcp and verbs, engine kimistack: instances of one node hand over through its memory, "
        "where their KV then lies in files below kvPool.socketDir.",
    )
    streams: Annotated[int, Field(ge=1, le=64)] = presettable(
        4, "Connections of one hand-off by tcp, engine kimistack."
    )
    extra: StringMap | None = Field(None, description="Passed to the engine's connector as is.")


class Rdma(ApiModel):
    """How pods reach the RDMA network cards."""

    mode: Literal["none", "hostNetwork", "multus", "devicePlugin", "hostDevice"] = Field(
        "none",
        description="multus: networks by annotation. devicePlugin: a shared resource. "
        "hostNetwork: the node's own interfaces. hostDevice: /dev/infiniband mounted.",
    )
    resource: Name | None = presettable(
        None, "Extended resource of a card, e.g. amd.com/vnic or rdma/hca."
    )
    per_pod: PositiveInt | None = presettable(None, "Cards of one pod; none: one per GPU.")
    networks: Annotated[tuple[Name, ...], Field(max_length=16)] = Field(
        (),
        description="NetworkAttachmentDefinitions as namespace/name, one per card or one for all.",
    )
    devices: Annotated[tuple[Name, ...], Field(max_length=16)] = presettable(
        (), "Verbs devices to use, in rail order, e.g. rdma0; none: found in the pod."
    )
    port: Annotated[int, Field(ge=1, le=255)] = presettable(
        1, "Port of the card, engine kimistack."
    )
    gid_index: Annotated[int, Field(ge=0, le=255)] | None = presettable(
        None, "RoCE v2 GID index, set on both legs; none: chosen by the transport."
    )
    traffic_class: Annotated[int, Field(ge=0, le=255)] | None = presettable(
        None, "Traffic class, e.g. 104."
    )
    service_level: Annotated[int, Field(ge=0, le=15)] | None = presettable(None, "Service level.")
    pkey_index: Annotated[int, Field(ge=0, le=65535)] = presettable(
        0, "Index of the partition in the port's P_Key table, engine kimistack."
    )
    queue_pairs: Annotated[int, Field(ge=1, le=64)] = presettable(
        4, "Queue pairs of one hand-off, engine kimistack."
    )
    dmabuf: bool = presettable(
        True, "Register GPU memory by dma-buf; false where a peer-memory module is loaded."
    )
    host_provider_lib: Folder | None = Field(
        None,
        description="Provider library of the host mounted into the pod, where the image's own "
        "does not match the host's kernel driver, e.g. /usr/lib/libionic.so.1.",
    )
    allow_tcp: bool = Field(
        False,
        alias="allowTCP",
        description="Let prefill and decode on different nodes hand over by TCP: slow.",
    )

    rules: ClassVar = (
        Rule(
            "mode multus needs networks, and no other mode has them",
            lambda m: (m.mode == "multus") == bool(m.networks),
            "(self.mode == 'multus') == (has(self.networks) && size(self.networks) > 0)",
            field="networks",
        ),
        Rule(
            "mode devicePlugin needs resource",
            lambda m: m.mode != "devicePlugin" or m.resource is not None,
            implies("self.mode == 'devicePlugin'", "has(self.resource)"),
            field="resource",
        ),
    )
