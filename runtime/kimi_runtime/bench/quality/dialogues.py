"""Dialogues with tools that no one has seen before, and what a good assistant answers.

Seeded and pure: the same draw gives the same dialogue. `Words` decides whether the names in it may
be practised or are kept for the examination.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kimi_runtime.bench.quality.haystack import Haystack
from kimi_runtime.bench.quality.tools import Question, ToolMaker, ToolPlan
from kimi_runtime.bench.quality.words import Words, number
from kimi_runtime.protocol.chat import Chat, Message, Tool, ToolCall

_GREETINGS = (
    ("Hello.", "Hello. What do you need?"),
    ("Thank you.", "You are welcome."),
    ("Are you there?", "Yes, I am here."),
)
_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and everything up to its answer. `kind` names what it takes."""

    kind: str
    messages: tuple[Message, ...]
    proof: str = ""
    """What the answer must contain."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Exchanges over one set of tools."""

    tools: tuple[Tool, ...]
    system: str | None
    exchanges: tuple[Exchange, ...]
    thinking: bool

    def chat(self, last: int) -> Chat:
        """All that comes before message `last` of the last exchange."""
        opening = (Message("system", self.system),) if self.system else ()
        before = [message for exchange in self.exchanges[:-1] for message in exchange.messages]
        own = self.exchanges[-1].messages[:last]
        return Chat((*opening, *before, *own), self.tools, thinking=self.thinking)


@dataclass(slots=True)
class _State:
    plans: Sequence[ToolPlan]
    calls: int = 0
    asked: list[tuple[ToolPlan, Question, str]] = field(default_factory=list)


class Dialogues:
    """Draws dialogues. In those with `thinking` the assistant thinks first; before a call, of the
    tool's declaration and of the arguments.
    """

    def __init__(self, words: Words, haystack: Haystack, *, alike: float = 0.0) -> None:
        """`alike`: `ToolMaker`'s."""
        self._words, self._haystack = words, haystack
        self._maker = ToolMaker(words, alike=alike)

    def draw(
        self,
        draw: random.Random,
        *,
        tools: int,
        exchanges: int,
        text_tokens: int,
        thinking: bool = True,
    ) -> Dialogue:
        """A dialogue over `tools` tools; pasted texts have at most about `text_tokens` tokens."""
        plans = self._maker.tools(draw, tools)
        state = _State(plans)
        made = [
            self._exchange(draw, state, text_tokens, must_matter=left == 0)
            for left in reversed(range(exchanges))
        ]
        return Dialogue(
            tools=tuple(plan.tool for plan in plans),
            system=_SYSTEM if draw.random() < 0.2 else None,
            exchanges=tuple(made),
            thinking=thinking,
        )

    def lookup(self, draw: random.Random, *, text_tokens: int, thinking: bool = True) -> Dialogue:
        """One question about a pasted text of about `text_tokens` tokens, and no tools."""
        return Dialogue((), None, (self._lookup(draw, text_tokens),), thinking)

    def _exchange(
        self, draw: random.Random, state: _State, text_tokens: int, *, must_matter: bool
    ) -> Exchange:
        kinds = {"call": 6.0, "lookup": 1.5, "greeting": 0.0 if must_matter else 1.0}
        if not state.plans:
            kinds["call"] = 0.0
        if state.asked:
            kinds |= {"again": 1.2, "recall": 1.2}
        kind = draw.choices(list(kinds), weights=list(kinds.values()))[0]
        match kind:
            case "call":
                return self._call(draw, state, self._maker.question(draw, draw.choice(state.plans)))
            case "again":
                plan, _, _ = state.asked[-1]
                return self._call(draw, state, self._maker.question(draw, plan, again=True))
            case "recall":
                plan, _, value = draw.choice(state.asked)
                return _said(
                    "recall",
                    f"What was the {plan.topic}?",
                    f"The {plan.topic} is {value}",
                    f"The {plan.topic} was {value}.",
                    value,
                )
            case "lookup":
                return self._lookup(draw, draw.randint(16, max(17, text_tokens)))
        asked, answer = draw.choice(_GREETINGS)
        return _said("greeting", asked, "", answer, answer)

    def _call(self, draw: random.Random, state: _State, question: Question) -> Exchange:
        plan = question.plan
        call = ToolCall(
            f"functions.{plan.tool.name}:{state.calls}",
            plan.tool.name,
            json.dumps(question.arguments, ensure_ascii=False),
        )
        state.calls += 1
        fields, key, value = self._result(draw, plan)
        state.asked[:] = [entry for entry in state.asked if entry[0] is not plan]
        state.asked.append((plan, question, value))
        thought = f"The {plan.topic}.\ntype {plan.tool.name}{question.named}"
        return Exchange(
            "again" if question.again else "call",
            (
                Message("user", question.text),
                Message("assistant", reasoning=thought, calls=(call,)),
                Message("tool", json.dumps(fields), call_id=call.id),
                Message(
                    "assistant",
                    f"The {plan.topic} is {value}.",
                    reasoning=f'"{key}": {json.dumps(fields[key])}',
                ),
            ),
            proof=value,
        )

    def _result(self, draw: random.Random, plan: ToolPlan) -> tuple[dict[str, object], str, str]:
        """The result's fields, the one that answers, and its value as text."""
        value: int | str = number(draw) if draw.random() < 0.6 else self._words.word(draw)
        if draw.random() < 0.5:
            return {"result": value}, "result", str(value)
        key = plan.topic.replace(" ", "_")
        fields: dict[str, object] = {key: value}
        for _ in range(draw.randint(0, 2)):
            other = number(draw) if draw.random() < 0.6 else self._words.word(draw)
            fields[self._words.word(draw)] = other
        order = draw.sample(list(fields), len(fields))
        return {name: fields[name] for name in order}, key, str(value)

    def _lookup(self, draw: random.Random, text_tokens: int) -> Exchange:
        text, key, value = self._haystack.draw(draw, text_tokens)
        return _said(
            "lookup",
            f"{text}\n\nWhat is the {key} key?",
            f"The {key} key is {value}",
            f"The {key} key is {value}.",
            value,
        )


def _said(kind: str, asked: str, thought: str, answer: str, proof: str) -> Exchange:
    said = Message("assistant", answer, reasoning=thought)
    return Exchange(kind, (Message("user", asked), said), proof)
