"""Images of this checkout, or of another one.

KIMI_E2E_IMAGES names a file with what images/build printed of images that are there already.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from nodes import ROOT, Manifest


def images() -> dict[str, Manifest]:
    """Both images, built unless they are there already: name -> what images/build says of it."""
    given = os.environ.get("KIMI_E2E_IMAGES")
    if given:
        return _described(Path(given).read_text())
    return _described(_built(ROOT))


def images_of(root: Path, *names: str) -> dict[str, Manifest]:
    """The images of another checkout, built by its own script with this one's base and wheels."""
    for folder in ("images", "wheelhouse"):
        (root / "build" / folder).mkdir(parents=True, exist_ok=True)
    for archive in (ROOT / "build" / "images").glob("*.tar"):  # named by what they are made from
        _link(archive, root / "build" / "images" / archive.name)
    wheels = root / "build" / "wheelhouse"
    for file in (ROOT / "build" / "wheelhouse").iterdir():
        if file.suffix == ".whl":
            _link(file, wheels / file.name)
        else:  # what it is complete for; the other checkout may write it anew
            shutil.copyfile(file, wheels / file.name)
    return _described(_built(root, *(part for name in names for part in ("--only", name))))


def _link(source: Path, target: Path) -> None:
    if not target.exists():
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copyfile(source, target)


def _built(root: Path, *options: str) -> str:
    done = subprocess.run(
        ["nice", sys.executable, root / "images" / "build", *options],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if done.returncode:
        raise AssertionError(f"images/build: {done.stderr[-4000:]}")
    return done.stdout


def _described(text: str) -> dict[str, Manifest]:
    lines = [json.loads(line) for line in text.splitlines()]
    return {str(line["name"]): line for line in lines}
