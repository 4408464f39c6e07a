"""What other engines load must run with their Python and nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kimi_connect

SOURCES = sorted(Path(kimi_connect.__file__).parent.glob("*.py"))
ALLOWED = set(sys.stdlib_module_names) | {"kimi_connect", "numpy", "torch"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_module_needs_the_standard_library_numpy_and_torch_at_most(source):
    tree = ast.parse(source.read_text(), feature_version=(3, 10))
    names = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= ALLOWED


def test_it_loads_without_numpy_and_copies_all_the_same():
    code = """
import sys
sys.modules["numpy"] = None
from kimi_connect.client import ArenaClient
from kimi_connect.copying import copy_bytes
data, into = memoryview(bytes(range(256)) * 20_000), memoryview(bytearray(256 * 20_000))
copy_bytes(into, data)
assert into == data
try:
    ArenaClient("nobody", b"k" * 32)
except ImportError:
    ArenaClient("nobody", b"k" * 32, leaves=lambda view: b"").close()
    print("ok")
"""
    root = str(Path(kimi_connect.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "ok\n"
