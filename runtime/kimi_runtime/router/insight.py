"""What a router knows of workers and requests beside load and index: rates, heat, space. Pure.

It is filled from load reports, feeds and requests' ends, and read when decisions look at workers.
Everything is bounded. For a policy that learns nothing only what costs nothing is kept.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kimi_runtime.router.answers import Answers
from kimi_runtime.router.cost.learn import Learning
from kimi_runtime.router.estimate.gaps import Gaps
from kimi_runtime.router.estimate.heat import FADING_S, PrefixHeat
from kimi_runtime.router.estimate.outputs import Length, Phase
from kimi_runtime.router.ledger import Load
from kimi_runtime.router.reports import Reports
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.router.siblings import Siblings
from kimi_runtime.router.space import Space
from kimi_runtime.router.view import Line, RequestView
from kimi_runtime.spec.worker import LoadReport, Role, WorkerInfo

if TYPE_CHECKING:
    from kimi_runtime.router.cost.planner import Planner

FRESH_INTERVALS = 2.0
"""A report that is no older than this many intervals is as new as reports get."""
SHARED_REQUESTS = 1.5
"""Session starts in the last minute, faded, from which on a front counts as shared."""
MAX_FRONTS = 8
LAYER_GROUPS = 4
"""That engines which stream by layers hand KV over in (`engine.runner`)."""

Front = tuple[int, bytes]
"""The first so many tokens of a prompt, and the key of their last block."""


class Facts(NamedTuple):
    """The part of a `WorkerView` of the same names."""

    kind: str = ""
    age_s: float = 0.0
    utilisation: float | None = None
    unused_blocks: int | None = None
    space_price_s: float = 0.0
    releases: tuple[tuple[float, int], ...] = ()
    line: Line | None = None


class _Resting(NamedTuple):
    """Facts, what they were made from, and what they hold for."""

    info: WorkerInfo
    load: Load
    held: int | None
    at_s: float
    """When the worker last reported."""
    most_tokens: float
    facts: Facts
    promised: int
    """Blocks that requests take which the worker has not reported yet."""


class Insight:
    """`planner` is what learns; None for policies that do not."""

    def __init__(self, planner: "Planner | None", *, load_interval_s: float) -> None:
        self.planner = planner
        self.learning = None if planner is None else Learning(planner)
        self.answers, self.space = Answers(), Space()
        self.siblings = Siblings()
        self.gaps = Gaps() if planner is None else planner.models.gaps
        self._reports, self._heat = Reports(), PrefixHeat()
        self._kinds: dict[str, tuple[WorkerInfo, str]] = {}
        self._resting: dict[str, _Resting] = {}
        self._fresh_s = FRESH_INTERVALS * load_interval_s

    def reported(self, info: WorkerInfo, report: LoadReport, *, now_s: float) -> None:
        """A worker's load report came."""
        self._resting.pop(info.name, None)
        step_s = None
        if self.planner is not None and report.running:
            step_s = self._step_s(self.planner, info, report, now_s=now_s)
        steps = self._reports.take(
            info.name, report, block_tokens=info.block_tokens, now_s=now_s, step_s=step_s
        )
        if steps is not None and self.learning is not None:
            self.learning.stepped(
                self._kind(info),
                info.name,
                rows=steps.rows,
                kv_tokens=steps.kv_tokens,
                seconds=steps.seconds,
                now_s=now_s,
            )

    def evicted(self, worker: str, keys: Sequence[bytes], *, now_s: float) -> None:
        """A worker's feed told that blocks are gone."""
        if self.planner is not None:
            self.space.evicted(worker, keys, now_s=now_s)

    def gone(self, worker: str) -> None:
        """A worker restarted or left: what was particular to it no longer holds."""
        self._reports.forget(worker)
        self.space.forget(worker)
        self._kinds.pop(worker, None)
        self._resting.pop(worker, None)
        if self.planner is not None:
            self.planner.models.forget(worker)

    def started(self, fronts: Iterable[Front], *, now_s: float) -> None:
        """A session starts with these fronts."""
        if self.planner is not None:
            self._heat.observe((key for _, key in fronts), now_s=now_s)

    def facts(
        self, info: WorkerInfo, load: Load, *, held: int | None, need_tokens: int, now_s: float
    ) -> Facts:
        """What is known of a worker. `held` are the blocks its feed says it holds, if that can be
        trusted; `need_tokens` is the space that the request may want.
        """
        kind = self._kind(info)
        known_s, utilisation = self._reports.seen(info.name, now_s=now_s)
        age_s = known_s if known_s is not None and known_s > self._fresh_s else 0.0
        if self.planner is None:
            return Facts(kind, age_s)
        releases: tuple[tuple[float, int], ...] = ()
        line = None
        need = -(-need_tokens // info.block_tokens)
        if load.short_blocks is not None and info.role is not Role.PREFILL:
            line = self._line(self.planner, info, load, need, now_s=now_s)
        elif load.running and load.free_blocks < need * (load.waiting + 1):
            releases = self._releases(self.planner, info, load, now_s=now_s)
        if not load.certain:  # as busy as the others, if not more
            typical = self._reports.typical_utilisation()
            told = [share for share in (utilisation, typical) if share is not None]
            utilisation = max(told, default=None)
        return Facts(
            kind,
            age_s,
            utilisation,
            # some of what is held is in use and not free, so that this is a lower bound
            None if held is None else max(load.free_blocks - held, 0),
            self.space.per_block_s(info.name, now_s=now_s),
            releases,
            line,
        )

    def all_facts(
        self,
        seen: Iterable[tuple[WorkerInfo, Load]],
        *,
        held: Callable[[str], int | None],
        need_tokens: int,
        now_s: float,
    ) -> list[Facts]:
        """`facts` of several workers; the same object as the last time where nothing changed."""
        known, oldest_s, costly = self._resting, now_s - self._fresh_s, self.space.costly
        facts: list[Facts] = []
        for info, load in seen:
            name = info.name
            holds, last = held(name), known.get(name)
            if (
                last is not None
                and last.load is load
                and last.info is info
                and last.held == holds
                and last.at_s >= oldest_s
                and need_tokens <= last.most_tokens
                and name not in costly
                and (not load.unreported or self._promised(info, load) == last.promised)
            ):
                facts.append(last.facts)
                continue
            made = self.facts(info, load, held=holds, need_tokens=need_tokens, now_s=now_s)
            facts.append(made)
            self._rest(info, load, holds, need_tokens, made)
        return facts

    def _rest(
        self, info: WorkerInfo, load: Load, held: int | None, need_tokens: int, facts: Facts
    ) -> None:
        """Keep facts that hold until something is heard of the worker."""
        at_s = self._reports.at_s(info.name)
        told = load.short_blocks is not None and info.role is not Role.PREFILL
        if at_s is None or facts.space_price_s or facts.releases or not load.certain:
            self._resting.pop(info.name, None)
            return
        # up to here there is room at once, and nobody's ends are looked into
        promised = self._promised(info, load)
        free = load.free_blocks - promised if told else load.free_blocks // (load.waiting + 1)
        most = free * info.block_tokens if told or load.running else math.inf
        if need_tokens <= most:
            resting = _Resting(info, load, held, at_s, most, facts, promised)
            self._resting[info.name] = resting

    def _promised(self, info: WorkerInfo, load: Load) -> int:
        size = info.block_tokens
        return self.answers.promised(info.name, load.unreported, block_tokens=size)

    def promised(self, fronts: Sequence[Front], own: dict[str, int], *, now_s: float) -> None:
        """Count in `own` (cached tokens by worker) what siblings of the request bring there."""
        for tokens, key in fronts:
            for worker, brought in self.siblings.promised(key, now_s=now_s).items():
                if worker in own:
                    own[worker] = max(own[worker], min(brought, tokens))

    def request(
        self, view: RequestView, fronts: Sequence[Front], own: Mapping[str, int], *, now_s: float
    ) -> RequestView:
        """The request with what others share with it; `own` are cached tokens by worker."""
        for tokens, key in reversed(fronts):
            per_s = self._heat.per_s(key, now_s=now_s)
            if per_s * FADING_S >= SHARED_REQUESTS:
                holders = [worker for worker, cached in own.items() if cached >= tokens]
                busy = [self._reports.utilisation(worker) or 0.0 for worker in holders]
                return replace(
                    view,
                    shared_tokens=tokens,
                    shared_per_s=per_s,
                    shared_holders=len(holders),
                    shared_busy=sum(busy) / len(busy) if busy else 0.0,
                )
        return view

    def expected_length(self, request: RequestView) -> Length | None:
        """Of the request's answer."""
        return self.length(request.session, request.phase, limit=request.max_tokens)

    def length(self, session: bytes, phase: Phase, *, limit: int) -> Length | None:
        """Of the session's next answer; None for a policy that does not learn it."""
        if self.planner is None:
            return None
        return self.planner.models.outputs.expect(session, phase, limit=limit)

    def _releases(
        self, planner: "Planner", info: WorkerInfo, load: Load, *, now_s: float
    ) -> tuple[tuple[float, int], ...]:
        step_s = self._step_s(planner, info, load, now_s=now_s)
        return self.answers.releases(info.name, step_s=step_s, block_tokens=info.block_tokens)

    def _line(
        self, planner: "Planner", info: WorkerInfo, load: Load, need: int, *, now_s: float
    ) -> Line | None:
        """Ends are looked into only where `need` blocks are not there at once."""
        spare = load.free_blocks
        if load.unreported:
            spare -= self._promised(info, load)
        if spare >= need:
            return Line(spare) if load.waiting else None
        return self.answers.line(
            info.name,
            load,
            step_s=self._step_s(planner, info, load, now_s=now_s),
            usual_tokens=planner.models.outputs.usual,
            block_tokens=info.block_tokens,
        )

    def _step_s(
        self, planner: "Planner", info: WorkerInfo, load: Load | LoadReport, *, now_s: float
    ) -> float:
        held = max(load.total_blocks - load.free_blocks, 0) * info.block_tokens
        speeds = planner.models.speeds(self._kind(info))
        return speeds.step_s(info.name, load.running, held, now_s=now_s)

    def _kind(self, info: WorkerInfo) -> str:
        """See `kind_of`; a worker's is put together once."""
        known = self._kinds.get(info.name)
        if known is None or known[0] is not info:
            known = self._kinds[info.name] = (info, kind_of(info))
        return known[1]


def kind_of(info: WorkerInfo) -> str:
    """Workers of one kind are taken to be equally fast: engine, role (which decides parallelism)
    and KV layout.
    """
    return f"{info.engine}/{info.role.value}/{info.layout[:12]}"


def streams_of(info: WorkerInfo) -> int:
    """See `WorkerView.streams`."""
    return LAYER_GROUPS if info.capabilities.layer_streaming else 1


def fronts_of(ends: Iterable[int], keys: Mapping[Geometry, Sequence[bytes]]) -> tuple[Front, ...]:
    """The whole blocks before each of a prompt's first messages' ends, shortest first.

    What sessions share (a system prompt, tools, a parent's history) ends with a message. Workers
    of several geometries are in the middle of a rollout; then those of one are looked at.
    """
    if not keys:
        return ()
    geometry, held = min(keys.items(), key=lambda one: repr(one[0]))
    size = geometry.block_tokens
    blocks = sorted({end // size for end in ends} - {0})
    inside = [count for count in blocks if count <= len(held)]
    return tuple((count * size, held[count - 1]) for count in inside[:MAX_FRONTS])
