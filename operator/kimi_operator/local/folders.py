"""The folders of one deployment, its lock and its files. All of them are private to the user."""

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from kimi_operator.local.stack import Stack, StackState
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.router import EXPLAIN_FILE, RECORD_FILE

SOCKET_PATH_CAP = 107
"""Longest path of a Unix socket (`sun_path` less its final zero)."""
_LONGEST_SOCKET_NAME = len("/umbp-0.sock.control")


class Folders:
    """Paths of a deployment's state, below `home`, and of its shared memory, below `shm`."""

    def __init__(self, home: Path, shm: Path, name: str) -> None:
        self.home = home
        self.state = home / name
        unique = hashlib.sha256(str(self.state).encode()).hexdigest()[:8]
        self.run = shm / f"kimistack-{os.getuid()}-{name}-{unique}"
        self.call_key = self.state / "call-key"
        self.specs = self.state / "specs"
        self.logs = self.state / "logs"
        self.explain = self.state / EXPLAIN_FILE
        self.record = self.state / RECORD_FILE
        self._lock = self.state / "lock"
        self._state_file = self.state / "state.json"

    def prepare(self) -> None:
        """Make the folders and, the first time, the call key. The lock must be held."""
        if len(str(self.run)) + _LONGEST_SOCKET_NAME > SOCKET_PATH_CAP:
            raise ConfigError(
                f"{self.run} is too long for Unix sockets within it; use a shorter metadata.name"
            )
        for folder in (self.specs, self.logs):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.remove_run_dir()
        self.run.mkdir(mode=0o700)
        if not self.call_key.exists():
            write_private(self.call_key, secrets.token_hex(32) + "\n")

    def lock(self) -> int | None:
        """A descriptor that holds the deployment's lock, None if another process holds it.

        The kernel releases it with the last process that has the descriptor, however that ends.
        """
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.state.mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            raise ConfigError(
                f"the state folder {self.state} cannot be made ({exc.strerror}); "
                "set KIMISTACK_HOME to a folder of yours"
            ) from exc
        if self.state.stat().st_uid != os.getuid():
            raise ConfigError(f"{self.state} belongs to another user; set KIMISTACK_HOME")
        self.state.chmod(0o700)
        held = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(held)
            return None
        return held

    def is_running(self) -> bool:
        """Whether a supervisor holds the lock."""
        if not self._lock.exists():
            return False
        held = self.lock()
        if held is None:
            return True
        os.close(held)
        return False

    def read_state(self) -> StackState | None:
        """What a supervisor wrote last; None if there is nothing, or nothing readable."""
        try:
            return StackState.model_validate_json(self._state_file.read_bytes())
        except (OSError, ValidationError):
            return None

    def write_state(self, state: StackState) -> None:
        """Replace the state as a whole: a reader sees the old one or the new one."""
        write_private(self._state_file, state.model_dump_json(indent=1))

    def write_stack(self, stack: Stack) -> Path:
        """The file a detached supervisor starts from."""
        path = self.specs / "stack.json"
        write_private(path, stack.model_dump_json(indent=1))
        return path

    def remove_state(self) -> None:
        """Forget the processes; logs, specs and the call key stay."""
        self._state_file.unlink(missing_ok=True)

    def remove_run_dir(self) -> None:
        """Remove sockets and shared memory. A folder that is not ours is not touched."""
        try:
            found = self.run.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"{self.run} is there but is no folder of yours; remove it")
        shutil.rmtree(self.run)


def write_private(path: Path, text: str) -> None:
    """Write a file that only the user can read, as a whole or not at all. Raises ConfigError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    except OSError as exc:
        with suppress(OSError):
            fresh.unlink()
        raise ConfigError(
            f"{path} cannot be written ({exc.strerror}); make room, or set KIMISTACK_HOME to "
            "another folder of yours"
        ) from exc


def deployments(home: Path) -> tuple[str, ...]:
    """Names of the deployments that have a state here, running or not."""
    if not home.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in home.iterdir() if (entry / "lock").is_file()))
