"""Long texts in which one sentence answers a question."""

import random

from kimi_runtime.bench.quality.words import Words
from kimi_runtime.protocol.vocabulary import Vocabulary

_SUBJECTS = ("The request", "A worker", "The router", "The cache", "Every block", "The parser")
_VERBS = ("reads", "writes", "sends", "checks", "returns", "moves", "keeps", "counts")
_OBJECTS = ("the next token", "a list of files", "the error message", "two numbers", "the result")
_ENDS = ("when the queue is empty", "without a copy", "on every node", "before the step ends")


class Haystack:
    """Plain sentences with some that say what a key is."""

    def __init__(self, vocabulary: Vocabulary, words: Words) -> None:
        self._vocabulary, self._words = vocabulary, words

    def draw(self, draw: random.Random, tokens: int) -> tuple[str, str, str]:
        """A text of about `tokens` tokens, the key that is asked for, and its value."""
        keys: dict[str, str] = {}
        for _ in range(draw.randint(1, 4) if tokens > 60 else 1):
            keys[self._words.phrase(draw)] = self._words.value(draw)
        needles = [f"The {key} key is {value}." for key, value in keys.items()]
        left = tokens - sum(self._size(text) for text in needles)
        lines = []
        while left > 0:
            line = filler(draw)
            lines.append(line)
            left -= self._size(line)
        for needle in needles:
            lines.insert(draw.randint(0, len(lines)), needle)
        key = draw.choice(list(keys))
        return " ".join(lines), key, keys[key]

    def _size(self, text: str) -> int:
        return len(self._vocabulary.encode_text(" " + text))


def filler(draw: random.Random) -> str:
    """A sentence that answers nothing."""
    text = f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}"
    return f"{text} {draw.choice(_ENDS)}." if draw.random() < 0.5 else f"{text}."
