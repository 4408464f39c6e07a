"""What a supervisor tells whoever watches: the terminal, or the command that detached from it."""

from collections.abc import Callable
from typing import Literal

from kimi_runtime.spec.base import SpecModel


class Event(SpecModel):
    """One thing that happened. `process` is empty where it concerns the stack."""

    kind: Literal[
        "starting",  # a process was started
        "loading",  # it answers, but not that it is ready; `text` says why
        "ready",  # it serves, after `seconds`
        "died",  # it ended; `text` says how and when it is started again
        "gave_up",  # it is not started any more
        "serving",  # the stack serves; `text` is the URL
        "failed",  # the stack could not start; `text` says why
        "stopping",
        "stopped",
        "note",
    ]
    process: str = ""
    text: str = ""
    seconds: float = 0.0


Tell = Callable[[Event], None]
