"""Opening the engine a worker's file names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import assert_never

from kimi_runtime.engine.adapters.base import Adapter
from kimi_runtime.spec.worker import WorkerSpec


@asynccontextmanager
async def open_adapter(spec: WorkerSpec) -> AsyncIterator[Adapter]:
    """The running engine of `spec`; on the way out it drains and gives everything back."""
    match spec.engine:
        case "kimistack":
            from kimi_runtime.engine.adapters.kimistack import open_kimistack

            async with open_kimistack(spec) as adapter:
                yield adapter
        case _:
            assert_never(spec.engine)
