"""What a model practises before and beside dialogues: copying, and looking things up.

Every answer token follows from what stands before it, so every token of loss teaches looking back.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kimi_runtime.bench.quality.tools import VERBS
from kimi_runtime.bench.quality.words import Words
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.training.loop import Example

Task = Callable[[random.Random, int], Example]
"""(draw, length in tokens) -> an example of about that length."""


_ANNOUNCED = 3  # ids of a stretch that must be seen before it is known which stretch it is


def repeated(draw: random.Random, length: int, vocabulary: Vocabulary) -> Example:
    """Random ids, then the same once more or several times. A small alphabet makes single ids
    ambiguous, so that more than the last one must be compared.
    """
    alphabet = draw.choice((24, 100, vocabulary.rank_count))
    known = draw.sample(range(vocabulary.rank_count), alphabet)
    period = draw.randint(max(8, length // 6), length // 2)
    first = draw.choices(known, k=period)
    ids = (first * (length // period + 1))[:length]
    return Example(tuple(ids), tuple(range(period + _ANNOUNCED, length)))


def pieces(draw: random.Random, length: int, vocabulary: Vocabulary) -> Example:
    """Random ids in which stretches of what came before are inserted, their starts unmarked."""
    alphabet = draw.choice((60, 400, vocabulary.rank_count))
    known = draw.sample(range(vocabulary.rank_count), alphabet)
    ids = draw.choices(known, k=max(8, length // 3))
    answers: list[int] = []
    while len(ids) < length:
        size = min(draw.randint(6, 16), len(ids) - 1)
        start = draw.randrange(len(ids) - size)
        answers += range(len(ids) + _ANNOUNCED, len(ids) + size)
        ids += ids[start : start + size]
        ids += draw.choices(known, k=draw.randint(0, 3))
    return Example(tuple(ids[:length]), tuple(place for place in answers if place < length))


@dataclass(frozen=True, slots=True)
class _PairForm:
    """How a fact is written, and its question: what is asked, answered, and between questions."""

    line: str
    question: tuple[str, str, str]


_PAIR_FORMS = (
    _PairForm("{key}: {value}\n", ("{key}:", " {value}", "\n")),
    _PairForm('"{key}": {value}, ', ('"{key}":', " {value}", ", ")),
    _PairForm("The {key} is {value}. ", ("The {key} is", " {value}", ". ")),
    _PairForm("The {key} is {value}.\n", ("What is the {key}? The", " {key} is {value}.", "\n")),
    _PairForm("// {key}\ntype {value} ", ("Return the {key}", "\ntype {value} ", "= ")),
)


_SECTIONS = (
    "// Gives the {topic}.\ntype {name} = (_: {{\n  {parameter}: string\n}}) => any;\n",
    "the {topic}.\ntype {name} = (_: {{\n  {parameter};\n",
)


class TextTasks:
    """Tasks in text, with made-up words and the punctuation of declarations, JSON and prose."""

    def __init__(self, vocabulary: Vocabulary, words: Words) -> None:
        self._vocabulary, self._words = vocabulary, words

    def pairs(self, draw: random.Random, length: int) -> Example:
        """Lines of `key: value`, then questions for some of them."""
        form = draw.choice(_PAIR_FORMS)
        known: dict[str, str] = {}
        text: list[tuple[str, bool]] = []
        room = max(2, length // 28)
        for _ in range(room):
            known[self._words.phrase(draw)] = self._words.value(draw)
        for key, value in known.items():
            text.append((form.line.format(key=key, value=value), False))
        for key in draw.sample(list(known), max(1, min(len(known), room * 2 // 3))):
            ask, answer, after = form.question
            text.append((ask.format(key=key), False))
            text.append((answer.format(key=key, value=known[key]), True))
            text.append((after, False))
        return self._example(text, length)

    def sections(self, draw: random.Random, length: int) -> Example:
        """Declarations whose topics end alike, then for each topic the name that belongs to it, and
        its parameter.
        """
        text: list[tuple[str, bool]] = []
        frame = draw.choice(_SECTIONS)
        room = max(2, length // (56 if "any" in frame else 36))
        ending = self._words.word(draw)[-draw.randint(1, 2) :]
        verb = draw.choice(VERBS)
        known: dict[str, tuple[str, str]] = {}
        for _ in range(room):
            alike = draw.random() < 0.6
            topic = self._words.phrase(draw, ending=ending if alike else "")
            called = topic if draw.random() < 0.5 else self._words.phrase(draw)
            own = verb if draw.random() < 0.5 else draw.choice(VERBS)
            known[topic] = (f"{own}_{called.replace(' ', '_')}", self._words.word(draw))
        for topic, (name, parameter) in known.items():
            text.append((frame.format(topic=topic, name=name, parameter=parameter), False))
        for topic in draw.sample(list(known), len(known)):
            name, parameter = known[topic]
            text.append((f"The {topic}", False))
            text.append((f".\ntype {name} = (_: {{\n  {parameter}\n", True))
        return self._example(text, length)

    def rewritten(self, draw: random.Random, length: int) -> Example:
        """Words in prose, then the same ones as a JSON list, as a name, or as a list of lines."""
        text: list[tuple[str, bool]] = []
        size = 0
        while size < length:
            words = [self._words.word(draw) for _ in range(draw.randint(1, 5))]
            text.append((" ".join(("The words", *words)) + ".\n", False))
            form = draw.randrange(3)
            if form == 0:
                text += [("[", False), (", ".join(f'"{word}"' for word in words) + "]\n", True)]
            elif form == 1:
                text += [("name: get_", False), ("_".join(words) + "\n", True)]
            else:
                text += [("- ", False), ("\n- ".join(words) + "\n\n", True)]
            size += 9 * len(words) + 10
        return self._example(text, length)

    def _example(self, text: Sequence[tuple[str, bool]], length: int) -> Example:
        ids: list[int] = []
        answers: list[int] = []
        for part, is_answer in text:
            more = self._vocabulary.encode_text(part)
            if is_answer:
                answers += range(len(ids), len(ids) + len(more))
            ids += more
        return Example(tuple(ids[:length]), tuple(place for place in answers if place < length))
