"""Ends a constrained output in few tokens, whatever state it is in.

A model with no skill (random weights) would fill a free string until its budget is gone. The
shortest end is not in the grammar library's interface, so it is searched greedily on the matcher
itself, which is rolled back afterwards: forced tokens are taken, else the byte that closes most.
"""

from collections import Counter

from llguidance import LLMatcher

from kimi_runtime.protocol.vocabulary import Vocabulary

# The specials that lead out of an output soonest, first.
_SPECIALS_OUT = (
    "<|tool_calls_section_end|>",
    "<|tool_call_end|>",
    "</think>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_begin|>",
    "<|tool_calls_section_begin|>",
)
_CLOSERS = b"}],"
_ESCAPES = b'n"\\/bfrt'
# Values that take few bytes first, those that open something or need not be there last.
_OTHERS = b'0"123456789ntfaeiou-:.bcdghjklmpqrsvwxyz'
_LAST = b"[{ "


class JsonCursor:
    """Whether the text so far ends inside a JSON string. A special token ends any text."""

    __slots__ = ("escaped", "in_string")

    def __init__(self, in_string: bool = False, escaped: bool = False) -> None:
        self.in_string, self.escaped = in_string, escaped

    def copy(self) -> "JsonCursor":
        """An independent cursor at the same place."""
        return JsonCursor(self.in_string, self.escaped)

    def feed(self, data: bytes) -> None:
        """Move over the bytes of one id; no bytes means a special token."""
        if not data:
            self.in_string = self.escaped = False
        for byte in data:
            if self.escaped:
                self.escaped = False
            elif self.in_string and byte == 0x5C:
                self.escaped = True
            elif byte == 0x22:
                self.in_string = not self.in_string


class Closer:
    """Finds short ends for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._specials = [vocabulary.special(name) for name in _SPECIALS_OUT]
        self._byte_ids = {}
        for token in range(vocabulary.rank_count):
            data = vocabulary.token_bytes(token)
            if len(data) == 1:
                self._byte_ids[data[0]] = token
        preferred = _OTHERS + bytes(b for b in range(256) if b not in _OTHERS + _LAST) + _LAST
        self._order = {byte: place for place, byte in enumerate(preferred)}

    def shortest_end(self, matcher: LLMatcher, cursor: JsonCursor, limit: int) -> list[int] | None:
        """Ids that complete the output, without its end token; None if `limit` are too few.

        The matcher is left as it was found.
        """
        cursor = cursor.copy()
        uses: Counter[int] = Counter()
        ids: list[int] = []
        while not matcher.is_accepting() and not matcher.is_error() and len(ids) <= limit:
            step = matcher.compute_ff_tokens()
            if not step:
                chosen = self._choose(matcher.compute_bitmask(), cursor, uses)
                if chosen is None:
                    break
                step = [chosen]
            taken = matcher.try_consume_tokens(step)
            ids += step[:taken]
            for token in step[:taken]:
                cursor.feed(self._vocabulary.token_bytes(token))
            if taken < len(step):
                break
        done = matcher.is_accepting() and len(ids) <= limit
        matcher.rollback(len(ids))
        return ids if done else None

    def _choose(self, mask: bytes, cursor: JsonCursor, uses: Counter[int]) -> int | None:
        """One allowed id. A byte that was tried in vain is tried last, so that patterns end too."""
        for token in self._specials:
            if mask[token >> 3] >> (token & 7) & 1:
                return token
        if cursor.escaped:
            first = _ESCAPES
        elif cursor.in_string:
            first = b'"'
        else:
            first = _CLOSERS
        for byte in first:
            token = self._byte_ids[byte]
            if mask[token >> 3] >> (token & 7) & 1:
                uses.clear()
                return token
        allowed = [
            byte for byte, token in self._byte_ids.items() if mask[token >> 3] >> (token & 7) & 1
        ]
        if not allowed:
            return None
        byte = min(allowed, key=lambda one: (uses[one], self._order[one]))
        uses[byte] += 1
        return self._byte_ids[byte]
