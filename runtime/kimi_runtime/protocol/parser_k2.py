"""What a K2 model's output ids mean: reasoning, content and tool calls.

A state machine over ids, so no marker is ever searched for in text and several may come in one
step. It accepts any ids at all; what the format has no place for is dropped, not shown.
"""

import json
import re
from collections.abc import Callable, Iterable
from enum import Enum, auto
from itertools import groupby

from kimi_runtime.protocol.chat import (
    CallArguments,
    CallEnded,
    CallStarted,
    Chat,
    ContentDelta,
    NamedChoice,
    OutputEvent,
    ReasoningDelta,
    Rendered,
    Tool,
)
from kimi_runtime.protocol.incremental import Detokenizer
from kimi_runtime.protocol.vocabulary import Vocabulary

_PREFIX = "functions."
_COUNTER = re.compile(r"\s*:\s*\d*\s*\Z")
_BARE = re.compile(r"(?:call)?[_\-\s]*\d*", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()  # between calls, and after them: text here is dropped
    HEADER = auto()
    ARGUMENTS = auto()
    DONE = auto()


class _OpenCall:
    """The call being read. `name` is None until it is known; then its arguments wait here too."""

    def __init__(self) -> None:
        self.header = ""
        self.waiting: list[str] = []
        self.has_arguments = False
        self.name: str | None = None
        self.index: int | None = None  # None: nothing of it was reported


class K2Parser:
    """Events of one output. Feed ids in any portions; `finish` when no more come.

    The events are the same for any portions, up to how text is divided among deltas.
    """

    def __init__(self, vocabulary: Vocabulary, rendered: Rendered, chat: Chat) -> None:
        self._vocabulary = vocabulary
        self._text = Detokenizer(vocabulary)
        self._state = _State.REASONING if rendered.starts_in_reasoning else _State.CONTENT
        self._tools = {tool.name: tool for tool in chat.tools}
        if isinstance(chat.choice, NamedChoice):
            self._tools = {name: t for name, t in self._tools.items() if name == chat.choice.name}
        calls_allowed = bool(chat.tools) and chat.choice != "none"
        self._call_limit = (None if chat.parallel_calls else 1) if calls_allowed else 0
        self._first_number = rendered.next_call_number
        self._call: _OpenCall | None = None
        self._started = 0
        self._complete = 0
        self._reasoning_tokens = 0
        self._saw_content = False
        self._problems: list[str] = []
        self._events: list[OutputEvent] = []
        self._controls = self._control_table()

    @property
    def complete_calls(self) -> int:
        """Calls that may be run. `finish_reason` is `tool_calls` exactly if this is not 0."""
        return self._complete

    @property
    def has_open_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._call is not None

    @property
    def reasoning_tokens(self) -> int:
        """Ids of reasoning, without the markers around it."""
        return self._reasoning_tokens

    @property
    def ended(self) -> bool:
        """Whether the model ended its turn; ids after that are ignored."""
        return self._state is _State.DONE

    @property
    def problems(self) -> tuple[str, ...]:
        """What was dropped and why, for the log: calls that nobody could be found for."""
        return tuple(self._problems)

    def feed(self, ids: Iterable[int]) -> list[OutputEvent]:
        """The events of the next ids, adjacent deltas joined. Never raises."""
        for token in ids:
            if self._state is _State.DONE:
                break
            control = self._controls.get(token)
            if control is not None:
                control()
            elif not self._vocabulary.is_special(token):
                self._on_text(token)
        return self._take()

    def finish(self, *, stopped: bool = False) -> list[OutputEvent]:
        """The last events. `stopped`: the model ended its turn, and its end token was not fed.

        An open call is complete if the model ended its turn; if its tokens ran out, it is not.
        """
        if self._state is not _State.DONE:
            if stopped:
                self._end_call()
            self._enter(_State.DONE)
        return self._take()

    def _control_table(self) -> dict[int, Callable[[], None]]:
        handlers: dict[str, Callable[[], None]] = {
            "<think>": self._on_think,
            "</think>": self._on_thought,
            "<|tool_calls_section_begin|>": self._on_section,
            "<|tool_calls_section_end|>": self._on_section_end,
            "<|tool_call_begin|>": self._on_call,
            "<|tool_call_argument_begin|>": self._on_arguments,
            "<|tool_call_end|>": self._on_call_end,
        }
        # A model that opens another turn has ended its own.
        ends = ("<|im_end|>", "[EOS]", "[EOT]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>")
        handlers |= dict.fromkeys(ends, self._on_end)
        return {self._vocabulary.special(name): handler for name, handler in handlers.items()}

    def _take(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return join_deltas(events)

    def _enter(self, state: _State) -> None:
        self._text.drop()  # half a character belongs to no channel
        self._state = state

    def _on_text(self, token: int) -> None:
        if self._state is _State.REASONING:
            self._reasoning_tokens += 1
        elif self._state is _State.SECTION:
            return
        text = self._text.feed((token,))
        if not text:
            return
        if self._state is _State.REASONING:
            self._events.append(ReasoningDelta(text))
        elif self._state is _State.CONTENT:
            self._saw_content = True
            self._events.append(ContentDelta(text))
        elif self._call is not None and self._state is _State.HEADER:
            self._call.header += text
        elif self._call is not None:
            self._add_arguments(self._call, text)

    def _on_think(self) -> None:
        # A model that was asked not to think may do so anyway, but not in the middle of its answer.
        if self._state is _State.CONTENT and not self._saw_content:
            self._saw_content = True
            self._enter(_State.REASONING)

    def _on_thought(self) -> None:
        if self._state is _State.REASONING:
            self._saw_content = True
            self._enter(_State.CONTENT)

    def _on_section(self) -> None:
        self._end_call()
        self._enter(_State.SECTION)

    def _on_section_end(self) -> None:
        if self._state not in (_State.REASONING, _State.CONTENT):
            self._on_section()

    def _on_call(self) -> None:
        self._end_call()
        self._call = _OpenCall()
        self._enter(_State.HEADER)

    def _on_arguments(self) -> None:
        if self._state is _State.HEADER and self._call is not None:
            self._enter(_State.ARGUMENTS)
            self._call.name = self._name_in(self._call.header)
            if self._call.name is not None:
                self._start(self._call)

    def _on_call_end(self) -> None:
        if self._call is not None:
            self._end_call()
            self._enter(_State.SECTION)

    def _on_end(self) -> None:
        self._end_call()
        self._enter(_State.DONE)

    def _add_arguments(self, call: _OpenCall, text: str) -> None:
        """Report argument text; leading white space is dropped, a nameless call's text waits."""
        if not call.has_arguments:
            text = text.lstrip()
        if not text:
            return
        call.has_arguments = True
        if call.index is not None:
            self._events.append(CallArguments(call.index, text))
        elif call.name is None:
            call.waiting.append(text)

    def _start(self, call: _OpenCall) -> None:
        if self._call_limit is not None and self._started >= self._call_limit:
            return
        call.index = self._started
        self._started += 1
        number = self._first_number + call.index
        name = call.name or ""
        self._events.append(CallStarted(call.index, f"{_PREFIX}{name}:{number}", name))

    def _end_call(self) -> None:
        """Complete the open call, if there is one and its name can be told."""
        call, self._call = self._call, None
        if call is None:
            return
        if call.name is None:
            self._name_late(call)
        if call.name is None:
            self._problems.append(
                f"a call with the header {call.header[:80]!r} fits none of the tools "
                f"{sorted(self._tools)}"
            )
        elif call.index is None:
            self._problems.append(f"a call of {call.name!r} was made though none was allowed")
        else:
            if not call.has_arguments:
                self._events.append(CallArguments(call.index, "{}"))
            self._events.append(CallEnded(call.index))
            self._complete += 1

    def _name_late(self, call: _OpenCall) -> None:
        """Find a name now that the arguments are whole, and report the call with them."""
        if self._state is _State.HEADER:
            name = self._name_in(call.header)
            call.name = name if name in self._tools else None
        else:
            bare = _BARE.fullmatch(_core(call.header)) is not None
            call.name = _infer("".join(call.waiting), self._tools, bare=bare)
        if call.name is not None:
            self._start(call)
            if call.index is not None and call.waiting:
                self._events.append(CallArguments(call.index, "".join(call.waiting)))

    def _name_in(self, header: str) -> str | None:
        """The tool a header names, or None for a bare counter or for no name at all."""
        whole = header.strip()
        base = _COUNTER.sub("", whole)
        core = _core(header)
        for name in (whole, base, core):
            if name in self._tools:
                return name
        if _BARE.fullmatch(core) or not _NAME.fullmatch(core):
            return None
        return core


def _core(header: str) -> str:
    """The header without its counter and its `functions.`."""
    return _COUNTER.sub("", header.strip()).removeprefix(_PREFIX).strip()


def _infer(arguments: str, tools: dict[str, Tool], *, bare: bool) -> str | None:
    """The tool whose parameters overlap most with the arguments' keys; else the only tool."""
    try:
        decoded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        decoded = None
    keys = set(decoded) if isinstance(decoded, dict) else set()
    scores = sorted(
        (len(keys & set(tool.parameters.get("properties") or ())), name)
        for name, tool in tools.items()
    )
    if scores and scores[-1][0] > 0 and (len(scores) == 1 or scores[-1][0] > scores[-2][0]):
        return scores[-1][1]
    return next(iter(tools)) if bare and len(tools) == 1 else None


def join_deltas(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """The events with adjacent deltas of one channel joined."""
    joined: list[OutputEvent] = []
    for (kind, index), run in groupby(events, key=_channel):
        group = list(run)
        text = "".join(getattr(event, "text", "") for event in group)
        if kind is ReasoningDelta:
            joined.append(ReasoningDelta(text))
        elif kind is ContentDelta:
            joined.append(ContentDelta(text))
        elif kind is CallArguments:
            joined.append(CallArguments(index, text))
        else:
            joined += group
    return joined


def _channel(event: OutputEvent) -> tuple[type[OutputEvent], int]:
    return type(event), getattr(event, "index", 0)
