"""Taking a hand-off: which blocks a request lacks, and reading them, however they are told."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kimi_runtime.engine.follow import SILENCE_S, ProgressSource, followed, parts_wanted
from kimi_runtime.engine.pull import BlockReader, Pulled, Readable, Wanted
from kimi_runtime.engine.request import Request
from kimi_runtime.spec.request import HandOff


def blocks_lacking(request: Request, take: HandOff, trusted: int) -> tuple[range, bool]:
    """Indices of the hand-off's blocks to read, and whether it matches all that is lacking.

    The first `trusted` of the request's reusable keys may be brought in. The block with the last
    token comes last. It is private to the request even if it is full, because that token is
    computed here for its logits, and only the same prompt's will do.
    """
    if take.progress_url is not None:
        return _lacking_of_open(request, take, trusted)
    first, keys = len(request.blocks), request.reusable_keys
    most_shared = min(trusted, len(take.blocks))
    end = first
    while end < most_shared and take.blocks[end].key == keys[end].hex():
        end += 1
    most = len(request.tokens) - request.samples
    if most == len(keys) * request.chain.block_tokens:
        return range(first, end), end == len(keys)
    key = next((full.hex() for full in request.chain.keys[len(keys) :]), None)
    same_prompt = take.tokens == len(request.tokens) and len(take.blocks) == len(keys) + 1
    if end == len(keys) and same_prompt and take.blocks[end].key == key:
        return range(first, end + 1), True
    return range(first, end), False


def _lacking_of_open(request: Request, take: HandOff, trusted: int) -> tuple[range, bool]:
    """Of a hand-off whose blocks are not known yet: those of the same prompt."""
    first, keys = len(request.blocks), request.reusable_keys
    same_prompt = take.tokens == len(request.tokens)
    if not same_prompt or trusted < len(keys):
        return range(first, max(first, trusted) if same_prompt else first), False
    most = len(request.tokens) - request.samples
    return range(first, len(keys) + (most > len(keys) * request.chain.block_tokens)), True


class HandOffReader:
    """Reads hand-offs by `reader`, those that are still growing with what `progress` tells."""

    def __init__(
        self, reader: BlockReader, progress: ProgressSource | None, *, deadline_s: float
    ) -> None:
        self._reader, self._progress, self._deadline_s = reader, progress, deadline_s

    def refusal(self, take: HandOff) -> str | None:
        """Why nothing may be read of the hand-off at all; None if it can be tried."""
        if take.progress_url is not None and self._progress is None:
            return "no_progress"
        return self._reader.refusal(take)

    async def pull(
        self, take: HandOff, first: int, bindings: Sequence[bytes], targets: Sequence[int]
    ) -> Pulled:
        """Read the hand-off's blocks from number `first` on into blocks of ours, each verified
        against its binding; see `BlockReader.pull`.
        """
        async with aclosing(self._readable(take, first, bindings, targets)) as readable:
            return await self._reader.pull(
                take.regions, readable, len(targets), deadline_s=self._deadline_s
            )

    async def _readable(
        self, take: HandOff, first: int, bindings: Sequence[bytes], targets: Sequence[int]
    ) -> AsyncGenerator[Readable, None]:
        """What can be read, as it can."""
        if take.progress_url is not None and self._progress is not None:
            silence_s = max(SILENCE_S, self._deadline_s)
            lines = followed(self._progress, take, silence_s=silence_s)
            groups = self._reader.groups
            parts = parts_wanted(lines, targets, bindings, first=first, groups=groups)
            async with aclosing(parts):
                async for one in parts:
                    yield one
            return
        blocks = take.blocks[first : first + len(targets)]
        yield Readable(
            [
                Wanted(position, source.offset, target, binding, 0, source.tags)
                for position, (source, target, binding) in enumerate(
                    zip(blocks, targets, bindings, strict=True)
                )
            ]
        )
