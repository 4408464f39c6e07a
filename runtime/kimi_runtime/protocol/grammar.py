"""Constraints on output ids: tool calls in K2's syntax, JSON answers, and their state in a run.

`tool_grammar` and `json_grammar` write a constraint at the front door; `GrammarState` follows one
while an engine samples. Both use llguidance, whose Lark dialect knows special tokens by id. The
whole output is described, reasoning included: a model that must call a tool may think as long as
it likes, but leaves its thinking only by `</think>`, and can end only behind a complete call.
"""

import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from kimi_runtime.errors import RequestError
from kimi_runtime.protocol.chat import Chat, NamedChoice, Rendered, Tool
from kimi_runtime.protocol.closing import Closer, JsonCursor
from kimi_runtime.protocol.grammar_rules import JSON_STYLE, AnyOrder, json_expression
from kimi_runtime.protocol.grammar_schema import Sizes, constrained
from kimi_runtime.protocol.vocabulary import SPLIT_PATTERN, Vocabulary
from kimi_runtime.spec.request import Grammar

MAX_PARALLEL_CALLS = 8
MAX_GRAMMAR_CHARS = 2 * 2**20

_REASONING = "reasoning: /(.|\\n)*/\n"
_FREE_OBJECT: dict[str, Any] = {"type": "object"}


