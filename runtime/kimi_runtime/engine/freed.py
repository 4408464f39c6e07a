"""Blocks were given back: who waits for blocks may go on."""

import asyncio
from collections.abc import Callable


class Freed:
    """Call it whenever blocks were given back: `room` grants them to who waits to read into some,
    before a step is planned with the rest.
    """

    def __init__(self) -> None:
        self.steps = asyncio.Event()
        self.room: Callable[[], None] = _nobody

    def __call__(self) -> None:
        """Let both go on."""
        self.room()
        self.steps.set()


def _nobody() -> None:
    """Nobody reads."""
