"""What is read from the environment, in one place."""

import os
import tempfile
from pathlib import Path


def state_home() -> Path:
    """Folder of what `kimistack up` keeps, one sub-folder per deployment.

    KIMISTACK_HOME, else $XDG_STATE_HOME/kimistack, else ~/.local/state/kimistack: it does not
    depend on the working directory, so that `kimistack status` finds a stack from anywhere.
    """
    own = os.environ.get("KIMISTACK_HOME")
    if own:
        return Path(own).absolute()
    xdg = os.environ.get("XDG_STATE_HOME")
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".local" / "state"
    return base / "kimistack"


def shared_memory() -> Path:
    """Where files live in memory: KIMISTACK_SHM, else /dev/shm, else the temporary folder.

    A container's /dev/shm is often 64 MiB; the variable names a larger one.
    """
    own = os.environ.get("KIMISTACK_SHM")
    if own:
        return Path(own).absolute()
    shm = Path("/dev/shm")
    return (
        shm if shm.is_dir() and os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    )
