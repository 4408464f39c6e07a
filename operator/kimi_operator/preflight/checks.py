"""What a machine must have for a deployment's pods, and the verdict on one. Pure.

`Wanted` is made from a spec (`demand`), `MachineFacts` by looking at a machine (`machine`), on a
node by a pod and by hand alike. A finding has both numbers and what to do.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt

GIB = 2**30
Check = Literal["gpu", "rdma", "hugepages", "memory", "disk", "model", "shared memory"]
ROCE_V2 = "RoCE v2"


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RdmaWanted(_Data):
    """Cards of one pod; `devices` names them where the spec does. `gid_index` None: any will do."""

    cards: NonNegativeInt
    devices: tuple[str, ...] = ()
    gid_index: NonNegativeInt | None = None


class DiskWanted(_Data):
    """Space below a folder; `read`: the folder has to be there already, with files in it."""

    path: str
    free_bytes: NonNegativeInt = 0
    read: bool = False
    why: str = ""


class Wanted(_Data):
    """What the pods of one deployment on one node take, the pool's daemon included.

    `memory_bytes` is beside `hugepages_bytes`, which are set apart of `hugepage_bytes` each.
    `own_folder` is the deployment's folder below `socket_dir`, of which the others belong to other
    deployments.
    """

    deployment: str
    gpus: NonNegativeInt = 0
    amd: bool = True
    rdma: RdmaWanted | None = None
    memory_bytes: NonNegativeInt = 0
    hugepage_bytes: NonNegativeInt = 0
    hugepages_bytes: NonNegativeInt = 0
    disks: tuple[DiskWanted, ...] = ()
    socket_dir: str = "/run/kimistack"
    own_folder: str = ""


class Gid(_Data):
    """One entry of a port's GID table that is not empty."""

    index: NonNegativeInt
    gid: str
    type: str


class RdmaPort(_Data):
    """A port of an RDMA device; `state` as the kernel names it, e.g. ACTIVE or DOWN."""

    device: str
    port: NonNegativeInt
    state: str
    link_layer: str
    gids: tuple[Gid, ...] = ()


class Disk(_Data):
    """The file system of a folder, or of the nearest folder above it that is there.

    `held_bytes` is what the folder has in it already, `device` tells file systems apart.
    """

    path: str
    device: int
    there: bool
    files: bool
    held_bytes: NonNegativeInt
    free_bytes: NonNegativeInt
    total_bytes: NonNegativeInt


class Hugepages(_Data):
    """Huge pages of one size."""

    page_bytes: NonNegativeInt
    total: NonNegativeInt
    free: NonNegativeInt


class MachineFacts(_Data):
    """What was found. `arenas` are bytes that pools of deployments have mapped, by folder."""

    name: str
    kfd: bool = False
    gpus: NonNegativeInt = 0
    ports: tuple[RdmaPort, ...] = ()
    memory_bytes: NonNegativeInt = 0
    hugepages: tuple[Hugepages, ...] = ()
    disks: tuple[Disk, ...] = ()
    arenas: dict[str, NonNegativeInt] = {}


class Finding(_Data):
    """The verdict on one thing; `remedy` is empty where it is as it must be."""

    check: Check
    ok: bool
    have: str
    want: str
    remedy: str = ""

    def __str__(self) -> str:
        """One line for a message."""
        return f"{self.check}: {self.have}, {self.want} wanted; {self.remedy}"


def findings(wanted: Sequence[Wanted], facts: MachineFacts) -> tuple[Finding, ...]:
    """The verdict on a machine that takes the pods of all these deployments at once.

    Devices are taken in turn by pods, so the most of any is wanted; memory and disks add up.
    """
    return (
        *_gpu(wanted, facts),
        *_rdma(wanted, facts),
        *_hugepages(wanted, facts),
        *_memory(wanted, facts),
        *_disks(wanted, facts),
    )


def _gpu(wanted: Sequence[Wanted], facts: MachineFacts) -> Iterator[Finding]:
    need = max((one.gpus for one in wanted if one.amd), default=0)
    if not need:
        return
    kfd = "/dev/kfd" if facts.kfd else "no /dev/kfd"
    if not facts.kfd:
        remedy = "load the amdgpu driver (modprobe amdgpu; dmesg | grep amdgpu says what failed)"
    else:
        remedy = "a GPU is missing: lspci -d 1002: and dmesg | grep amdgpu tell which, and why"
    ok = facts.kfd and facts.gpus >= need
    yield Finding(
        check="gpu",
        ok=ok,
        have=f"{facts.gpus} GPUs in /dev/dri and {kfd}",
        want=f"{need} GPUs",
        remedy="" if ok else remedy,
    )


def _rdma(wanted: Sequence[Wanted], facts: MachineFacts) -> Iterator[Finding]:
    for need in (one.rdma for one in wanted):
        if need is None:
            continue
        named = [p for p in facts.ports if not need.devices or p.device in need.devices]
        absent = [d for d in need.devices if d not in {p.device for p in facts.ports}]
        active = [port for port in named if port.state == "ACTIVE"]
        down = [f"{p.device}/{p.port} is {p.state}" for p in named if p.state != "ACTIVE"]
        ready = [port for port in active if gid_of(port, need.gid_index) is not None]
        cards = max(need.cards, len(need.devices))
        told = [f"{len(ready)} of {len(named)} RDMA ports can be used"]
        told += [f"{', '.join(absent)} not there"] if absent else []
        told += down
        told += [_no_gid(p, need.gid_index) for p in active if p not in ready]
        ok = len(ready) >= cards and not absent
        yield Finding(
            check="rdma",
            ok=ok,
            have=", ".join(told[:9]),
            want=f"{cards} ports",
            remedy="" if ok else _rdma_remedy(named, absent, down),
        )


