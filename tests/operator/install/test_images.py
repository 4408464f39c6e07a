"""The image files: what goes into an image, and whom it runs as."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kimi_operator.kimi_cli import RUNTIME, lacks_extra

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "images"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = ("operator", "runtime")
FEW = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kimistack"][
    "image-dependencies"
]["operator"]


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    return runpy.run_path(str(IMAGES / "build"), run_name="build")


def dockerfile(name: str) -> str:
    return (IMAGES / name / "Dockerfile").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_an_image_runs_as_a_user_without_rights(name: str):
    users = re.findall(r"^USER (\S+)$", dockerfile(name), re.MULTILINE)
    assert users == ["65532:65532"]


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_stands_on_the_base_that_was_asked_for(name: str):
    stages = re.findall(r"^FROM (\S+)", dockerfile(name), re.MULTILINE)
    assert set(stages) == {"${BASE}"}


@pytest.mark.parametrize("name", NAMES)
def test_with_a_wheelhouse_nothing_is_fetched(name: str):
    commands = re.sub(r"\\\n", " ", dockerfile(name))
    fetching = re.findall(r"pip (?:wheel|install) [^&\n]*", commands)
    assert len(fetching) == 3
    for command in fetching:
        assert "${WHEELHOUSE:+--no-index" in command or "--no-deps --no-index" in command


def test_requirements_are_those_of_the_project_and_the_extras():
    script, project = IMAGES / "requirements.py", ROOT / "pyproject.toml"
    done = subprocess.run(
        [sys.executable, script, project, "operator"], capture_output=True, text=True, check=True
    )
    few = {line for line in PROJECT["dependencies"] if re.split("[>=]", line)[0] in FEW}
    assert len(few) == len(FEW)
    listed = done.stdout.splitlines()
    assert set(listed) == few | set(PROJECT["optional-dependencies"]["operator"])
    both = subprocess.run(
        [sys.executable, script, project, "operator", "engine"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(PROJECT["dependencies"]) < set(both.stdout.splitlines())


def test_the_operators_code_imports_nothing_that_its_image_leaves_out():
    code = f"""
import importlib, pkgutil, sys
import kimi_operator
for module in pkgutil.walk_packages(kimi_operator.__path__, "kimi_operator."):
    importlib.import_module(module.name)
left_out = {{*{RUNTIME}, "torch", "triton", "safetensors"}} - {{"google"}}  # a mere namespace
assert "kimi_operator.reconcile" in sys.modules
assert not left_out & {{*sys.modules}}, left_out & {{*sys.modules}}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", RUNTIME)
def test_a_command_of_the_runtime_says_what_the_operators_image_lacks(name: str):
    said = lacks_extra(ModuleNotFoundError(name=f"{name}.part"))
    assert said is not None
    assert f"no {name} here" in said
    assert "runtime's image" in said


def test_the_operators_image_has_no_engine(build: dict[str, Any]):
    assert build["EXTRAS"] == {"operator": ("operator",), "runtime": ("engine",)}


def test_a_tag_changes_with_what_is_in_the_image(build: dict[str, Any], tmp_path: Path):
    tree = tmp_path / "tree"
    for name in build["SOURCES"]:
        source = ROOT / name
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.mkdir()
            (target / "a.py").write_text("A = 1\n")
        else:
            target.write_bytes(source.read_bytes())
    build["tree_hash"].__globals__["ROOT"] = tree
    try:
        first = build["tree_hash"]("runtime", "bookworm")
        (tree / "runtime" / "__pycache__").mkdir()
        (tree / "runtime" / "__pycache__" / "a.pyc").write_bytes(b"x")
        assert build["tree_hash"]("runtime", "bookworm") == first
        (tree / "runtime" / "a.py").write_text("A = 2\n")
        assert build["tree_hash"]("runtime", "bookworm") != first
        assert build["tree_hash"]("runtime", "trixie") != build["tree_hash"]("runtime", "bookworm")
    finally:
        build["tree_hash"].__globals__["ROOT"] = ROOT
