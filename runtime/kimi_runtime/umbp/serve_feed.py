"""Serving a `FeedLog` to followers, each at its own pace: `spec/umbp.py` has the wire format."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import NamedTuple

from kimi_runtime.errors import RequestError
from kimi_runtime.umbp.feed import LINE_SUM, FeedLog, encode_line

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


class Following(NamedTuple):
    """Where a follower is, and whether it reads checksums; one of an earlier version does not."""

    epoch: int | None = None
    after: int = 0
    summed: bool = False


def follow_from(query: Mapping[str, str]) -> Following:
    """What a feed request's query asks for; RequestError if its numbers are none."""
    values: dict[str, int] = {}
    for name in ("epoch", "after"):
        text = query.get(name, "")
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) <= 20):
            raise RequestError(f"{name} must be a whole number, not {text!r}", param=name)
        values[name] = int(text)
    summed = query.get("sum") == LINE_SUM
    return Following(values.get("epoch"), values.get("after", 0), summed)


async def feed_lines(
    log: FeedLog,
    pulse: Pulse,
    following: Following,
    *,
    interval_s: float,
    heartbeat_s: float = HEARTBEAT_S,
) -> AsyncIterator[bytes]:
    """The lines for one follower, until the pulse is closed.

    Changes of `interval_s` go out together; an empty batch every `heartbeat_s` of silence. A
    follower that falls out of the log gets a snapshot in the same stream.
    """
    encode = partial(encode_line, summed=following.summed)
    yield encode(log.hello())
    resumed = log.resumes(following.epoch, following.after)
    at = following.after if resumed else -1
    while not pulse.closed:
        batch = log.batch_after(at) if at >= 0 else None
        if batch is None:
            at = log.seq
            for page in log.snapshot():
                yield encode(page)
        elif batch.events:
            at += len(batch.events)
            yield encode(batch)
        elif await pulse.wait(heartbeat_s):
            await asyncio.sleep(interval_s)  # a put of many blocks becomes one batch
        elif log.seq == at:
            yield encode(batch)
