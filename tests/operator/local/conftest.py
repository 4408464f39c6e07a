"""Folders of one deployment below a temporary folder, locked and prepared."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kimi_operator.local.folders import Folders


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    with tempfile.TemporaryDirectory() as shm:  # a short path: sockets lie below it
        made = Folders(tmp_path / "home", Path(shm), "nano")
        lock = made.lock()
        assert lock is not None
        made.prepare()
        os.close(lock)
        yield made