class _Tables:
    """What the library needs of one vocabulary; costs 0.6 s for the official one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ends = [vocabulary.special("<|im_end|>"), vocabulary.special("[EOS]")]
        self.tokenizer: LLTokenizer = LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]
            encoder={vocabulary.token_bytes(i): i for i in range(vocabulary.rank_count)},
            special_tokens=dict(vocabulary.special_ids),
            pattern=SPLIT_PATTERN,
            eos_token=self.ends,
            n_vocab=vocabulary.size,
        )
        self.closer = Closer(vocabulary)


_tables: dict[str, _Tables] = {}
_tables_lock = threading.Lock()


def _tables_of(vocabulary: Vocabulary) -> _Tables:
    with _tables_lock:
        tables = _tables.get(vocabulary.digest)
        if tables is None:
            tables = _tables[vocabulary.digest] = _Tables(vocabulary)
        return tables


def tool_grammar(
    vocabulary: Vocabulary,
    chat: Chat,
    rendered: Rendered,
    *,
    finish_in_budget: bool = True,
) -> Grammar | None:
    """What `chat.choice` demands of the output; None if nothing.

    Required and named choices constrain the output from its first id to one call or more. With
    `auto` the model is free until it begins a section of calls, from there the calls are well
    formed. Arguments come in any order; those of a demanded call the required ones first.
    `finish_in_budget` steers a required call to its end before `max_tokens` cuts it off: always a
    valid call, though its strings may be shorter than the model wanted. It needs about the tokens
    of a minimal call plus the largest optional part. A free choice is never steered.

    Raises RequestError for a choice without its tool, or a schema that cannot be compiled; with
    `auto` such a tool's arguments are any JSON object.
    """
    tools, forced = _chosen(chat)
    if not tools:
        return None
    schemas = [constrained(dict(tool.parameters), by_name=True) for tool in tools]
    if not forced:
        schemas = [schema if _compiles(vocabulary, schema) else _FREE_OBJECT for schema in schemas]
    text = _calls_text(vocabulary, chat, rendered, tools, schemas, forced=forced)
    error = _compile_error(vocabulary, text)
    if error:
        index = next((i for i, s in enumerate(schemas) if not _compiles(vocabulary, s)), None)
        place = "tools" if index is None else f"tools[{chat.tools.index(tools[index])}]"
        raise RequestError(
            f"{place} cannot be turned into a constraint: {error}; simplify its parameters, or "
            "use tool_choice 'auto'",
            param=place if index is None else f"{place}.function.parameters",
        )
    if not forced:
        begin = vocabulary.special("<|tool_calls_section_begin|>")
        return Grammar(kind="lark", text=text, starts_after=(begin,))
    # Behind one more call: its markers and header, and its arguments.
    margin = max(Sizes(vocabulary, schema).largest_part() for schema in schemas)
    margin += max(len(vocabulary.encode_text(f"functions.{tool.name}:")) for tool in tools) + 8
    return Grammar(kind="lark", text=text, closing_margin=margin if finish_in_budget else None)


def json_grammar(
    vocabulary: Vocabulary,
    schema: Mapping[str, Any] | None,
    rendered: Rendered,
    *,
    finish_in_budget: bool = True,
) -> Grammar:
    """An answer that is JSON: any object (None), or what `schema` allows.

    Raises RequestError for a schema that cannot be compiled.
    """
    shaped = constrained(dict(schema or _FREE_OBJECT), by_name=False)
    text = f"{_start(vocabulary, rendered)} answer\n{_REASONING}answer: {json_expression(shaped)}\n"
    error = _compile_error(vocabulary, text)
    if error:
        param = "response_format.json_schema.schema"
        raise RequestError(f"{param} cannot be turned into a constraint: {error}", param=param)
    margin = Sizes(vocabulary, shaped).largest_part() + 4
    return Grammar(kind="lark", text=text, closing_margin=margin if finish_in_budget else None)


def _chosen(chat: Chat) -> tuple[tuple[Tool, ...], bool]:
    """The tools that may be called, and whether one must be."""
    if isinstance(chat.choice, NamedChoice):
        named = tuple(tool for tool in chat.tools if tool.name == chat.choice.name)
        if not named:
            names = ", ".join(tool.name for tool in chat.tools) or "none"
            raise RequestError(
                f"tool_choice names {chat.choice.name!r}, but the tools are: {names}",
                param="tool_choice",
            )
        return named, True
    if chat.choice == "required" and not chat.tools:
        raise RequestError("tool_choice is 'required', but there are no tools", param="tool_choice")
    return (() if chat.choice == "none" else chat.tools), chat.choice == "required"


def _start(vocabulary: Vocabulary, rendered: Rendered) -> str:
    thought = f"reasoning {_id(vocabulary, '</think>')}" if rendered.starts_in_reasoning else ""
    return f"start: {thought}"


def _calls_text(
    vocabulary: Vocabulary,
    chat: Chat,
    rendered: Rendered,
    tools: tuple[Tool, ...],
    schemas: list[Any],
    *,
    forced: bool,
) -> str:
    """The Lark text. Calls are numbered on from the conversation's last one."""
    begin, end = (_id(vocabulary, f"<|tool_calls_section_{edge}|>") for edge in ("begin", "end"))
    call_begin = _id(vocabulary, "<|tool_call_begin|>")
    arguments = _id(vocabulary, "<|tool_call_argument_begin|>")
    call_end = _id(vocabulary, "<|tool_call_end|>")
    count = MAX_PARALLEL_CALLS if chat.parallel_calls else 1
    # In a free choice the section's first marker is the trigger, which is already consumed.
    start = f"{_start(vocabulary, rendered)} {begin}" if forced else "start:"
    lines = [f"{start} call_0 {end}", _REASONING]
    for place in range(count):
        number = rendered.next_call_number + place
        heads = " | ".join(
            f'"functions.{tool.name}:{number}" {arguments} arguments_{index}'
            for index, tool in enumerate(tools)
        )
        more = f" call_{place + 1}?" if place + 1 < count else ""
        lines.append(f"call_{place}: {call_begin} ( {heads} ) {call_end}{more}")
    rules = AnyOrder(required_first=forced)
    for index, schema in enumerate(schemas):
        rules.add(f"arguments_{index}", schema)
    return "\n".join([*lines, *rules.lines]) + "\n"


def _id(vocabulary: Vocabulary, name: str) -> str:
    return f"<[{vocabulary.special(name)}]>"


