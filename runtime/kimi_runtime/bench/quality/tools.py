"""Made-up tools, and questions that one of them answers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimi_runtime.bench.quality.words import Words, number
from kimi_runtime.protocol.chat import Tool

VERBS = ("get", "read", "search", "fetch", "list", "send", "run", "add")
_LEADS = ("Returns", "Reads", "Finds", "Gives")
_ASKS = (
    "What is the {topic} {pairs}?",
    "Get the {topic} {pairs}.",
    "I want the {topic} {pairs}.",
    "Return the {topic} {pairs}, please.",
    "The {topic} {pairs}?",
)

_ENDING = 2  # letters that topics alike share

Value = str | int | bool


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """A tool, what it is about, and its parameters' JSON types in the order of declaration."""

    tool: Tool
    topic: str
    parameters: tuple[tuple[str, str], ...]
    required: frozenset[str]


@dataclass(frozen=True, slots=True)
class Question:
    """A question's text and the call that answers it. `again`: it names no topic.

    `named` is what is thought of behind the tool's name: the question's words that give the
    arguments, and before them, where they leave out what it is called, the declared parameter.
    """

    plan: ToolPlan
    text: str
    named: str
    arguments: dict[str, Value]
    again: bool = False


class ToolMaker:
    """Makes tools whose topics differ, and asks about them.

    In the share `alike` a further tool's topic ends as another one's does, and half of those have
    its verb: then a look at the last tokens does not tell which of the two fits.
    """

    def __init__(self, words: Words, *, alike: float = 0.0) -> None:
        self._words, self._alike = words, alike

    def tools(self, draw: random.Random, count: int) -> list[ToolPlan]:
        """`count` tools with different topics and names."""
        plans: list[ToolPlan] = []
        while len(plans) < count:
            similar = plans and self._alike and draw.random() < self._alike
            plan = self._tool(draw, like=draw.choice(plans) if similar else None)
            names = {word for other in plans for word in other.topic.split()}
            if names.isdisjoint(plan.topic.split()):
                plans.append(plan)
        return plans

    def _tool(self, draw: random.Random, *, like: ToolPlan | None = None) -> ToolPlan:
        ending = like.topic[-_ENDING:] if like else ""
        topic = self._words.phrase(draw, ending=ending)
        called = topic if draw.random() < 0.7 else self._words.phrase(draw)
        names = sorted({self._words.word(draw) for _ in range(draw.choice((1, 1, 2, 2, 3)))})
        kinds = [draw.choice(("string", "string", "number", "boolean")) for _ in names]
        optional = names[-1] if len(names) > 1 and draw.random() < 0.25 else None
        properties: dict[str, Any] = {
            name: {"type": kind} for name, kind in zip(names, kinds, strict=True)
        }
        required = [name for name in names if name != optional]
        schema = {"type": "object", "properties": properties, "required": required}
        verb = draw.choice(VERBS)
        if like and draw.random() < 0.5:
            verb = like.tool.name.split("_")[0]
        tool = Tool(
            f"{verb}_{called.replace(' ', '_')}",
            f"{draw.choice(_LEADS)} the {topic}.",
            schema,
        )
        return ToolPlan(tool, topic, tuple(zip(names, kinds, strict=True)), frozenset(required))

    def question(self, draw: random.Random, plan: ToolPlan, *, again: bool = False) -> Question:
        """A question about the tool's topic that gives every required argument."""
        arguments: dict[str, Value] = {}
        for name, kind in draw.sample(plan.parameters, len(plan.parameters)):
            if name in plan.required or draw.random() < 0.5:
                arguments[name] = self._value(draw, kind)
        pairs, named = self._pairs(draw, plan, arguments)
        if again:
            return Question(plan, f"And {pairs}?", named, arguments, again=True)
        text = draw.choice(_ASKS).format(topic=plan.topic, pairs=pairs)
        return Question(plan, text, named, arguments)

    def _value(self, draw: random.Random, kind: str) -> Value:
        match kind:
            case "number":
                return number(draw)
            case "boolean":
                return draw.random() < 0.5
        return self._words.word(draw)

    def _pairs(
        self, draw: random.Random, plan: ToolPlan, arguments: dict[str, Value]
    ) -> tuple[str, str]:
        """The arguments in a question, which may leave out what a tool's only one is called, and
        behind the tool's name.
        """
        if len(arguments) == len(plan.parameters) == 1 and draw.random() < 0.4:
            ((name, value),) = arguments.items()
            return f"for {_shown(value)}", f" = (_: {{\n  {name}\nfor {_shown(value)}"
        form = draw.choice(("{name} {value}", "{name} {value}", "{name} = {value}"))
        listed = [form.format(name=name, value=_shown(value)) for name, value in arguments.items()]
        pairs = "with " + _joined(listed)
        return pairs, f"\n{pairs}"


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _joined(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    return ", ".join(parts[:-1]) + " and " + parts[-1]
