"""The pool's arena lies on the NUMA nodes that its file names. The machine has two."""

import mmap
import re
from pathlib import Path

import pytest

from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.memory import open_arena, segments_of, shape_of

ARENA = "arena"


def pages_by_node(path: Path) -> dict[int, int]:
    """Where the pages of a file lie, once this process has looked at every one."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert sum(mapping[at] for at in range(0, len(mapping), mmap.PAGESIZE)) >= 0
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
    found: dict[int, int] = {}
    for line in lines:
        if f"file={path}" in line:
            for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
                found[int(node)] = found.get(int(node), 0) + int(count)
    return found


@pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1), (1, 0)])
@pytest.mark.parametrize("more", [0, 64 * 2**10])  # an odd number of pages for one of them
def test_numa_nodes_of_the_file_hold_equal_parts_of_the_arena(nodes: tuple[int, ...], more: int):
    path = Path("/dev/shm") / ARENA
    spec = UmbpSpec(
        name="pool",
        port=0,
        socket=Path("/tmp/umbp.sock"),
        call_key=Path("/tmp/call-key"),
        arena=path,
        dram_bytes=64 * 2**20 + more,
        page_bytes=64 * 2**10,
        numa_nodes=nodes,
    )
    arena, _, _ = open_arena(spec, own_writer=b"test")
    try:
        found = pages_by_node(path)
        parts = dict(zip(nodes, segments_of(spec, shape_of(spec).pages), strict=True))
        assert max(parts.values()) - min(parts.values()) <= 1
        page = spec.page_bytes // mmap.PAGESIZE
        directory = sum(found.values()) - page * sum(parts.values())  # on no node in particular
        for node in (0, 1):
            part = page * parts.get(node, 0)
            assert part <= found.get(node, 0) <= part + directory
    finally:
        arena.close()
        path.unlink()
