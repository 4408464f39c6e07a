"""Machines as folders: what the kernel shows of good and bad ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """A node with eight GPUs and a card for each; fields are varied by `but`."""

    gpus: int = 8
    kfd: bool = True
    states: Mapping[str, str] | None = None
    gids: Mapping[int, tuple[str, str]] | None = None
    memory_gib: int = 3072
    hugepages_2mi: int = 512 * 512
    free_gib: int = 8192
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    arenas: Mapping[str, int] | None = None

    def but(self, **changed: object) -> "Machine":
        """The same machine with something else about it."""
        return replace(self, **changed)  # type: ignore[arg-type]

    def space(self, path: Path) -> tuple[int, int]:
        """As `machine.Space`."""
        assert path.exists()
        return self.free_gib * GIB, 16384 * GIB

    def laid_out(self, root: Path) -> Path:
        """Below `root`, which is returned."""
        for index in range(self.gpus):
            _write(root / f"dev/dri/renderD{128 + index}", "")
        _write(root / "dev/dri/card0", "")
        if self.kfd:
            _write(root / "dev/kfd", "")
        states = {f"rdma{i}": "4: ACTIVE" for i in range(8)} if self.states is None else self.states
        for device, state in states.items():
            self._port(root / "sys/class/infiniband" / device / "ports/1", state)
        kib = self.memory_gib * 2**20
        _write(root / "proc/meminfo", f"MemTotal:       {kib} kB\nMemFree: 1 kB\n")
        huge = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
        _write(huge / "nr_hugepages", f"{self.hugepages_2mi}\n")
        _write(huge / "free_hugepages", f"{self.hugepages_2mi}\n")
        for folder in self.folders:
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for file in self.files:
            _write(root / file.lstrip("/"), "{}")
        for name, size in (self.arenas or {}).items():
            arena = root / "run/kimistack" / name / "umbp.arena"
            _write(arena, "")
            with arena.open("r+b") as opened:
                opened.truncate(size)
        return root

    def _port(self, port: Path, state: str) -> None:
        gids = self.gids
        if gids is None:
            gids = {
                0: ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),
                1: ("fe80:0000:0000:0000:0000:0000:0000:0001", "RoCE v2"),
                3: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
            }
        _write(port / "state", f"{state}\n")
        _write(port / "link_layer", "Ethernet\n")
        for index in range(6):
            gid, kind = gids.get(index, ("0000:0000:0000:0000:0000:0000:0000:0000", ""))
            _write(port / "gids" / str(index), f"{gid}\n")
            _write(port / "gid_attrs/types" / str(index), f"{kind}\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


GOOD = Machine()
