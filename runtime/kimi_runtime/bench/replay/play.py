"""Plays sessions as clients would: ask, wait for the tools, ask again with all that was said."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import aiohttp
from annotated_types import Ge
from pydantic import NonNegativeInt

from kimi_runtime import clock
from kimi_runtime.bench.replay.client import ChatClient, Endpoint, Message
from kimi_runtime.bench.replay.outcome import Outcome
from kimi_runtime.bench.replay.texts import Scale, Texts
from kimi_runtime.sim.sessions import Session, Turn, Workload
from kimi_runtime.spec.base import SpecModel

Progress = Callable[[Outcome], None]


class Retries(SpecModel):
    """How a client asks again after a failure that may pass: as OpenAI's own clients do."""

    most: NonNegativeInt = 0
    """Of one turn, after the first attempt."""
    first_pause_s: Annotated[float, Ge(0)] = 0.5
    """Doubled each time; what the endpoint's Retry-After says goes before it."""
    longest_pause_s: Annotated[float, Ge(0)] = 8.0

    def pause_s(self, failed: Outcome) -> float:
        """How long to wait after this attempt."""
        pause_s = self.first_pause_s * 2.0**failed.attempt
        if failed.retry_after_s is not None:
            pause_s = failed.retry_after_s
        return min(pause_s, self.longest_pause_s)


async def play(
    workload: Workload,
    endpoint: Endpoint,
    texts: Texts,
    *,
    scale: Scale | None = None,
    on_outcome: Progress | None = None,
    retries: Retries | None = None,
    answered: Mapping[str, Sequence[str]] | None = None,
) -> list[Outcome]:
    """Every request's outcome, in the order of sessions, turns and attempts.

    A session whose request fails for good asks nothing more: what would follow depends on the
    answer. `answered` are the answers sessions have had: each goes on with the turn after them.
    """
    began_s = clock.now_s()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        client = ChatClient(http, endpoint, lambda: clock.now_s() - began_s, texts.unseen)
        player = _Player(
            *(client, texts, scale or Scale(), began_s),
            on_outcome=on_outcome,
            retries=retries or Retries(),
            answered=answered or {},
        )
        await player.all(workload)
    order = {name: number for number, name in enumerate(_names(workload.sessions))}
    return sorted(player.outcomes, key=lambda one: (order[one.session], one.turn, one.attempt))


class _Player:
    def __init__(
        self,
        client: ChatClient,
        texts: Texts,
        scale: Scale,
        began_s: float,
        *,
        on_outcome: Progress | None,
        retries: Retries,
        answered: Mapping[str, Sequence[str]],
    ) -> None:
        self._client, self._texts, self._scale = client, texts, scale
        self._began_s, self._on_outcome = began_s, on_outcome
        self._retries, self._answered = retries, answered
        self.outcomes: list[Outcome] = []

    async def all(self, workload: Workload) -> None:
        waiting = deque(workload.sessions)

        async def lane() -> None:
            while waiting:
                await self._session(waiting.popleft(), ())

        async with asyncio.TaskGroup() as group:
            if workload.lanes is not None:
                for _ in range(workload.lanes):
                    group.create_task(lane())
            else:
                for session in workload.sessions:
                    group.create_task(self._starting(session))

    async def _starting(self, session: Session) -> None:
        since_s = clock.now_s() - self._began_s
        await asyncio.sleep(max(session.start_s * self._scale.pauses - since_s, 0.0))
        await self._session(session, ())

    async def _session(self, session: Session, inherited: Sequence[Message]) -> None:
        said = list(inherited)
        if session.prefix_tokens and not session.child:
            said.append(self._says("system", session.prefix, session.prefix_tokens))
        given = self._answered.get(session.name, ())
        for number, turn in enumerate(session.turns):
            if session.contexts:
                said = [self._says("user", *piece) for piece in session.contexts[number]]
            else:
                if turn.keep_tokens is not None:
                    said = self._compacted(said, turn.keep_tokens)
                said.append(self._says("user", session.text + 2 * number, turn.append_tokens))
            if number < len(given):
                said.append({"role": "assistant", "content": given[number]})
                continue
            outcome = await self._answer(session.name, number, turn, said)
            if not outcome.ok:
                return
            said.append({"role": "assistant", "content": outcome.text})
            await self._pause(turn, said)

    async def _answer(
        self, session: str, number: int, turn: Turn, said: Sequence[Message]
    ) -> Outcome:
        """The last attempt's outcome."""
        attempt = 0
        while True:
            outcome = await self._ask(session, number, turn, said, attempt)
            if not outcome.passing or attempt == self._retries.most:
                return outcome
            await asyncio.sleep(self._retries.pause_s(outcome))
            attempt += 1

    async def _ask(
        self, session: str, number: int, turn: Turn, said: Sequence[Message], attempt: int
    ) -> Outcome:
        outcome = Outcome(session, number, clock.now_s() - self._began_s, attempt=attempt)
        leave = turn.aborted_after
        await self._client.ask(
            outcome,
            said,
            max_tokens=self._scale.length(turn.output_tokens),
            leave_after=None if leave is None else self._scale.length(leave),
        )
        self.outcomes.append(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        return outcome

    async def _pause(self, turn: Turn, said: Sequence[Message]) -> None:
        async with asyncio.TaskGroup() as group:
            for child in turn.children:
                group.create_task(self._session(child, said))
            await asyncio.sleep(turn.pause_s * self._scale.pauses)

    def _says(self, role: str, text: int, tokens: int) -> Message:
        return {"role": role, "content": self._texts.text(text, self._scale.length(tokens))}

    def _compacted(self, said: Sequence[Message], keep_tokens: int) -> list[Message]:
        """The front of what was said, in whole messages, by its share of characters."""
        sizes = [len(message["content"]) for message in said]
        room = self._texts_room(keep_tokens)
        kept: list[Message] = []
        for message, size in zip(said, sizes, strict=True):
            if kept and size > room:
                break
            kept.append(message)
            room -= size
        return kept

    def _texts_room(self, tokens: int) -> int:
        return len(self._texts.text(0, self._scale.length(tokens)))


def _names(sessions: Sequence[Session]) -> list[str]:
    names: list[str] = []
    for session in sessions:
        names.append(session.name)
        for turn in session.turns:
            names += _names(turn.children)
    return names
