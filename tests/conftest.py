"""What must be settled before any test module is imported."""

import importlib.metadata
import importlib.util
import os
import pathlib

import pytest


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process runs of a file, when several share the tests: all of it, and one runs all
    that need the cluster, of which there is one.
    """
    for item in items:
        clustered = item.get_closest_marker("cluster") is not None
        group = "cluster" if clustered else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
