"""Blocks were given back outside a step: who waits for blocks may go on."""

import asyncio


class Freed:
    """Call it whenever blocks were given back. One waiter each: the step loop, the next fetch."""

    def __init__(self) -> None:
        self.steps = asyncio.Event()
        self.fetch = asyncio.Event()

    def __call__(self) -> None:
        """Wake both."""
        self.steps.set()
        self.fetch.set()
