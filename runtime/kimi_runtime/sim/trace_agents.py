"""Traces of agents that start others: Agentic Mooncake, Weka, TraceLab's rounds. Pure.

A session whose first request waits for one of another session is that one's subagent. The other
goes on when all that it started have ended, which is what its own lines say too, except for
subagents that were started and left alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kimi_runtime.sim.sessions import Pause, Session, Turn
from kimi_runtime.sim.trace_rows import Row, blocks_of, json_rows, own_text

LOCAL_TEXT = 1 << 44
"""Hash ids of a Weka trace are its own: they are texts from here on, a range for each trace."""
_IDS_PER_TRACE = 1 << 20

Context = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Made:
    """A session under construction: turns, their whole prompts, and whom they start."""

    name: str
    text: int
    start_s: float
    turns: list[Turn] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    children: dict[int, list["_Made"]] = field(default_factory=dict)

    def add(self, context: Context, prompt: int, output: int, pause_s: float) -> None:
        """One more request, `pause_s` after the one before it."""
        if self.turns:
            self.turns[-1] = replace(self.turns[-1], pause_s=pause_s)
        before = sum(tokens for _, tokens in self.contexts[-1]) if self.contexts else 0
        self.turns.append(Turn(max(prompt - before, 1), max(output, 1), Pause.TOOL))
        self.contexts.append(context)

    def session(self, *, child: bool = False) -> Session:
        """As it is simulated."""
        turns = [
            replace(
                turn,
                children=tuple(
                    replace(one.session(child=True), name=f"{self.name}.{number}.{place}")
                    for place, one in enumerate(self.children.get(number, ()))
                ),
            )
            for number, turn in enumerate(self.turns)
        ]
        turns[-1] = replace(turns[-1], pause=Pause.END, pause_s=0.0)
        return Session(
            name=self.name,
            text=self.text,
            turns=tuple(turns),
            start_s=self.start_s,
            child=child,
            contexts=tuple(self.contexts),
        )


def agentic_mooncake(lines: Iterable[str], name: str, block_tokens: int) -> Iterator[Session]:
    """Requests in an order in which none waits for a later one. Pauses are delay + tool_wait_ms."""
    sessions: dict[str, _Made] = {}
    places: dict[str, tuple[_Made, int]] = {}
    roots: list[_Made] = []
    for row in json_rows(lines, name):
        request = row.text("request_id")
        if request in places:
            raise row.wrong("request_id", f"{request!r} is there already")
        waits = row.texts("wait_for") if row.has("wait_for") else []
        for one in waits:
            if one not in places:
                raise row.wrong("wait_for", f"{one!r} is no request of an earlier line")
        pause_s = sum(
            row.number(field, most=1e12) / 1e3
            for field in ("delay", "tool_wait_ms")
            if row.has(field)
        )
        key = row.text("session_id") if row.has("session_id") else request
        made = sessions.get(key)
        if made is None:
            start_s = row.number("timestamp", most=1e12) / 1e3 if row.has("timestamp") else 0.0
            made = sessions[key] = _Made(key, own_text(len(sessions)), start_s)
            if waits:
                parent, turn = places[waits[0]]
                parent.children.setdefault(turn, []).append(made)
            else:
                roots.append(made)
        tokens = len(row.wholes("hash_ids")) * block_tokens
        if row.has("input_length"):  # the last block is not full
            tokens = row.whole("input_length", least=1)
        context = blocks_of(row, tokens, block_tokens)
        made.add(context, tokens, row.whole("output_length"), pause_s)
        places[request] = (made, len(made.turns) - 1)
    for made in roots:
        yield made.session()


def weka(lines: Iterable[str], name: str) -> Iterator[Session]:
    """A trace a line; requests of type n or s are turns, `subagent` belongs to the turn before."""
    texts = 0
    for number, row in enumerate(json_rows(lines, name)):
        block_tokens = row.whole("block_size", least=1)
        made = _Made(row.text("id"), own_text(texts), 0.0)
        texts += 1
        ended_s, alone = 0.0, []
        for entry in row.rows("requests"):
            kind = entry.text("type")
            if kind == "subagent":
                child = _Made(entry.text("agent_id"), own_text(texts), entry.number("t", most=1e9))
                texts += 1
                inner_s = child.start_s
                for inner in entry.rows("requests"):
                    inner_s = _weka_turn(child, inner, inner_s, number, block_tokens)
                if not child.turns:
                    continue
                if made.turns:
                    made.children.setdefault(len(made.turns) - 1, []).append(child)
                else:
                    alone.append(child)
            elif kind in ("n", "s"):
                ended_s = _weka_turn(made, entry, ended_s, number, block_tokens)
            else:
                raise entry.wrong("type", f"is {kind!r}, not n, s or subagent")
        if not made.turns:
            raise row.wrong("requests", "has none of type n or s")
        yield made.session()
        for child in alone:
            yield replace(child.session(), name=f"{made.name}-{child.name}")


def _weka_turn(made: _Made, entry: Row, ended_s: float, trace: int, block_tokens: int) -> float:
    """Add one call; returns when it ended."""
    at_s, tokens = entry.number("t", most=1e9), entry.whole("in", least=1)
    if entry.has("think_time"):
        pause_s = entry.number("think_time", most=1e9)
    else:
        pause_s = max(at_s - ended_s, 0.0)
    if not made.turns:
        made.start_s = at_s
    tail = made.text + 2 * len(made.turns) + 1
    first = LOCAL_TEXT + trace * _IDS_PER_TRACE
    context = tuple(
        (text if text == tail else first + text, count)
        for text, count in blocks_of(entry, tokens, block_tokens, tail_text=tail)
    )
    made.add(context, tokens, entry.whole("out"), pause_s)
    return at_s + (entry.number("api_time", most=1e9) if entry.has("api_time") else 0.0)


def tracelab_rounds(lines: Iterable[str], name: str) -> Iterator[Session]:
    """Rounds by session; the prefix that was found says how much of the context was kept.

    A round is asked at its latest input event and ends at its latest output event; the pause after
    it lasts until the next one is asked.
    """
    sessions: dict[str, list[tuple[float, float, Turn]]] = {}
    for row in json_rows(lines, name):
        known = sessions.setdefault(row.text("session_id"), [])
        asked_s, ended_s = _span(row)
        if known and asked_s < known[-1][0]:
            raise row.wrong("timing_events", "are before those of the session's round before")
        prefix, append = row.whole("prefix_tokens"), row.whole("newly_append_tokens")
        output = row.whole("output_tokens")
        if row.has("reasoning_output_tokens"):
            output += row.whole("reasoning_output_tokens")
        length = sum(turn.append_tokens + turn.output_tokens for _, _, turn in known)
        keep = prefix if known and prefix < length else None
        append += prefix if not known else 0
        if keep is None and known:
            # what was found beyond what is known here was said by nobody we see: it is appended
            append += max(prefix - length, 0)
        turn = Turn(max(append, 1), max(output, 1), Pause.TOOL, keep_tokens=keep)
        if known:
            before_asked_s, before_ended_s, before = known[-1]
            pause_s = max(asked_s - before_ended_s, 0.0)
            known[-1] = (before_asked_s, before_ended_s, replace(before, pause_s=pause_s))
        known.append((asked_s, ended_s, turn))
    began_s = min((rounds[0][0] for rounds in sessions.values()), default=0.0)
    for number, (session, rounds) in enumerate(sessions.items()):
        turns = [turn for _, _, turn in rounds]
        turns[-1] = replace(turns[-1], pause=Pause.END, pause_s=0.0)
        yield Session(
            name=session,
            text=own_text(number),
            turns=tuple(turns),
            start_s=rounds[0][0] - began_s,
        )


def _span(row: Row) -> tuple[float, float]:
    asked: list[float] = []
    made: list[float] = []
    for event in row.rows("timing_events"):
        if event.text("event_type") in ("user_message", "tool_result"):
            asked.append(event.time("timestamp"))
        elif event.text("event_type") in ("text", "reasoning", "tool_call"):
            made.append(event.time("timestamp"))
    if not asked and not made:
        raise row.wrong("timing_events", "has neither an input nor an output")
    asked_s = max(asked) if asked else min(made)
    return asked_s, max([asked_s, *made])
