"""The KV-cache pool (UMBP): one daemon per node that has a pod of a role that uses it."""

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import Field

from kimi_operator.api.base import ApiModel, Folder, Rule, presettable
from kimi_operator.api.roles import RoleName
from kimi_runtime.units import Bytes, Rate, Seconds

MIN_PAGE_BYTES = 512
_SIZES_ARE_TEXT = "sizes are text with units, which CEL cannot read"


class SsdTier(ApiModel):
    """The pool's log on local SSD."""

    path: Folder = Field(description="Folder on the node's SSD, private to the deployment.")
    capacity: Annotated[Bytes, Gt(0)] = Field(description="Space it may take, e.g. 4TiB.")
    write_rate: Annotated[Rate, Gt(0)] | None = Field(
        None, description="The most that is written, e.g. 500MB/s; none: as much as fits."
    )

    rules: ClassVar = (
        Rule(
            "path must be absolute",
            lambda m: m.path.startswith("/"),
            "self.path.startsWith('/')",
            field="path",
        ),
    )


class TenantShare(ApiModel):
    """What a tenant is granted of a node's memory."""

    weight: Annotated[float, Ge(0.001), Le(1000)] = Field(
        1.0, description="Its part of the memory among the tenants that use it now."
    )
    quota: Annotated[Bytes, Gt(0)] | None = Field(
        None, description="The most it may use, whatever is free, e.g. 64GiB; none: all of it."
    )


class KvPool(ApiModel):
    """KV cache beyond the GPUs' memory, verified on every read."""

    enabled: bool = presettable(True, "false: no pool; KV lives in the GPUs only.")
    roles: Annotated[tuple[RoleName, ...], Field(max_length=2)] = presettable(
        ("prefill", "decode"), "Roles whose pods use the pool."
    )
    dram: Annotated[Bytes, Gt(0)] | None = presettable(
        None, "Host memory of one node's daemon, e.g. 512GiB; at most half of the node's."
    )
    page: Annotated[Bytes, Gt(0)] = presettable(4096, "Size of a page of the arena.")
    ssd: SsdTier | None = Field(None, description="Also keep blocks on SSD.")
    hugepages: Literal["None", "2Mi", "1Gi"] = presettable(
        "None", "Back the arena with huge pages of this size."
    )
    socket_dir: Folder = Field(
        "/run/kimistack", description="Folder on the node that daemon and engines share."
    )
    gpu_access: Literal["None", "HipIpc"] = Field(
        "None", description="HipIpc: the daemon maps the engines' GPU memory; needs privilege."
    )
    peers: Literal["Enabled", "Disabled"] = presettable(
        "Enabled",
        "Enabled (the default): what a node lacks is fetched from the daemon that has it, and what "
        "many want is copied ahead. Disabled: each node has what its own engines put.",
    )
    evacuation: Annotated[Seconds, Le(3600)] = presettable(
        30.0,
        "How long a daemon that is stopped moves its valuable blocks to peers, 30s by default; 0s: "
        "not at all.",
    )
    keep_arena: bool = presettable(
        False,
        "true: a daemon leaves its memory to the next one on the node also after a stop in order, "
        "and moves nothing. The file stays until somebody removes it.",
    )
    numa_nodes: Annotated[tuple[Annotated[int, Ge(0), Le(1023)], ...], MaxLen(64)] = Field(
        (), description="Memory in equal parts on these NUMA nodes; none: as it comes."
    )
    tenants: Annotated[dict[Annotated[str, MaxLen(253)], TenantShare], MaxLen(256)] = Field(
        {}, description="Shares by tenant, the name its API keys carry."
    )
    tenant_default: TenantShare | None = Field(
        None, description="What every tenant is granted that is not named."
    )
    update_strategy: Literal["OnDelete", "Coordinated"] = Field(
        "Coordinated",
        description="When a node's daemon gets what changed in the spec. Coordinated: one node at "
        "a time, each once none of its engines is still to be replaced. OnDelete: when its pod is "
        "deleted.",
    )

    rules: ClassVar = (
        Rule(
            "roles must name at least one role; write enabled: false to have no pool",
            lambda m: bool(m.roles),
            "!has(self.roles) || size(self.roles) > 0",
            field="roles",
        ),
        Rule(
            f"page must be a power of two of at least {MIN_PAGE_BYTES}",
            lambda m: m.page >= MIN_PAGE_BYTES and not m.page & (m.page - 1),
            None,
            field="page",
            why_not_cel=_SIZES_ARE_TEXT,
            figures=lambda m: f"it is {m.page}",
        ),
        Rule(
            "dram must hold at least one page; write a size with its unit, e.g. 512GiB",
            lambda m: m.dram is None or m.dram >= m.page,
            None,
            field="dram",
            why_not_cel=_SIZES_ARE_TEXT,
            figures=lambda m: f"it is {m.dram} bytes, a page {m.page}",
        ),
    )
