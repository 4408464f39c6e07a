"""Around each turn: its session's pause is over, it gets room, it pauses again, pools are told."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kimi_runtime import clock
from kimi_runtime.router.discovery import Fleet
from kimi_runtime.router.estimate.gaps import Curve
from kimi_runtime.router.estimate.outputs import Phase
from kimi_runtime.router.follow import Feeds
from kimi_runtime.router.insight import Insight
from kimi_runtime.router.pauses import Arrival, Pauses
from kimi_runtime.router.recording import Recording, Served
from kimi_runtime.router.session_gate import Entry, Seat, SessionGate
from kimi_runtime.router.sessions import Geometry, Turn
from kimi_runtime.router.sight import geometry_of
from kimi_runtime.router.view import RequestClass

HOLD_QUANTILE = 0.9
"""A session keeps its room until this share of its tool's calls would have ended."""
UNKNOWN_OUTPUT = 512
"""Tokens that an answer is taken to have where lengths are not learned."""


@dataclass(slots=True)
class Place:
    """A turn that is being served. `answered` tells how it went, if there was an answer."""

    asked_s: float
    waited_s: float = 0.0
    tools: Sequence[str] | None = None
    outcome: str = "left"
    first_token_s: float | None = None

    def answered(
        self, tools: Sequence[str], *, outcome: str = "finished", first_token_s: float | None = None
    ) -> None:
        """The model spoke, and called `tools`; `outcome` is `Served`'s."""
        self.tools, self.outcome, self.first_token_s = tools, outcome, first_token_s


class Turns:
    """`name` makes of a session what others may know it by."""

    def __init__(
        self,
        gate: SessionGate,
        pauses: Pauses,
        *,
        fleet: Fleet,
        feeds: Feeds,
        insight: Insight,
        name: Callable[[bytes], bytes],
        hold_s: float,
        recording: Recording | None = None,
    ) -> None:
        self._recording = recording
        self._gate, self._pauses, self._hold_s = gate, pauses, hold_s
        self._fleet, self._feeds, self._insight, self._name = fleet, feeds, insight, name

    @asynccontextmanager
    async def taken(
        self,
        turn: Turn,
        *,
        max_tokens: int,
        deadline_s: float,
        urgency: RequestClass = RequestClass.INTERACTIVE,
        phase: Phase = Phase.TOOL,
    ) -> AsyncIterator[Place]:
        """A place for the turn while the block runs; raises what `SessionGate.turn` raises."""
        session = turn.session
        asked_s = clock.now_s()
        remembered = bool(turn.ends)  # what is no chat has no later turn
        if remembered:
            self._pauses.began(self._arrival(turn), now_s=asked_s)
        entry = Entry(
            session.id,
            session.tenant,
            len(turn.ids) + self._answer_tokens(session.id, phase, max_tokens),
            continues=turn.continues,
            deadline_s=deadline_s,
            urgency=urgency,
        )
        place, seat = Place(asked_s), None
        before = len(session.ids)
        try:
            async with self._gate.turn(entry) as seat:
                place.waited_s = seat.waited_s
                try:
                    yield place
                finally:
                    if remembered:
                        self._over(turn, place, seat)
                        self._record(turn, place, before, phase, urgency)
        finally:
            if remembered and seat is None:
                self._pauses.failed(session.id, now_s=clock.now_s())

    def end(self, tenant: str, client: str) -> int:
        """The conversations that a client calls so are over; how many that were."""
        sessions = self._pauses.of_client(tenant, client)
        self._all_over(sessions)
        return len(sessions)

    def expire(self) -> None:
        """Give up sessions that nobody came back to."""
        self._all_over(self._pauses.expire(now_s=clock.now_s()))

    def _all_over(self, sessions: Iterable[bytes]) -> None:
        for session in sessions:
            self._pauses.over(session, now_s=clock.now_s())
            self._gate.end(session)
            if self._recording is not None:
                self._recording.over(session)

    def _arrival(self, turn: Turn) -> Arrival:
        session = turn.session
        parent = turn.parent
        given_up: Mapping[Geometry, Sequence[bytes]] = {}
        if turn.reencoded:
            given_up = {
                geometry: keys[turn.kept_tokens // geometry.block_tokens :]
                for geometry, keys in session.keys.items()
            }
        shared: Mapping[Geometry, Sequence[bytes]] = {}
        if parent is not None:
            shared = {
                geometry: keys[: turn.kept_tokens // geometry.block_tokens]
                for geometry, keys in parent.keys.items()
            }
        return Arrival(
            session.id,
            session.tenant,
            turn.hint or session.hint,
            given_up=self._by_pool(session.owners, given_up),
            parent=None if parent is None else parent.id,
            shared={} if parent is None else self._by_pool(parent.owners, shared),
        )

    def _over(self, turn: Turn, place: Place, seat: Seat) -> None:
        session, now_s = turn.session, clock.now_s()
        if place.tools is None:
            self._pauses.failed(session.id, now_s=now_s)
            seat.pause_s = 0.0 if turn.continues else None
            return
        keys = self._by_pool(session.owners, session.keys)
        curve = self._pauses.ended(session.id, tools=place.tools, keys=keys, now_s=now_s)
        seat.tokens, seat.pause_s = len(session.ids), self._held_s(curve, place.tools)

    def _record(
        self, turn: Turn, place: Place, before: int, phase: Phase, urgency: RequestClass
    ) -> None:
        session, now_s = turn.session, clock.now_s()
        if self._recording is None or place.tools is None:
            return
        geometry, keys = min(session.keys.items(), key=lambda one: repr(one[0]), default=(None, ()))
        size = 0 if geometry is None else geometry.block_tokens
        first = min(turn.ends.items(), key=lambda one: one[1])
        self._recording.served(
            Served(
                session.id,
                session.tenant,
                prompt_tokens=len(turn.ids),
                kept_tokens=turn.kept_tokens,
                history_tokens=before,
                output_tokens=len(session.ids) - len(turn.ids),
                asked_s=place.asked_s,
                ended_s=now_s,
                outcome=place.outcome,
                waited_s=place.waited_s,
                first_token_s=place.first_token_s,
                phase=phase.value,
                tools=place.tools,
                background=urgency is RequestClass.BACKGROUND,
                parent=None if turn.parent is None else turn.parent.id,
                prefix=(first[1], first[0]),
                block_tokens=size,
                blocks=keys,
            )
        )

    def _held_s(self, curve: Curve | None, tools: Sequence[str]) -> float:
        """People take longer than memory can be kept for them."""
        if curve is None or not tools:
            return 0.0
        return min(curve.quantile(HOLD_QUANTILE), self._hold_s)

    def _by_pool(
        self, workers: Iterable[str], keys: Mapping[Geometry, Sequence[bytes]]
    ) -> dict[str, Sequence[bytes]]:
        """What the pools next to `workers` call the blocks; workers that are gone have none."""
        known = {member.name: member.info for member in self._fleet.members}
        told: dict[str, Sequence[bytes]] = {}
        for worker in workers:
            info = known.get(worker)
            if info is not None:
                blocks = keys.get(geometry_of(info), ())
                told |= dict.fromkeys(self._feeds.pools_of(info.node), blocks)
        return told

    def _answer_tokens(self, session: bytes, phase: Phase, limit: int) -> int:
        length = self._insight.length(self._name(session), phase, limit=limit)
        return min(limit, UNKNOWN_OUTPUT) if length is None else round(length.tokens.mean)
