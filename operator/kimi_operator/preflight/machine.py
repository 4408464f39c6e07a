"""Look at a machine: devices, RDMA ports, huge pages, memory and disks, as the kernel shows them.

Every path is taken below `root`, so that a pod looks at its node through mounts and a test at a
folder it laid out. What cannot be read is not there.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from kimi_operator.preflight.checks import (
    Disk,
    Gid,
    Hugepages,
    MachineFacts,
    RdmaPort,
    Wanted,
)

ARENA = "umbp.arena"
FILES = 100_000
SMALLEST_HUGE_PAGE = 2**21
"""A file on hugetlbfs has its page size as block size; its memory was set apart before."""
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
Space = Callable[[Path], tuple[int, int]]
"""Free and total bytes of the file system that a path is on."""


def space_of(path: Path) -> tuple[int, int]:
    """What an unprivileged process could still write there, and the size of it all."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


def machine_facts(
    name: str, wanted: Iterable[Wanted], root: Path = Path("/"), space: Space = space_of
) -> MachineFacts:
    """All that the checks of `wanted` ask about."""
    every = tuple(wanted)
    return MachineFacts(
        name=name,
        kfd=(root / "dev/kfd").exists(),
        gpus=len(_names(root / "dev/dri", r"renderD\d+")),
        ports=tuple(_ports(root / "sys/class/infiniband")),
        memory_bytes=_memory(root),
        hugepages=tuple(_hugepages(root / "sys/kernel/mm/hugepages")),
        disks=tuple(_disk(root, disk.path, space) for one in every for disk in one.disks),
        arenas=_arenas(root, {one.socket_dir for one in every}),
    )


def _names(folder: Path, pattern: str) -> list[str]:
    try:
        found = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    return [name for name in found if re.fullmatch(pattern, name)]


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""  # an entry of a GID table without a type answers with EINVAL


def _number(file: Path) -> int:
    text = _text(file)
    return int(text) if text.isdigit() else 0


def _ports(folder: Path) -> Iterable[RdmaPort]:
    """The kernel writes a state with its number before it, as `4: ACTIVE`."""
    for device in _names(folder, r".+"):
        for number in _names(folder / device / "ports", r"\d+"):
            port = folder / device / "ports" / number
            yield RdmaPort(
                device=device,
                port=int(number),
                state=_text(port / "state").rpartition(":")[2].strip() or "UNKNOWN",
                link_layer=_text(port / "link_layer"),
                gids=tuple(_gids(port)),
            )


def _gids(port: Path) -> Iterable[Gid]:
    for index in sorted(map(int, _names(port / "gids", r"\d+"))):
        gid = _text(port / "gids" / str(index))
        if gid and gid != EMPTY_GID:
            kind = _text(port / "gid_attrs" / "types" / str(index))
            yield Gid(index=index, gid=gid, type=kind or "unknown")


def _memory(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemTotal":
            return int(rest.split()[0]) * 1024
    return 0


def _hugepages(folder: Path) -> Iterable[Hugepages]:
    for name in _names(folder, r"hugepages-\d+kB"):
        size = int(name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        total, free = (_number(folder / name / file) for file in ("nr_hugepages", "free_hugepages"))
        yield Hugepages(page_bytes=size, total=total, free=free)


def _disk(root: Path, path: str, space: Space) -> Disk:
    at = root / path.lstrip("/")
    there = at.is_dir()
    nearest = at
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        free, total = space(nearest)
        device = nearest.stat().st_dev
    except OSError:
        free, total, device = 0, 0, 0
    return Disk(
        path=path,
        device=device,
        there=there,
        files=there and bool(_names(at, r".+")),
        held_bytes=_held(at) if there else 0,
        free_bytes=free,
        total_bytes=total,
    )


def _held(folder: Path) -> int:
    """Bytes that the folder's files take, of the first `FILES` of them; links are not followed."""
    total = seen = 0
    for at, _, files in os.walk(folder):
        for name in files:
            seen += 1
            if seen > FILES:
                return total
            try:
                total += os.lstat(os.path.join(at, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _arenas(root: Path, folders: Iterable[str]) -> dict[str, int]:
    """Memory that pools of deployments on this machine have, as far as it may be read."""
    found = {}
    for folder in folders:
        for name in _names(root / folder.lstrip("/"), r".+"):
            try:
                arena = (root / folder.lstrip("/") / name / ARENA).stat()
            except OSError:
                continue
            if arena.st_blksize < SMALLEST_HUGE_PAGE:
                found[name] = arena.st_size
    return found
