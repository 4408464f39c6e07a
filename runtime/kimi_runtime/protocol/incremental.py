"""What grows token by token or turn by turn: decoded text, the search for stop strings, and the
ids of a conversation.
"""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kimi_runtime.protocol.cuts import START, Position
from kimi_runtime.protocol.vocabulary import Vocabulary


class Detokenizer:
    """Turns ids into text as they arrive. A character cut by a token boundary is held back.

    Bytes that can never become UTF-8 turn into U+FFFD; the text is the same however the ids are
    split over calls. Special and unknown ids add nothing.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text these ids complete."""
        return self._decoder.decode(self._vocabulary.decode_bytes(ids))

    def finish(self) -> str:
        """U+FFFD if a character was left incomplete, else nothing. Ready for new ids."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def drop(self) -> None:
        """Forget an incomplete character. Ready for new ids."""
        self._decoder.reset()


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found, and where the whole text must be cut, in characters."""

    stop: str
    at: int


class StopStrings:
    """Finds the first stop string in a growing text; holds back what may become one.

    The first is the one that is complete first; of those complete at the same character, the
    longest. So the answer does not depend on how the text is split over calls.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` may be empty; an empty string among them is ignored."""
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._released = 0
        self._match: StopMatch | None = None

    @property
    def match(self) -> StopMatch | None:
        """The stop string found, if any."""
        return self._match

    def feed(self, text: str) -> str:
        """More text; returns what is safe to show now. After a match: nothing, for ever."""
        if self._match is not None or not text:
            return ""
        window = self._held + text
        found = [
            (place + len(stop), place, stop)
            for stop in self._stops
            if (place := window.find(stop)) >= 0
        ]
        if found:
            _, place, stop = min(found)
            self._match = StopMatch(stop, self._released + place)
            self._held = ""
            return window[:place]
        keep = max((_overlap(window, stop) for stop in self._stops), default=0)
        shown = len(window) - keep
        self._held = window[shown:]
        self._released += shown
        return window[:shown]

    def finish(self) -> str:
        """The text that was held back, now that no more comes."""
        held, self._held = self._held, ""
        self._released += len(held)
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Text of a prompt, or with `control` the name of one special token."""

    text: str
    control: bool = False


Part = tuple[Segment, ...]
"""One message's segments. Begins and ends with a special token, so parts are tokenised apart."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    part: Part
    ids: tuple[int, ...]
    end: Position


def encode_segments(
    vocabulary: Vocabulary, segments: Iterable[Segment], at: Position
) -> tuple[tuple[int, ...], Position]:
    """The ids of segments that lie at `at`, and the position behind them."""
    ids: list[int] = []
    for segment in segments:
        if segment.control:
            ids.append(vocabulary.special(segment.text))
        else:
            ids += vocabulary.encode_text(segment.text, at)
        at = at.after(segment.text)
    return tuple(ids), at


class SessionRecord:
    """The ids of one conversation's newest prompt, so that the next one encodes only new turns.

    A special token ends every part and no merge crosses one, so a part's ids depend only on its
    segments and its position. Parts equal to the last prompt's, from the first on, are reused;
    the result equals encoding everything. One owner at a time; one vocabulary for its life.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._encoded: list[_Encoded] = []
        self.encoded_parts = 0
        self.reused_parts = 0

    def encode(self, parts: Sequence[Part]) -> tuple[list[int], list[int], Position]:
        """Ids of all parts, the index behind each part, and the position behind the last."""
        kept = 0
        for old, part in zip(self._encoded, parts, strict=False):
            if old.part != part:
                break
            kept += 1
        self.reused_parts += kept
        self.encoded_parts += len(parts) - kept
        del self._encoded[kept:]
        at = self._encoded[-1].end if self._encoded else START
        for part in parts[kept:]:
            ids, at = encode_segments(self._vocabulary, part, at)
            self._encoded.append(_Encoded(part, ids, at))
        whole: list[int] = []
        ends: list[int] = []
        for one in self._encoded:
            whole += one.ids
            ends.append(len(whole))
        return whole, ends, at
