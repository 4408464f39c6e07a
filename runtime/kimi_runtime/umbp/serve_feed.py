"""Serving a `FeedLog` to followers, each at its own pace: `spec/umbp.py` has the wire format."""

import asyncio
from collections.abc import AsyncIterator, Mapping

from kimi_runtime.errors import RequestError
from kimi_runtime.umbp.feed import FeedLog, encode_line

HEARTBEAT_S = 1.0


class Pulse:
    """Wakes everyone who waits for the log to change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.closed = False

    def fire(self) -> None:
        """There is something new."""
        self._event.set()
        self._event = asyncio.Event()

    def close(self) -> None:
        """There will be nothing new: streams end."""
        self.closed = True
        self.fire()

    async def wait(self, within_s: float) -> bool:
        """Wait for the next change; False if none came in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


def follow_from(query: Mapping[str, str]) -> tuple[int | None, int]:
    """`(epoch, after)` of a feed request's query; RequestError if they are no numbers."""
    values: dict[str, int] = {}
    for name in ("epoch", "after"):
        text = query.get(name, "")
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) <= 20):
            raise RequestError(f"{name} must be a whole number, not {text!r}", param=name)
        values[name] = int(text)
    return values.get("epoch"), values.get("after", 0)


async def feed_lines(
    log: FeedLog,
    pulse: Pulse,
    *,
    epoch: int | None,
    after: int,
    interval_s: float,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """The lines for one follower at `(epoch, after)`, until the pulse is closed.

    Changes of `interval_s` go out together; an empty batch every `heartbeat_s` of silence. A
    follower that falls out of the log gets a snapshot in the same stream.
    """
    yield encode_line(log.hello())
    resumed = log.resumes(epoch, after)
    at = after if resumed else -1
    while not pulse.closed:
        batch = log.batch_after(at) if at >= 0 else None
        if batch is None:
            at = log.seq
            for page in log.snapshot():
                yield encode_line(page)
        elif batch.events:
            at += len(batch.events)
            yield encode_line(batch)
        elif await pulse.wait(heartbeat_s):
            await asyncio.sleep(interval_s)  # a put of many blocks becomes one batch
        elif log.seq == at:
            yield encode_line(batch)
