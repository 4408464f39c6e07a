"""Sessions between their turns: how long they are away, and what pools are told of it. Pure.

A session that waits for a tool will want its KV again, one that ended will not, and a pool cannot
see which is which. So pools hear of every session that had its KV computed next to them: that a
turn runs, that it pauses and for how long that usually takes, which blocks it gave up, and that it
is over. Each pause that ends teaches the hazard of its tool; those that never end do so too.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kimi_runtime.router.estimate.gaps import HUMAN, Curve, Gaps
from kimi_runtime.spec.umbp import HintRequest
from kimi_runtime.umbp.keys import hex_keys

MAX_SESSIONS = 100_000
AWAY_S = 3600.0
"""A session that paused for so long is taken to be over: people's 99th percentile."""

Kind = Literal["active", "paused", "ended", "compacted", "forked"]
Tell = Callable[[str, HintRequest], None]
"""A pool's name, and what it should hear."""
PoolKeys = Mapping[str, Sequence[bytes]]
"""By pool, the keys of blocks in the geometry of the workers next to it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A turn that came. `given_up` are blocks that the history no longer has."""

    session: bytes
    tenant: str
    client: str | None = None
    """What its client calls the conversation."""
    given_up: PoolKeys = field(default_factory=dict)
    parent: bytes | None = None
    """Another session that it goes on from, with `shared` in common."""
    shared: PoolKeys = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    tenant: str
    client: str | None
    touched_s: float
    turns: int = 0
    pools: tuple[str, ...] = ()
    tool: str | None = None
    """What it waits for; None before its first pause."""


class Pauses:
    """`name` makes of a session what pools call it: 16 bytes, the same in every replica."""

    def __init__(
        self,
        gaps: Gaps,
        tell: Tell,
        name: Callable[[bytes], bytes],
        *,
        max_sessions: int = MAX_SESSIONS,
        away_s: float = AWAY_S,
    ) -> None:
        self._gaps, self._tell, self._name = gaps, tell, name
        self._max_sessions, self._away_s = max_sessions, away_s
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._of_client: dict[tuple[str, str], dict[bytes, None]] = {}

    def __len__(self) -> int:
        """How many sessions are known."""
        return len(self._sessions)

    def began(self, came: Arrival, *, now_s: float) -> None:
        """A turn arrived: its session's pause is over."""
        known = self._sessions.get(came.session)
        if known is None:
            known = self._met(came, now_s)
        elif known.tool is not None and not known.turns:
            self._gaps.observe(came.tenant, known.tool, now_s - known.touched_s, ended=True)
        self._call(came.session, known, came.client)
        known.turns += 1
        self._touch(came.session, known, now_s)
        for pool, keys in came.given_up.items():
            if keys:
                self._say(pool, known, came.session, "compacted", keys)
        for pool, keys in came.shared.items():
            if keys and came.parent is not None:
                known.pools = (*known.pools, *({pool} - {*known.pools}))
                child = self._name(came.session).hex()
                self._say(pool, known, came.parent, "forked", keys, child=child)
        for pool in known.pools:
            self._say(pool, known, came.session, "active")

    def ended(
        self, session: bytes, *, tools: Sequence[str], keys: PoolKeys, now_s: float
    ) -> Curve | None:
        """A turn is over, and `keys` are its session's blocks; how long the pause will be.

        Without `tools` a person is expected. None while other turns of the session run.
        """
        known = self._sessions.get(session)
        if known is None:
            return None
        known.turns = max(known.turns - 1, 0)
        known.pools = (*known.pools, *(pool for pool in keys if pool not in known.pools))
        curve, known.tool = self._longest(known.tenant, tools)
        self._touch(session, known, now_s)
        expected_s = round(min(curve.quantile(0.5), self._away_s), 3)
        for pool in known.pools:
            blocks = keys.get(pool, ())
            if known.turns:
                self._say(pool, known, session, "active", blocks)
            else:
                self._say(pool, known, session, "paused", blocks, expected_s=expected_s)
        return None if known.turns else curve

    def failed(self, session: bytes, *, now_s: float) -> None:
        """A turn ended without an answer: its session waits on as it did, or never was one."""
        known = self._sessions.get(session)
        if known is None:
            return
        known.turns = max(known.turns - 1, 0)
        if known.tool is None and not known.turns:
            self.over(session, now_s=now_s)
            return
        self._touch(session, known, now_s)
        for pool in known.pools if not known.turns else ():
            self._say(pool, known, session, "paused")

    def over(self, session: bytes, *, now_s: float) -> None:
        """The session will not come back."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        self._call(session, known, None)
        if known.tool is not None and not known.turns:
            self._gaps.observe(known.tenant, known.tool, now_s - known.touched_s, ended=False)
        for pool in known.pools:
            self._say(pool, known, session, "ended")

    def of_client(self, tenant: str, client: str) -> list[bytes]:
        """The sessions that a tenant's client calls by that name."""
        return list(self._of_client.get((tenant, client), ()))

    def expire(self, *, now_s: float) -> list[bytes]:
        """Sessions that have been away for so long that they are taken to be over, from now on."""
        late: list[bytes] = []
        for session, known in self._sessions.items():
            if now_s - known.touched_s < self._away_s:
                break
            if not known.turns:
                late.append(session)
        for session in late:
            self.over(session, now_s=now_s)
        return late

    def _met(self, came: Arrival, now_s: float) -> _Session:
        known = self._sessions[came.session] = _Session(came.tenant, None, now_s)
        if len(self._sessions) > self._max_sessions:
            self.over(next(iter(self._sessions)), now_s=now_s)
        return known

    def _call(self, session: bytes, known: _Session, client: str | None) -> None:
        """From now on its client calls the session so; None: no longer by any name."""
        if known.client == client:
            return
        if known.client is not None:
            named = self._of_client[known.tenant, known.client]
            del named[session]
            if not named:
                del self._of_client[known.tenant, known.client]
        if client is not None:
            self._of_client.setdefault((known.tenant, client), {})[session] = None
        known.client = client

    def _touch(self, session: bytes, known: _Session, now_s: float) -> None:
        known.touched_s = now_s
        self._sessions.move_to_end(session)

    def _longest(self, tenant: str, tools: Iterable[str]) -> tuple[Curve, str]:
        """Of parallel calls the one that is expected to take longest."""
        curves = [(self._gaps.curve(tenant, tool), tool) for tool in (*tools,) or (HUMAN,)]
        return max(curves, key=lambda one: one[0].quantile(0.5))

    def _say(
        self,
        pool: str,
        known: _Session,
        session: bytes,
        kind: Kind,
        keys: Sequence[bytes] = (),
        *,
        expected_s: float | None = None,
        child: str | None = None,
    ) -> None:
        hint = HintRequest.model_construct(
            session=self._name(session).hex(),
            kind=kind,
            keys=hex_keys(keys),
            expected=expected_s,
            child=child,
            tenant=known.tenant,
        )
        self._tell(pool, hint)
