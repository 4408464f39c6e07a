"""What must be settled before any test module is imported."""

import functools
import importlib.metadata
import importlib.util
import os
import pathlib

import pytest
from xdist.scheduler import LoadFileScheduling


def has_gpu() -> bool:
    """Whether torch will see a GPU, without the seconds it takes to import torch."""
    nodes = any(pathlib.Path(node).exists() for node in ("/dev/kfd", "/dev/nvidiactl"))
    torch = importlib.util.find_spec("torch")
    return nodes and torch is not None and "+cpu" not in importlib.metadata.version("torch")


# Triton reads this when it and the kernel files are first imported, which a test of any package may
# do. Without a GPU its interpreter is the only way to run a kernel; tests that compile, or run on a
# GPU, do so in a process of their own.
if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"


class ByFile(LoadFileScheduling):
    """Where several processes share the tests: a file's are run by one of them, and all files that
    need the cluster by the same one, since there is one cluster.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "cluster" if needs_cluster(pathlib.Path(__file__).parents[1] / file) else file


@functools.cache
def needs_cluster(file: pathlib.Path) -> bool:
    """Whether the file has tests that are marked so."""
    return "mark.cluster" in file.read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    """See `ByFile`."""
    return ByFile(config, log)
