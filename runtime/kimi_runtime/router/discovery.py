"""The workers of the deployment: who is there, what each is, whether it can be planned onto.

One task per endpoint asks `GET /info` until the worker answers, refuses it loudly if it does not
fit (another vocabulary, or another layout than the rest of its revision), then asks `GET /load`
every `load_interval`. A worker that stops answering is not ready until it answers again; one with
a new epoch has restarted and is asked anew what it is.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp

from kimi_connect.states import piece_count
from kimi_runtime import clock
from kimi_runtime.errors import KimistackError, WorkerFailed
from kimi_runtime.router.client import PeerClient
from kimi_runtime.router.insight import Facts, streams_of
from kimi_runtime.router.ledger import Ledger, Load
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.router.sight import Sight, geometry_of
from kimi_runtime.router.view import WorkerView
from kimi_runtime.spec.router import WorkerEndpoint
from kimi_runtime.spec.worker import LoadReport, WorkerInfo

MIN_CALL_S = 1.0
"""A busy worker may answer late; below this a late answer says nothing."""
FAILURES_UNTIL_LOST = 4
"""About 5 s of silence: a worker that computes on the same cores may be late more than once."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
REMEMBERED_ANSWERS = 10_000

Seer = Callable[[Sequence[tuple[WorkerInfo, Load]]], Sequence[Facts]]
"""What is known of workers beside their loads."""

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Member:
    """One endpoint and what is known of it."""

    endpoint: WorkerEndpoint
    client: PeerClient
    info: WorkerInfo | None = None
    ready: bool = False
    refusal: str | None = None
    draining: bool = False
    """As its last report said."""
    failures: int = 0
    heard: tuple[int, int] | None = None
    """Epoch and number of its newest report."""
    answered_s: float | None = None
    """When that arrived."""
    left_s: float | None = None
    """Since when nothing new goes there, because the worker was taken off the list."""
    _sight: Sight | None = None

    @property
    def name(self) -> str:
        """The endpoint's name."""
        return self.endpoint.name

    @property
    def sight(self) -> Sight:
        """What decisions see of a worker that was met."""
        sight, info = self._sight, self.info
        if sight is None or sight.info is not info:
            assert info is not None
            reads = info.capabilities.fetch_source
            sight = Sight(self.name, info, reads_pools=reads, streams=streams_of(info))
            self._sight = sight
        return sight

    def renew(self, load: Load, facts: Facts) -> WorkerView | None:
        """A view like the last one, of which load and facts are these now; None before any."""
        last = self._sight.view if self._sight is not None else None
        if last is None:
            return None
        leaves = load.draining or self.left_s is not None
        same = last.cached_tokens, last.pool_tokens, last.checkpoints
        return self.sight.of(load, facts, *same, self.ready, leaves)


class Roster(NamedTuple):
    """What of the workers does not change from decision to decision, by name."""

    geometries: dict[str, Geometry]
    """Of those that are ready."""
    nodes: dict[str, str]
    """Machines of those that were met; "" where they do not say."""
    state_pieces: dict[str, int]
    """Pieces of a state (`kimi_connect.states`), of those whose model has one."""
    distinct: tuple[Geometry, ...]
    """Those of `geometries`, once each."""


