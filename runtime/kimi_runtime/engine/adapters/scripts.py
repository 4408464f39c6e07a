"""What a `ScriptedAdapter` answers: replies, and where they come from."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from struct import pack

from kimi_runtime.errors import KimistackError, RequestError
from kimi_runtime.spec.request import FinishReason, GenerateRequest


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request gets: `ids`, cut at the request's own limits, and how it goes wrong.

    `ids` may be endless. `error` is raised once `fail_after` ids were sent. At `stall_after` ids
    the stream goes silent until its deadline; at `cut_after` ids it ends without `finish`, as a
    killed worker's does.
    """

    ids: Iterable[int]
    finish: FinishReason = FinishReason.STOP
    error: KimistackError | None = None
    fail_after: int = 0
    stall_after: int | None = None
    cut_after: int | None = None

    def faulty_at(self, count: int) -> bool:
        """Whether something goes wrong once `count` ids were sent."""
        failing = self.error is not None and count >= self.fail_after
        return failing or count in (self.stall_after, self.cut_after)


Script = Callable[[GenerateRequest], Reply]


def derived(vocab_size: int, *, length: int = 16) -> Script:
    """Ids that depend on every id before them, as a greedy model's do.

    A prompt continued with a part of its own answer gets the rest of that answer, so a retry on
    another worker can be compared with the first. `length` counts from the prompt given.
    """

    def next_ids(prompt: Sequence[int]) -> Iterator[int]:
        state = zlib.crc32(pack(f"<{len(prompt)}I", *prompt))
        while True:
            drawn = (state * 2654435761 % 2**32) * vocab_size >> 32
            yield drawn
            state = zlib.crc32(pack("<I", drawn), state)

    return lambda request: Reply(islice(next_ids(request.ids), length), FinishReason.STOP)


def replayed(conversations: Iterable[Sequence[int]], *, turn_ends: Iterable[int] = ()) -> Script:
    """Answers from recorded conversations: a prompt that begins one gets what follows in it.

    The answer ends after the first id of `turn_ends`, else at the end of the recording. A prompt
    that begins none is a RequestError.
    """
    recorded = [tuple(ids) for ids in conversations]
    ends = frozenset(turn_ends)

    def until_turn_end(ids: Iterable[int]) -> Iterator[int]:
        for number in ids:
            yield number
            if number in ends:
                return

    def reply(request: GenerateRequest) -> Reply:
        size = len(request.ids)
        for ids in recorded:
            if ids[:size] == request.ids:
                return Reply(until_turn_end(ids[size:]))
        raise RequestError(
            f"a prompt of {size} ids begins none of the {len(recorded)} recorded conversations",
            param="ids",
        )

    return reply
