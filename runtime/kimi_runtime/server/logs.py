"""Structured logs: one JSON object a line on standard error.

Code logs an event's name and `extra={"fields": {...}}`. Request bodies, token ids and keys are
never among the fields.
"""

import json
import logging
import sys
import traceback
from typing import Any


class JsonFormatter(logging.Formatter):
    """Time, level, process name, event and fields as one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line. An exception's stack is given, its text is not: it may quote user input."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "process": self._process,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            stack = traceback.extract_tb(record.exc_info[2])
            line["exception"] = record.exc_info[0].__name__
            line["stack"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack]
        return json.dumps(line, default=str, ensure_ascii=False)


def configure(process: str, level: str) -> None:
    """Send every logger of this process to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("uvicorn.access").disabled = True  # our own line says more