class Fleet:
    """Every worker of the router's file. `watch` keeps one up to date."""

    def __init__(
        self,
        members: Sequence[Member],
        ledger: Ledger,
        *,
        vocabulary_digest: str,
        load_interval_s: float,
        changed: Callable[[], None],
        reported: Callable[[WorkerInfo, LoadReport], None] = lambda _info, _report: None,
    ) -> None:
        """`changed` hears when workers come, go or restart, `reported` of their load reports."""
        self._reported = reported
        self._members = {member.name: member for member in members}
        self._ledger, self._vocabulary_digest = ledger, vocabulary_digest
        self._load_interval_s, self._changed = load_interval_s, changed
        self._call_s = max(MIN_CALL_S, 5 * load_interval_s)
        self._next = asyncio.Event()
        self._roster: tuple[list[Member], list[WorkerInfo | None], list[bool], Roster] | None = None
        """The last one, and what it was made from."""
        self.answered: OrderedDict[str, float] = OrderedDict()
        """When each worker, dropped ones included, gave its last answer; the oldest first."""
        self.forgotten_s = float("-inf")
        """Answers up to then are not all in `answered`."""

    def __getitem__(self, name: str) -> Member:
        """The worker of that name."""
        return self._members[name]

    @property
    def members(self) -> Sequence[Member]:
        """All of them, ready or not."""
        return list(self._members.values())

    @property
    def generation(self) -> tuple[tuple[str, int], ...]:
        """Which processes can be planned onto: changes when one comes, goes or restarts."""
        return tuple(
            (member.name, member.info.epoch)
            for member in self._members.values()
            if member.ready and member.info is not None and member.left_s is None
        )

    @property
    def next_change(self) -> asyncio.Event:
        """Set when another choice of workers may be possible than is now."""
        return self._next

    @property
    def roster(self) -> Roster:
        """What the workers are; the last one where nobody came, went, or became another."""
        members = list(self._members.values())
        infos, ready = [one.info for one in members], [one.ready for one in members]
        last = self._roster
        # an info that is equal and another object would only be made into the same again
        if last is None or (members, infos, ready) != last[:3]:
            self._roster = last = members, infos, ready, _roster(members)
        return last[3]

    @property
    def max_context_tokens(self) -> int | None:
        """The longest context that any known worker serves; None before one is known."""
        known = [m.info.max_context_tokens for m in self._members.values() if m.info is not None]
        return max(known, default=None)

    def views(
        self,
        cached: Mapping[str, int],
        pooled: Mapping[str, int],
        facts: Seer,
        *,
        now_s: float,
        checkpoints: Mapping[str, tuple[int, ...]] | None = None,
    ) -> list[WorkerView]:
        """Every known worker as a decision sees it."""
        loads = self._ledger.loads(self._members, now_s=now_s)
        states = checkpoints or {}
        met = [(m, m.info) for m in self._members.values() if m.info is not None]
        asked = [(info, loads[member.endpoint.name]) for member, info in met]
        views: list[WorkerView] = []
        for (member, info), (_, load), told in zip(met, asked, facts(asked), strict=True):
            name = info.name
            at = states.get(name, ()) if info.state_bytes else None
            leaves = load.draining or member.left_s is not None
            own, pool = cached.get(name, 0), pooled.get(name, 0)
            views.append(member.sight.of(load, told, own, pool, at, member.ready, leaves))
        return views

    def prepare(self, name: str, facts: Seer, *, now_s: float) -> WorkerView | None:
        """A worker has reported: its view, made now and not when somebody decides, if there was
        one before.
        """
        member = self._members.get(name)
        if member is None or member.info is None:
            return None
        load = self._ledger.loads((name,), now_s=now_s)[name]
        return member.renew(load, facts([(member.info, load)])[0])

    def join(self, member: Member) -> None:
        """A new worker, or one that is back: `watch` it."""
        self._members[member.name] = member

    def leave(self, name: str, *, now_s: float) -> None:
        """Plan nothing new onto a worker; what runs there runs on."""
        member = self._members[name]
        member.left_s = now_s if member.left_s is None else member.left_s
        self._tell()

    def come_back(self, name: str) -> None:
        """A worker that left is on the list again."""
        member = self._members[name]
        if member.left_s is not None:
            member.left_s = None
            self._tell()

    def drop(self, name: str) -> None:
        """Forget a worker. Requests that still name it fail."""
        del self._members[name]
        self._ledger.forget(name)

    def suspect(self, name: str) -> None:
        """A request found the worker dead: it is not ready until it answers a poll again."""
        self._lose(self._members[name], "a request could not reach it")

    async def watch(self, member: Member) -> None:
        """Keep `member` up to date until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                if member.ready:
                    await self._poll(member)
                else:
                    await self._meet(member)
                member.failures, backoff_s = 0, FIRST_BACKOFF_S
                pause_s = self._load_interval_s if member.ready else MAX_BACKOFF_S
            except KimistackError as exc:
                member.failures += 1
                refused = isinstance(exc.__cause__, ConnectionError | aiohttp.ClientConnectorError)
                if refused or member.failures >= FAILURES_UNTIL_LOST:
                    self._lose(member, str(exc))
                    member.client.abort_streams()
                if member.failures == 1:
                    _log.warning(
                        "worker not reached",
                        extra={"fields": {"worker": member.name, "why": str(exc)}},
                    )
                pause_s, backoff_s = backoff_s, min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(pause_s)

    async def _meet(self, member: Member) -> None:
        info = await member.client.info(within_s=self._call_s)
        await self._heard(member)
        report = await self._heard(member)  # says that we hear it, without which it takes no work
        if report.epoch != info.epoch:
            raise WorkerFailed(f"{member.name} restarted while it was asked what it is")
        refusal = self._misfit(member, info)
        if refusal != member.refusal and refusal is not None:
            _log.error("worker refused", extra={"fields": {"worker": member.name, "why": refusal}})
        member.info, member.refusal, member.ready = info, refusal, refusal is None
        if member.ready:
            self._take(member, report)
            _log.info(
                "worker ready",
                extra={"fields": {"worker": member.name, "role": info.role, "epoch": info.epoch}},
            )
            self._tell()

    async def _poll(self, member: Member) -> None:
        report = await self._heard(member)
        if member.info is None or report.epoch != member.info.epoch:
            self._lose(member, "it restarted")
            member.client.abort_streams()
            await self._meet(member)
            return
        self._take(member, report)

    async def _heard(self, member: Member) -> LoadReport:
        """The worker's report, with word of the one before; noted as its newest sign of life."""
        report = await member.client.load(within_s=self._call_s, heard=member.heard)
        member.heard, member.answered_s = (report.epoch, report.seq), clock.now_s()
        self.answered[member.name] = member.answered_s
        self.answered.move_to_end(member.name)
        while len(self.answered) > REMEMBERED_ANSWERS:
            self.forgotten_s = self.answered.popitem(last=False)[1]
        return report

    def _take(self, member: Member, report: LoadReport) -> None:
        taken = self._ledger.report(member.name, report, now_s=clock.now_s())
        if taken and member.info is not None:
            self._reported(member.info, report)
        if report.draining != member.draining:
            member.draining = report.draining
            said = "worker drains" if report.draining else "worker drains no more"
            _log.info(said, extra={"fields": {"worker": member.name}})
            self._wake()

    def _misfit(self, member: Member, info: WorkerInfo) -> str | None:
        if info.name != member.name:
            return f"it calls itself {info.name!r}; correct the name in the router's file"
        if info.role != member.endpoint.role:
            return f"its role is {info.role.value}, not {member.endpoint.role.value} as in the file"
        if info.vocabulary_digest != self._vocabulary_digest:
            return (
                f"its vocabulary is {info.vocabulary_digest[:12]}, the router's is "
                f"{self._vocabulary_digest[:12]}: its ids would mean other text"
            )
        for other in self._members.values():
            theirs = other.info
            if other is member or not other.ready or theirs is None:
                continue
            if theirs.revision == info.revision and geometry_of(theirs) != geometry_of(info):
                return (
                    f"revision {info.revision} has {geometry_of(theirs)} at {other.name}, "
                    f"but {geometry_of(info)} here: KV could not be shared"
                )
        return None

    def _lose(self, member: Member, why: str) -> None:
        if not member.ready:
            return
        member.ready = False
        self._ledger.lost(member.name)
        _log.warning("worker lost", extra={"fields": {"worker": member.name, "why": why}})
        self._tell()

    def _tell(self) -> None:
        self._changed()
        self._wake()

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()


def _roster(members: Sequence[Member]) -> Roster:
    met = [(member, member.info) for member in members if member.info is not None]
    geometries = {one.name: one.sight.geometry for one, _ in met if one.ready}
    return Roster(
        geometries,
        {member.name: info.node for member, info in met},
        {one.name: piece_count(info.state_bytes) for one, info in met if info.state_bytes},
        tuple(dict.fromkeys(geometries.values())),
    )
