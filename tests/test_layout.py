"""The shape of the repository that imports and readers rely on."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("folder", ["operator", "runtime", "tests", "e2e", "tests/operator"])
def test_source_roots_are_no_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(
    "path",
    [
        "pyproject.toml",
        "README.md",
        "operator",
        "runtime",
        "crds",
        "charts",
        "images",
        "tests",
        "e2e",
        "LICENSE",
        "constraints.txt",
    ],
)
def test_the_top_level_has(path):
    assert (ROOT / path).exists()


def test_torch_is_pinned_to_one_version_everywhere():
    assert '"torch==2.13.0"' in (ROOT / "pyproject.toml").read_text()
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_python_started_at_the_root_still_finds_the_standard_library(tmp_path):
    done = subprocess.run(
        ["python3", "-c", "import collections, operator; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert str(ROOT) not in done.stdout