def _compiles(vocabulary: Vocabulary, schema: Any) -> bool:
    return not _compile_error(vocabulary, f"start: {json_expression(schema)}\n")


def _compile_error(vocabulary: Vocabulary, text: str) -> str:
    """Why the library refuses a grammar; empty if it takes it."""
    if len(text) > MAX_GRAMMAR_CHARS:
        return f"its schemas take {len(text)} characters, the limit is {MAX_GRAMMAR_CHARS}"
    tokenizer = _tables_of(vocabulary).tokenizer
    return _validate(tokenizer, text)


@lru_cache(maxsize=512)
def _validate(tokenizer: LLTokenizer, text: str) -> str:
    grammar = LLMatcher.grammar_from_lark(text)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    return messages[0].strip().splitlines()[0][:300] if is_error else ""


class GrammarState:
    """A constraint's state in one output. Not for several threads at once."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar, budget: int | None = None) -> None:
        """`budget`: ids the output may have, end token included; with `grammar.closing_margin`
        the output is complete within it if a minimal one fits. Raises RequestError for a grammar
        that cannot be compiled.
        """
        tables = _tables_of(vocabulary)
        self._vocabulary, self._closer = vocabulary, tables.closer
        self._end = tables.ends[0]
        self._mask_bytes = (vocabulary.size + 31) // 32 * 4
        compiled = (
            LLMatcher.grammar_from_lark(grammar.text)
            if grammar.kind == "lark"
            else LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_STYLE)
        )
        self._matcher = LLMatcher(tables.tokenizer, compiled, log_level=0)
        self._raise_if_broken()
        self._waiting_for = frozenset(grammar.starts_after)
        self._cursor = JsonCursor()
        self._margin = grammar.closing_margin
        self._left = budget
        self._check_at = budget
        self._closing: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether nothing but the end token may follow: the engine may stop without it."""
        return not self._waiting_for and self._matcher.is_stopped()

    def allowed(self) -> bytes | None:
        """The ids that may come next; None means any.

        A bit per id in little-endian 32-bit words, `ceil(vocabulary.size / 32)` of them; ids
        outside the vocabulary are not allowed.
        """
        if self._waiting_for:
            return None
        self._plan_end()
        if self._closing:
            return self._only(self._closing[0])
        mask: bytes = self._matcher.compute_bitmask()
        self._raise_if_broken()
        return mask[: self._mask_bytes]

    def accept(self, token: int) -> None:
        """The id that was sampled under `allowed`. Raises RequestError for one that was not."""
        if self._left is not None:
            self._left -= 1
        if self._waiting_for:
            if token in self._waiting_for:
                self._waiting_for = frozenset()
            return
        if not self._matcher.consume_token(token):
            self._raise_if_broken()
        self._cursor.feed(self._vocabulary.token_bytes(token))
        self._closing = self._closing[1:] if self._closing[:1] == [token] else []

    def _plan_end(self) -> None:
        """Begin to close if the shortest end would not surely fit after one more free id.

        An id lengthens the shortest end by `margin` at most, so after a look with `slack` to spare
        the next one is due `slack / (margin + 1)` ids later.
        """
        if self._margin is None or self._left is None or self._check_at is None or self._closing:
            return
        if self._left > self._check_at:
            return
        end = self._closer.shortest_end(self._matcher, self._cursor, self._left - 1)
        if end is None:
            return
        slack = self._left - 1 - len(end) - self._margin
        if slack > 0:
            self._check_at = self._left - max(1, slack // (self._margin + 1))
        else:
            self._closing = [*end, self._end]

    def _only(self, token: int) -> bytes:
        mask = bytearray(self._mask_bytes)
        mask[token >> 3] = 1 << (token & 7)
        return bytes(mask)

    def _raise_if_broken(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the output's constraint failed: {self._matcher.get_error()[:300]}; "
                "simplify the schema"
            )
