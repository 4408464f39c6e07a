"""Held-out dialogues put to a model, and what its answers are worth.

Each dialogue's last exchange gives one question per assistant message: the call, then, with the
right call and its result in the history, the answer. A question is a prompt of token ids and an
output of token ids; how the output comes about is the caller's business.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kimi_runtime.bench.quality.dialogues import Dialogue, Dialogues
from kimi_runtime.bench.quality.haystack import Haystack
from kimi_runtime.bench.quality.words import Words
from kimi_runtime.protocol.chat import (
    CallArguments,
    CallStarted,
    Chat,
    ContentDelta,
    Message,
    Rendered,
)
from kimi_runtime.protocol.codec_k2 import K2Codec

MAX_ANSWER_TOKENS = 160
_SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 3))  # tools, exchanges


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `wanted` is the message that a good assistant would give."""

    group: str
    chat: Chat
    rendered: Rendered
    wanted: Message
    proof: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What an output says: calls as (name, arguments' text), and content."""

    calls: tuple[tuple[str, str], ...]
    content: str
    ended: bool


@dataclass(slots=True)
class Tally:
    """How often each thing was right; pairs of (right, asked)."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, right: bool) -> None:
        """Count one answer."""
        entry = self.counts.setdefault(name, [0, 0])
        entry[0] += right
        entry[1] += 1

    def share(self, name: str) -> float:
        """Right of asked, 0 where nothing was asked."""
        right, asked = self.counts.get(name, (0, 0))
        return right / asked if asked else 0.0


class Examiner:
    """Makes items with the examination's words and judges answers."""

    def __init__(self, codec: K2Codec, *, seed: int = 0) -> None:
        words = Words(codec.vocabulary, held_out=True)
        self._codec, self._seed = codec, seed
        self._dialogues = Dialogues(words, Haystack(codec.vocabulary, words))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an output."""
        return self._codec.stop_ids

    def dialogues(self, count: int, *, thinking: bool) -> list[Item]:
        """The questions of `count` dialogues with tools, several turns and pasted texts."""
        draw = random.Random(f"dialogues/{self._seed}")
        items: list[Item] = []
        for number in range(count):
            tools, exchanges = _SHAPES[number % len(_SHAPES)]
            dialogue = self._dialogues.draw(
                draw, tools=tools, exchanges=exchanges, text_tokens=120, thinking=thinking
            )
            items += self._items(dialogue, dialogue.exchanges[-1].kind)
        return items

    def needles(self, count: int, *, tokens: int, thinking: bool) -> list[Item]:
        """`count` questions about a key in a text of about `tokens` tokens."""
        draw = random.Random(f"needles/{self._seed}/{tokens}")
        items: list[Item] = []
        for _ in range(count):
            dialogue = self._dialogues.lookup(draw, text_tokens=tokens, thinking=thinking)
            items += self._items(dialogue, f"needle {tokens}")
        return items

    def _items(self, dialogue: Dialogue, group: str) -> Iterable[Item]:
        exchange = dialogue.exchanges[-1]
        for place, message in enumerate(exchange.messages):
            if message.role == "assistant":
                chat = dialogue.chat(place)
                yield Item(group, chat, self._codec.render(chat), message, exchange.proof)

    def read(self, item: Item, output: Sequence[int]) -> Answer:
        """Parse an output as the server does."""
        parser = self._codec.parser(item.rendered, item.chat)
        events = [*parser.feed(output), *parser.finish()]
        names = {event.index: event.name for event in events if isinstance(event, CallStarted)}
        texts = dict.fromkeys(names, "")
        content = ""
        for event in events:
            if isinstance(event, CallArguments):
                texts[event.index] += event.text
            elif isinstance(event, ContentDelta):
                content += event.text
        ended = bool(output) and output[-1] in self._codec.stop_ids
        calls = tuple((names[index], texts[index]) for index in sorted(names))
        return Answer(calls, content.strip(), ended)


def judge(item: Item, answer: Answer, tally: Tally) -> None:
    """Count what is right about one answer."""
    if not item.wanted.calls:
        right = not answer.calls and _says(answer.content, item.proof)
        group = "answer from a result" if item.group in ("call", "again") else item.group
        tally.add(group, right)
        return
    wanted = item.wanted.calls[0]
    named = len(answer.calls) == 1 and answer.calls[0][0] == wanted.name
    tally.add("right tool", named)
    arguments = _decoded(answer.calls[0][1]) if answer.calls else None
    tally.add("valid JSON", arguments is not None)
    tally.add("right arguments", named and arguments == json.loads(wanted.arguments))


def _says(content: str, proof: str) -> bool:
    """Whether the proof stands in the content as a word of its own."""
    return proof in content.removesuffix(".").split() or content == proof


def _decoded(text: str) -> dict[str, object] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
