"""Following a hand-off whose prompt is still being computed: which parts can be read, as they come.

The owner's one list of parts is the truth. A connection that breaks is made again and goes on
behind the part that came last; an owner from which nothing is heard for too long, whose count does
not fit ours, or who speaks of another epoch, is followed no more. Where nobody listens
any more the owner has ended, and nothing is waited for.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import aiohttp
from pydantic import ValidationError

from kimi_runtime import clock
from kimi_runtime.engine.open_offer import HEARTBEAT_S
from kimi_runtime.engine.pull import HandOffEnded, HandOffFailed, Readable, Wanted
from kimi_runtime.engine.signed import signed_headers
from kimi_runtime.errors import PeerGone, RegionGone, TransferLate
from kimi_runtime.spec.request import HandOff, HandOffPart, HandOffProgress

SILENCE_S = 3 * HEARTBEAT_S
"""How long an owner may be silent at least, whatever deadlines are."""
_RETRY_S = 0.05
_MAX_LINE_BYTES = 8 * 2**20


class ProgressSource(Protocol):
    """A way to hear of an owner's progress."""

    def lines(self, url: str, after: int) -> AsyncGenerator[HandOffProgress, None]:
        """The lines from part `after` on.

        PeerGone if the connection can't be made or breaks, RegionGone if there is no such hand-off
        any more, ValueError for what is no progress.
        """


class HttpProgress:
    """Progress over HTTP, signed with the deployment's call key, while `run` runs."""

    def __init__(self, call_key: bytes, *, silence_s: float) -> None:
        self._call_key = call_key
        self._timeout = aiohttp.ClientTimeout(total=None, connect=silence_s, sock_read=silence_s)
        self._http: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Keep connections until cancelled."""
        async with aiohttp.ClientSession(
            timeout=self._timeout, read_bufsize=_MAX_LINE_BYTES
        ) as self._http:
            await asyncio.Event().wait()

    async def lines(self, url: str, after: int) -> AsyncGenerator[HandOffProgress, None]:
        """See `ProgressSource.lines`."""
        url = f"{url}?after={after}"
        headers = signed_headers(self._call_key, "GET", url)
        if self._http is None:
            raise PeerGone("nothing is followed while the engine does not run")
        try:
            async with self._http.get(url, headers=headers) as answer:
                if 400 <= answer.status < 500:
                    raise RegionGone("the hand-off has ended, or its owner does not know it")
                if not answer.ok:
                    raise PeerGone(f"the hand-off's owner answered {answer.status}")
                async for line in answer.content:
                    if not line.endswith(b"\n"):
                        break  # cut
                    yield HandOffProgress.model_validate_json(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            if isinstance(getattr(exc, "os_error", exc), ConnectionRefusedError):
                # its host answers: the process has ended, and what comes next is another epoch
                raise RegionGone("nobody listens where the hand-off's owner did") from exc
            raise PeerGone(f"the hand-off's owner is not heard ({type(exc).__name__})") from exc
        except ValidationError as exc:
            raise ValueError("the hand-off's owner sent what is no progress") from exc
        raise PeerGone("the hand-off's owner broke off")


async def followed(
    source: ProgressSource, hand_off: HandOff, *, silence_s: float
) -> AsyncGenerator[HandOffProgress, None]:
    """Every part once, in order, until the owner says that these are all.

    HandOffEnded or HandOffFailed if it gives up before, TransferLate or PeerGone if it is not heard
    for `silence_s` seconds, RegionGone and ValueError if it is not the one that was meant.
    """
    assert hand_off.progress_url is not None
    have, heard_s = 0, clock.now_s()
    while True:
        try:
            async with aclosing(source.lines(hand_off.progress_url, have)) as lines:
                while True:
                    left_s = silence_s + heard_s - clock.now_s()
                    line = await _next(lines, within_s=left_s)
                    _check(line, hand_off, have)
                    have += len(line.parts)
                    yield line
                    heard_s = clock.now_s()
                    if line.end == "complete":
                        return
                    if line.end is not None:
                        raise (HandOffFailed if line.end == "failed" else HandOffEnded)(
                            f"{hand_off.worker} gave the hand-off up: {line.end}"
                        )
        except PeerGone:
            if clock.now_s() + _RETRY_S >= heard_s + silence_s:
                raise
        await asyncio.sleep(_RETRY_S)


async def parts_wanted(
    lines: AsyncGenerator[HandOffProgress, None],
    targets: Sequence[int],
    bindings: Sequence[bytes],
    *,
    first: int,
    groups: int,
) -> AsyncGenerator[Readable, None]:
    """What is readable of the blocks from number `first` on, to be read into `targets`.

    It ends as soon as all `groups` layer groups of all of them are, whatever else the owner is
    still computing. ValueError if their parts don't follow each other.
    """
    told = [0] * len(targets)
    lacking = len(targets)
    async with aclosing(lines):
        async for line in lines:
            wanted = []
            for part in line.parts:
                position = part.block - first
                if not 0 <= position < len(targets):
                    continue
                wanted.append(_wanted(part, position, targets[position], bindings[position], told))
                told[position] += len(part.tags)
                lacking -= told[position] == groups
            if wanted:
                yield Readable(wanted, early=line.end is None)
            if not lacking:
                return


def _wanted(
    part: HandOffPart, position: int, target: int, binding: bytes, told: Sequence[int]
) -> Wanted:
    if part.group != told[position]:
        raise ValueError(f"layer group {part.group} of a block comes after {told[position]} groups")
    return Wanted(position, part.offset, target, binding, part.group, part.tags)


async def _next(
    lines: AsyncGenerator[HandOffProgress, None], *, within_s: float
) -> HandOffProgress:
    try:
        async with asyncio.timeout(max(0.0, within_s)):
            return await anext(lines)
    except TimeoutError as exc:
        raise TransferLate("the hand-off's owner tells nothing") from exc
    except StopAsyncIteration as exc:
        raise PeerGone("the hand-off's owner broke off") from exc


def _check(line: HandOffProgress, hand_off: HandOff, have: int) -> None:
    if line.epoch != hand_off.region.epoch:
        raise RegionGone(f"{hand_off.worker} has restarted")
    if line.first != have:
        raise ValueError(f"parts from number {line.first} on came where {have} were known")
