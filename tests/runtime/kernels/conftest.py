"""Fixtures of the kernel tests. Each test module skips itself where Triton is absent."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def run_python(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python ARGS` in the repository without Triton's interpreter, its cache in a tmp dir."""
    cache = tmp_path_factory.mktemp("triton-cache")
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env = inherited | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "runtime")}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *args]
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False
        )

    return run


@pytest.fixture
def device():
    """Where kernels run in these tests: the GPU, or the CPU under Triton's interpreter."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
