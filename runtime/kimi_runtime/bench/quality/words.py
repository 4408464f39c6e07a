"""Made-up words: names and values that no model can know, so that it must read them.

A word belongs to practice or to the examination by a digest of its letters. Both come from the same
syllables, yet no name or value of an examination was ever seen in training.
"""

import hashlib
import random

from kimi_runtime.protocol.vocabulary import Vocabulary

_ONSETS = (*"bdfghjklmnprstvwz", "br", "dr", "gl", "kr", "pl", "st", "tr", "sk")
_VOWELS = "aeiouaeo"
_CODAS = ("", "", "", "l", "n", "r", "s", "x", "m")
_HELD_OUT = 5  # one word in so many is for the examination
_MAX_TOKENS = 5
_MARKS = " _"


class Words:
    """Draws words of one side. `held_out`: the examination's."""

    def __init__(self, vocabulary: Vocabulary, *, held_out: bool) -> None:
        self._vocabulary, self._held_out = vocabulary, held_out

    def word(self, draw: random.Random, *, ending: str = "") -> str:
        """One word of two or three syllables; with `ending`, which words must have, ends in it."""
        while True:
            parts = [
                draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS)
                for _ in range(2 + (draw.random() < 0.2))
            ]
            word = "".join(parts)
            if not word.endswith(ending):
                continue
            if is_held_out(word) == self._held_out and self._is_even(word):
                return word

    def phrase(self, draw: random.Random, *, ending: str = "") -> str:
        """One or two words, the last one with the ending."""
        before = [self.word(draw)] if draw.random() < 0.4 else []
        return " ".join((*before, self.word(draw, ending=ending)))

    def value(self, draw: random.Random) -> str:
        """A word or a number, as text shows it."""
        return self.word(draw) if draw.random() < 0.5 else str(number(draw))

    def _is_even(self, word: str) -> bool:
        """Whether a mark before the word changes its first token at most: only then is quoting a
        name that stood behind a space a copy.
        """
        encode = self._vocabulary.encode_text
        bare = encode(word)
        first = self._vocabulary.token_bytes(bare[0]).decode()
        return len(bare) <= _MAX_TOKENS and all(
            encode(mark + word) == [*encode(mark + first), *bare[1:]]
            and self._adds_nothing(encode(mark + first), mark + first)
            for mark in _MARKS
        )

    def _adds_nothing(self, ids: list[int], marked: str) -> bool:
        """Whether a marked token is one id, or the mark's and its own."""
        tokens = [self._vocabulary.token_bytes(token).decode() for token in ids]
        return tokens in ([marked], [marked[0], marked[1:]])


def is_held_out(word: str) -> bool:
    """Whether a word is the examination's."""
    digest = hashlib.blake2b(word.encode(), digest_size=4, person=b"kimi-words").digest()
    return int.from_bytes(digest, "little") % _HELD_OUT == 0


def number(draw: random.Random) -> int:
    """One to five digits, all lengths alike."""
    return draw.randrange(10 ** draw.randint(1, 5))
