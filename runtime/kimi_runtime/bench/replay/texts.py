"""Texts for sessions that know theirs by number: words that say nothing, as many as wanted."""

import random
from collections.abc import Callable, Iterable

from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.spec.base import SpecModel

_SYLLABLES = ("ba", "den", "fi", "gor", "hal", "jun", "ka", "lem", "mi", "nos", "pel", "ra", "sut")
_WORDS = 400


class Texts:
    """Equal numbers are equal texts, other numbers differ from their first words on.

    `seed` makes all of them others, so that a second replay finds nothing of a first one.
    """

    def __init__(
        self, count: Callable[[str], int], *, seed: int, unseen: Iterable[int] = ()
    ) -> None:
        self.unseen = frozenset(unseen)
        """Markers of calls, which nobody asks for: an endpoint sends nothing behind them."""
        draw = random.Random(0)
        words = {"".join(draw.choices(_SYLLABLES, k=draw.randint(1, 3))) for _ in range(_WORDS)}
        self._words = sorted(words)
        self._weights = [count(f" {word}") for word in self._words]
        self._seed = seed

    @classmethod
    def of(cls, vocabulary: Vocabulary, *, seed: int) -> "Texts":
        """Texts whose length is told in tokens of this vocabulary."""
        marks = (id_ for name, id_ in vocabulary.special_ids.items() if "tool_call" in name)
        return cls(lambda text: len(vocabulary.encode_text(text)), seed=seed, unseen=marks)

    def text(self, number: int, tokens: int) -> str:
        """The first `tokens` tokens of text `number`, a few more where a word has several.

        A shorter text is a front of a longer one, up to its last word.
        """
        draw = random.Random(f"{self._seed}/{number}")
        chosen: list[str] = []
        while tokens > 0:
            at = draw.randrange(len(self._words))
            chosen.append(self._words[at])
            tokens -= self._weights[at]
        return " ".join(chosen)


class Scale(SpecModel):
    """How sessions of a cluster are played on a small machine."""

    tokens: float = 1.0
    """Every length is divided by this."""
    pauses: float = 1.0
    """Every pause is multiplied by this."""

    def length(self, tokens: int) -> int:
        """A length as it is played: at least one token of what had any."""
        return max(round(tokens / self.tokens), 1) if tokens else 0
