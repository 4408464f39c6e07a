"""One generation as text: ids come from workers, events, finish reason and usage go out.

The same for every API dialect; `openai.py` gives it OpenAI's words.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kimi_runtime.protocol.chat import CallEnded, CallStarted, ContentDelta, OutputEvent
from kimi_runtime.protocol.incremental import Detokenizer, StopStrings
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.router.job import Job
from kimi_runtime.router.service import Router
from kimi_runtime.router.sessions import Turn
from kimi_runtime.spec.request import FinishReason, GenerateChunk, TokenLogprob

Finish = Literal["stop", "length", "tool_calls"]


class OutputParser(Protocol):
    """What a codec makes of output ids; see `protocol.parser_k2.K2Parser`."""

    @property
    def complete_calls(self) -> int:
        """Calls that may be run."""

    @property
    def has_open_call(self) -> bool:
        """Whether a call has begun and not ended."""

    @property
    def reasoning_tokens(self) -> int:
        """Ids of reasoning so far."""

    @property
    def ended(self) -> bool:
        """Whether the model ended its turn."""

    def feed(self, ids: Iterable[int]) -> list[OutputEvent]:
        """The events of the next ids."""

    def finish(self, *, stopped: bool = False) -> list[OutputEvent]:
        """The last events."""


class PlainParser:
    """For completions without a chat: everything is content."""

    complete_calls, has_open_call, reasoning_tokens, ended = 0, False, 0, False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._text = Detokenizer(vocabulary)

    def feed(self, ids: Iterable[int]) -> list[OutputEvent]:
        """The text these ids complete."""
        text = self._text.feed(ids)
        return [ContentDelta(text)] if text else []

    def finish(self, *, stopped: bool = False) -> list[OutputEvent]:
        """What an incomplete character leaves behind."""
        del stopped
        text = self._text.finish()
        return [ContentDelta(text)] if text else []


@dataclass(frozen=True, slots=True)
class Usage:
    """A request's token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one step brought. `logprobs` are of the ids whose text is content."""

    events: tuple[OutputEvent, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Answer:
    """One generation. `parts` may be read once; `finish` and `usage` hold afterwards."""

    router: Router
    turn: Turn
    job: Job
    parser: OutputParser
    stops: Sequence[str]
    pending: int
    one_call: bool = False
    finish: Finish = "stop"
    completion_tokens: int = 0
    tools: list[str] = field(default_factory=list)
    """Names of the tools called so far."""
    _stop: StopStrings = field(init=False)
    _undecided: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Prepare the search for stop strings."""
        self._stop = StopStrings(self.stops)

    @property
    def usage(self) -> Usage:
        """Counts so far. The prompt's leaves out the generation stub's end, as Kimi's API does."""
        prompt = len(self.turn.ids) - self.pending
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.completion_tokens,
            cached_tokens=min(self.job.journey.cached_tokens, prompt),
            reasoning_tokens=self.parser.reasoning_tokens,
        )

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Parts until the answer ends; raises what `Dispatcher.run` raises.

        Ends early, which frees the workers at once, when a stop string was found in the content,
        when the model ended its turn, or after the only call that was allowed.
        """
        async with aclosing(self.router.generate(self.turn, self.job)) as chunks:
            async for chunk in chunks:
                part, over = self._step(chunk)
                if part.events or part.logprobs:
                    yield part
                if over:
                    break
        ends = self.parser.finish(stopped=self.finish == "stop")
        last = self._shown(ends)
        rest = self._stop.finish()
        if rest:
            last.append(ContentDelta(rest))
        cut = any(isinstance(event, ContentDelta) for event in ends)  # an incomplete character
        if last:
            yield Part(tuple(last), tuple(self._undecided) if cut else ())
        if self.parser.complete_calls and not (
            self.finish == "length" and self.parser.has_open_call
        ):
            self.finish = "tool_calls"

    def _step(self, chunk: GenerateChunk) -> tuple[Part, bool]:
        self.completion_tokens += len(chunk.ids)
        if chunk.logprobs:
            events, logprobs = self._one_by_one(chunk.logprobs)
        else:
            events, logprobs = self.parser.feed(chunk.ids), []
        self.tools += [event.name for event in events if isinstance(event, CallStarted)]
        if self.one_call and any(isinstance(event, CallEnded) for event in events):
            return Part(tuple(self._shown(events)), tuple(logprobs)), True
        part = Part(tuple(self._shown(events)), tuple(logprobs))
        if chunk.finish is FinishReason.LENGTH and not self.parser.ended:
            self.finish = "length"
        return part, self._stop.match is not None or self.parser.ended

    def _one_by_one(
        self, logprobs: Sequence[TokenLogprob]
    ) -> tuple[list[OutputEvent], list[TokenLogprob]]:
        """Feed ids singly to tell which of them are content.

        An id without an event of its own (a part of a character) belongs to the next event.
        """
        events: list[OutputEvent] = []
        shown: list[TokenLogprob] = []
        for entry in logprobs:
            before = self.parser.reasoning_tokens
            new = self.parser.feed((entry.id,))
            events += new
            if any(isinstance(event, ContentDelta) for event in new):
                shown += [*self._undecided, entry]
                self._undecided = []
            elif new or self.parser.reasoning_tokens != before:
                self._undecided = []
            elif not self.router.vocabulary.is_special(entry.id):
                self._undecided.append(entry)
        return events, shown

    def _shown(self, events: Iterable[OutputEvent]) -> list[OutputEvent]:
        """The events with stop strings applied to the content, and to nothing else."""
        if not self.stops:
            return list(events)
        shown: list[OutputEvent] = []
        for event in events:
            if self._stop.match is not None:
                break
            if isinstance(event, ContentDelta):
                text = self._stop.feed(event.text)
            else:
                text = self._stop.finish()  # a stop string does not reach over into a call
            if text:
                shown.append(ContentDelta(text))
            if not isinstance(event, ContentDelta):
                shown.append(event)
        return shown
