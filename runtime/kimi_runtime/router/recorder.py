"""Sessions of a live router on their way into a file; see `line_log` for what is promised of it."""

import secrets

from kimi_runtime.router.line_log import LineLog
from kimi_runtime.router.recording import Recording
from kimi_runtime.spec.router import RecordSpec

SALT_BYTES = 32


class Recorder:
    """`sessions` is told of turns; their lines are written while `run` runs."""

    def __init__(self, spec: RecordSpec, *, started_s: float) -> None:
        self.log: LineLog[bytes] = LineLog(spec.path, spec.max_bytes, bytes, what="recording")
        salt = secrets.token_bytes(SALT_BYTES)  # forgotten with this process
        self.sessions = Recording(self.log.put, salt=salt, started_s=started_s)

    async def run(self) -> None:
        """Write until cancelled; then also the sessions that still go on."""
        try:
            await self.log.run()
        finally:
            self.sessions.close(pause=self.log.flush)
