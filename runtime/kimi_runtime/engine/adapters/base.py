"""What the worker's HTTP face needs of an engine, whichever engine it is."""

from collections.abc import AsyncGenerator
from typing import Protocol

from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.spec.request import GenerateChunk, GenerateRequest, HandOffProgress
from kimi_runtime.spec.worker import LoadReport, WorkerInfo
from kimi_runtime.umbp.feed import FeedLog


class Adapter(Protocol):
    """One running engine behind a worker."""

    @property
    def info(self) -> WorkerInfo:
        """What this worker is; constant."""

    @property
    def feed(self) -> FeedLog:
        """The engine's own KV blocks (tier hbm), as they come and go."""

    def load(self) -> LoadReport:
        """What it has to do right now; every call raises `seq`."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Run one request and yield chunks; the last has `finish`.

        With `kv.offer` nothing is sampled and the last chunk has `hand_off`, whose blocks stay
        pinned until `release` or the lease's end. With `kv.early` an earlier chunk may have it
        instead, which `progress` then tells more of. Closing the iterator (`aclose`, cancellation)
        frees everything the request holds at once. Raises RequestError for a request it can never
        serve, Overloaded when its queue is full, DeadlineExceeded after `deadline_ms`.
        """

    def counters(self) -> EngineCounters:
        """A snapshot of what it has done since it started."""

    def progress(self, ticket: str, after: int) -> AsyncGenerator[HandOffProgress, None]:
        """What of a hand-off told early can be read, after its first `after` parts, to its end.

        NotFound if the ticket is unknown or has ended, or never had so many parts.
        """

    async def release(self, ticket: str) -> bool:
        """End a hand-off; False if the ticket is unknown or already ended."""

    async def drain(self, *, within_s: float) -> None:
        """Refuse new requests, let the running ones finish within the time, then cancel them."""

    async def aclose(self) -> None:
        """Stop and give everything back."""
