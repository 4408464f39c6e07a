"""One child process: its start, its end, and that it never outlives its supervisor."""

import asyncio
import ctypes
import os
import signal
from pathlib import Path

from kimi_operator.local.machine import started_ticks
from kimi_operator.local.stack import Command
from kimi_runtime.errors import ConfigError

PR_SET_PDEATHSIG = 1
LOG_CAP_BYTES = 64 * 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: a fork must not take the loader's lock


def _die_with(parent: int) -> None:
    """In the child, before it runs its program: be killed when the supervisor ends, however."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


class Child:
    """A running process in a session of its own, so that a terminal's Ctrl-C does not reach it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.started_ticks = started_ticks(process.pid)

    @classmethod
    async def start(cls, command: Command, log: Path) -> "Child":
        """Start it with its output appended to `log`. Raises ConfigError if there is no program."""
        roll_over(log)
        parent = os.getpid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: _die_with(parent),
            )
        except OSError as exc:
            raise ConfigError(f"{command.argv[0]} cannot be started: {exc.strerror}") from exc
        finally:
            os.close(output)
        return cls(process)

    async def wait(self) -> int:
        """Its exit code; the negative signal number if a signal ended it."""
        return await self._process.wait()

    async def ended_within(self, seconds: float) -> bool:
        """Whether it ends within the time."""
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, within_s: float) -> bool:
        """Ask it to end, then kill it and all it started; whether it ended by itself in time."""
        self._signal(signal.SIGTERM, group=False)
        in_time = await self.ended_within(within_s)
        self._signal(signal.SIGKILL, group=True)
        await self._process.wait()
        return in_time

    def kill_group(self) -> None:
        """End what a dead child has left behind in its session."""
        self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        try:
            if group:
                os.killpg(self.pid, number)
            elif self._process.returncode is None:
                self._process.send_signal(number)
        except ProcessLookupError:
            pass  # it ended first, which is what was wanted


def roll_over(log: Path, *, cap_bytes: int = LOG_CAP_BYTES) -> None:
    """Keep one old log beside a fresh one once a log has grown large."""
    if log.exists() and log.stat().st_size > cap_bytes:
        log.replace(log.with_suffix(".log.1"))


def exit_text(code: int) -> str:
    """An exit code for people: `exit code 3`, `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def tail(log: Path, lines: int, *, within_bytes: int = 64 * 2**10) -> list[str]:
    """The last lines of a log, undecodable bytes replaced; empty if there is none."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - within_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]