def gid_of(port: RdmaPort, index: int | None) -> Gid | None:
    """The GID a hand-off over the port would use; InfiniBand needs none of a certain kind."""
    if port.link_layer != "Ethernet":
        return port.gids[0] if port.gids else Gid(index=0, gid="", type="IB")
    usable = [gid for gid in port.gids if gid.type == ROCE_V2]
    if index is not None:
        return next((gid for gid in usable if gid.index == index), None)
    routed = [gid for gid in usable if not gid.gid.startswith("fe80:")]
    return next(iter(routed), None)


def _no_gid(port: RdmaPort, index: int | None) -> str:
    there = ", ".join(f"{g.index} {g.type}" for g in port.gids) or "none"
    what = f"GID index {index}" if index is not None else "routable GID"
    return f"{port.device}/{port.port} has no {ROCE_V2} {what} (there are: {there})"


def _rdma_remedy(named: Sequence[RdmaPort], absent: Sequence[str], down: Sequence[str]) -> str:
    if absent or not named:
        return (
            "load the card's RDMA driver (rdma link shows what there is), or correct rdma.devices"
        )
    if down:
        return "bring the ports up: cable, switch port and ip link set dev … up"
    return "give the ports' interfaces an address (ip addr), or correct rdma.gidIndex"


def _hugepages(wanted: Sequence[Wanted], facts: MachineFacts) -> Iterator[Finding]:
    sizes = sorted({one.hugepage_bytes for one in wanted if one.hugepages_bytes})
    for size in sizes:
        need = sum(-(-one.hugepages_bytes // size) for one in wanted if one.hugepage_bytes == size)
        found = next((h for h in facts.hugepages if h.page_bytes == size), None)
        total = found.total if found else 0
        name = page_name(size)
        yield Finding(
            check="hugepages",
            ok=total >= need,
            have=f"{total} pages of {name}, {found.free if found else 0} free",
            want=f"{need} pages",
            remedy=""
            if total >= need
            else f"reserve them at boot: hugepagesz={name[:-1]} hugepages={need}, and restart the "
            "kubelet; or set kvPool.hugepages: None",
        )


def page_name(size: int) -> str:
    """`2Mi` or `1Gi`."""
    return f"{size // GIB}Gi" if size >= GIB else f"{size // 2**20}Mi"


def _memory(wanted: Sequence[Wanted], facts: MachineFacts) -> Iterator[Finding]:
    need = sum(one.memory_bytes for one in wanted)
    own = {one.own_folder for one in wanted}
    others = {folder: size for folder, size in facts.arenas.items() if folder not in own}
    taken = sum(others.values())
    set_apart = sum(h.page_bytes * h.total for h in facts.hugepages)
    have = max(facts.memory_bytes - set_apart, 0)
    ok = need + taken <= have
    parts = [f"{gib(have)} beside huge pages"]
    if len(wanted) > 1:
        parts += [f"{one.deployment} takes {gib(one.memory_bytes)}" for one in wanted]
    parts += [f"{folder} has taken {gib(size)}" for folder, size in sorted(others.items())]
    yield Finding(
        check="memory",
        ok=ok,
        have=", ".join(parts),
        want=gib(need + taken),
        remedy=""
        if ok
        else "lower kvPool.dram or resources.memory, or place one of the deployments elsewhere",
    )


def _disks(wanted: Sequence[Wanted], facts: MachineFacts) -> Iterator[Finding]:
    found = {disk.path: disk for disk in facts.disks}
    every = [disk for one in wanted for disk in one.disks]
    for need in every:
        disk = found.get(need.path)
        if need.read:
            ok = disk is not None and disk.there and disk.files
            state = "is empty" if disk and disk.there else "is not there"
            yield Finding(
                check="model",
                ok=ok,
                have=f"{need.path} {'has files' if ok else state}",
                want="the model's files",
                remedy="" if ok else "copy the model there, or correct model.path",
            )
            continue
        free = disk.free_bytes if disk else 0
        total = disk.total_bytes if disk else 0
        shared = [one for one in every if _on_same(found, one, disk)]
        short = sum(max(one.free_bytes - found[one.path].held_bytes, 0) for one in shared)
        ok = disk is not None and free >= short
        holds = f", {gib(disk.held_bytes)} in it" if disk and disk.held_bytes else ""
        more = f" ({gib(short)} more for all {len(shared)} there)" if len(shared) > 1 else ""
        yield Finding(
            check="disk",
            ok=ok,
            have=f"{gib(free)} of {gib(total)} free below {need.path}{holds}",
            want=f"{gib(need.free_bytes)} for {need.why}{more}",
            remedy="" if ok else f"free space there, mount a larger disk, or lower {need.why}",
        )


def _on_same(found: Mapping[str, Disk], need: DiskWanted, disk: Disk | None) -> bool:
    """Whether space is wanted of the same file system."""
    other = found.get(need.path)
    return not need.read and other is not None and disk is not None and other.device == disk.device


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.1f} GiB"
