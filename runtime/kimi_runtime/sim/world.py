"""A whole deployment over virtual time: sessions that ask, a router, workers, pools and links.

Nothing here knows the policy. The same workload, cluster and seed give the same run, to the last
bit; another policy sees the same sessions, pauses and answers. Pure.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kimi_connect.wire import HintKind
from kimi_runtime.errors import ConfigError
from kimi_runtime.router.estimate.gaps import HUMAN
from kimi_runtime.router.estimate.outputs import Phase
from kimi_runtime.router.insight import Front
from kimi_runtime.router.view import RequestClass, RequestView
from kimi_runtime.sim.between import Between
from kimi_runtime.sim.chance import log_normal, stream
from kimi_runtime.sim.cluster import Cluster, ClusterEvent, ClusterSpec
from kimi_runtime.sim.content import Content
from kimi_runtime.sim.dispatch import Dispatch, Job
from kimi_runtime.sim.features import Features
from kimi_runtime.sim.gaps import Away
from kimi_runtime.sim.garbage import uncollected
from kimi_runtime.sim.record import Record
from kimi_runtime.sim.router import SimRouter
from kimi_runtime.sim.sessions import Pause, Session, Turn, Workload
from kimi_runtime.sim.timeline import Timeline
from kimi_runtime.spec.router import PolicySpec
from kimi_runtime.umbp.retention import Hint

EXPECTED_SIGMA = 0.3
"""How far off clients are with how long their tools take: the sd of the logarithm."""


@dataclass(slots=True)
class _Running:
    """A session under way."""

    session: Session
    content: Content
    turn: int = 0
    inherited: int = 0
    """Tokens of a parent's context that it began with."""
    owners: tuple[str, ...] = ()
    moved_s: float | None = None
    children: int = 0
    served: str = ""
    """Who answered last."""
    ended: Callable[[], None] | None = None


@dataclass(slots=True)
class Run:
    """What a simulation brought."""

    records: list[Record]
    cluster: Cluster
    router: SimRouter
    makespan_s: float
    finished: bool
    between: Between
    """What was done around and between turns."""
    sessions_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Start and end of every session."""


class World:
    """Runs a workload on a cluster under a policy."""

    def __init__(
        self,
        cluster: ClusterSpec,
        workload: Workload,
        policy: PolicySpec,
        *,
        seed: int,
        events: Sequence[ClusterEvent] = (),
        features: Features | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.cluster = Cluster(cluster, self.timeline, seed)
        features = features or Features()
        self.router = SimRouter(self.cluster, policy, features)
        self.dispatch = Dispatch(self.cluster, self.router)
        self.records: list[Record] = []
        self.between = Between(self.cluster, self.router, features)
        self._workload, self._features = workload, features
        self._expected = stream(seed, "expected pauses")
        self._waiting = deque(workload.sessions)
        self._open = 0
        self._spans: dict[str, tuple[float, float]] = {}
        self._computed: set[bytes] = set()
        for event in events:
            self._check(event)
            self.timeline.at(event.at_s, lambda event=event: self._happen(event))  # type: ignore[misc]

    def run(
        self, *, until_s: float = math.inf, progress: Callable[[int], None] | None = None
    ) -> Run:
        """Until every session has ended, or `until_s`."""
        lanes = self._workload.lanes
        if lanes is None:
            for session in self._workload.sessions:
                self._open += 1
                self.timeline.at(session.start_s, lambda session=session: self._start(session))  # type: ignore[misc]
            self._waiting.clear()
        else:
            for session in list(self._waiting)[:lanes]:
                self._waiting.popleft()
                self._open += 1
                start_s = session.start_s
                self.timeline.at(start_s, lambda session=session: self._start(session))  # type: ignore[misc]
        seen = 0

        def stop() -> bool:
            nonlocal seen
            if progress is not None and len(self.records) - seen >= 64:
                seen = len(self.records)
                progress(seen)
            return not self._open and not self._waiting

        with uncollected():
            self.timeline.run(until_s, stop=stop)
        finished = not self._open and not self._waiting
        self.between.close()
        return Run(
            self.records,
            self.cluster,
            self.router,
            self.timeline.now_s,
            finished,
            self.between,
            self._spans,
        )

    # sessions

    def _start(
        self,
        session: Session,
        content: Content | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        inherited = 0 if content is None else content.tokens
        if content is None:
            content = Content(self.cluster.spec.block_tokens, tenant=session.tenant)
            content.extend(session.prefix, session.prefix_tokens)
        self._spans[session.name] = (self.timeline.now_s, math.inf)
        self._ask(_Running(session, content, inherited=inherited, ended=ended))

    def _ask(self, running: _Running) -> None:
        session, number = running.session, running.turn
        turn = session.turns[number]
        before = running.content.tokens
        content = self._context(running, turn)
        prompt_tokens = content.tokens
        tenant = session.tenant
        record = Record(
            session.name,
            number,
            self.timeline.now_s,
            prompt_tokens,
            prompt_tokens - min(before, prompt_tokens) if number else prompt_tokens,
            tenant=tenant,
            child=session.child,
            cached_ideally=self._ideal(content),
        )
        self.records.append(record)
        with_answer = content.copy()
        with_answer.extend(session.text + 2 * number + 1, turn.output_tokens)
        made = turn.output_tokens
        if turn.aborted_after is not None:
            made, record.aborted = turn.aborted_after, True
        fronts = self._fronts(running, content)
        if not number:
            self.router.insight.started(fronts, now_s=self.timeline.now_s)

        def go() -> None:
            # a client that leaves ends its answer there: the same as a shorter one
            job = Job(
                self._view(running, turn, prompt_tokens),
                with_answer.keys,
                made,
                record,
                began=lambda: None,
                ended=lambda: self._answered(running, turn, content, with_answer, job),
                fronts=fronts,
            )
            self._hint(running, HintKind.ACTIVE, content.keys)
            self.dispatch.submit(job)

        self.between.asked(
            session.name.encode(),
            session.tenant,
            tokens=with_answer.tokens,
            urgency=_urgency(session),
            continues=bool(number) or session.child,
            go=go,
        )

    def _fronts(self, running: _Running, content: Content) -> tuple[Front, ...]:
        """What others may have in common with it: the system prompt, and a parent's history."""
        size, session = self.cluster.spec.block_tokens, running.session
        blocks = sorted({session.prefix_tokens // size, running.inherited // size} - {0})
        return tuple((n * size, content.keys[n - 1]) for n in blocks if n <= len(content.keys))

    def _context(self, running: _Running, turn: Turn) -> Content:
        session, number = running.session, running.turn
        if session.contexts:
            content = Content(self.cluster.spec.block_tokens, tenant=session.tenant)
            for text, tokens in session.contexts[number]:
                content.extend(text, tokens)
            return content
        content = running.content
        if turn.keep_tokens is not None and turn.keep_tokens < content.tokens:
            content = Content(self.cluster.spec.block_tokens, tenant=session.tenant)
            kept = min(session.prefix_tokens, turn.keep_tokens)
            content.extend(session.prefix, kept)
            # a summary takes the place of what was said
            content.extend(session.text + (1 << 15) + number, turn.keep_tokens - kept)
            self._hint(running, HintKind.COMPACTED, running.content.keys)
        content.extend(session.text + 2 * number, turn.append_tokens)
        running.content = content
        return content

    def _view(self, running: _Running, turn: Turn, prompt_tokens: int) -> RequestView:
        session = running.session
        now_s = self.timeline.now_s
        moved_s = running.moved_s
        return RequestView(
            prompt_tokens=prompt_tokens,
            max_tokens=max(min(16_384, self.cluster.spec.max_context_tokens - prompt_tokens), 1),
            session=session.name.encode(),
            owners=running.owners,
            tenant=session.tenant,
            urgency=_urgency(session),
            starts_session=running.turn == 0 and not session.child,
            phase=Phase.TOOL if turn.pause is Pause.TOOL else Phase.FINAL,
            moved_ago_s=None if moved_s is None else now_s - moved_s,
        )

    def _answered(
        self, running: _Running, turn: Turn, content: Content, with_answer: Content, job: Job
    ) -> None:
        """The turn is over. `with_answer` is the context with all of its answer."""
        session, number = running.session, running.turn
        record = job.record
        if record.refused is None:
            if job.output_tokens == turn.output_tokens:
                content.become(with_answer)
            else:
                content.extend(session.text + 2 * number + 1, job.output_tokens)
            known = self._ideal(content) // content.block_tokens
            self._computed.update(content.keys[known:])
            plan = job.plan
            if plan is not None:
                if running.owners and plan.decode not in running.owners:
                    running.moved_s = self.timeline.now_s
                running.owners, running.served = plan.workers, plan.decode
        running.turn += 1
        if running.turn == len(session.turns) or record.refused is not None:
            self._end(running)
            return
        running.children = len(turn.children) + 1
        self._pause(running, turn, content)

        def one_done() -> None:
            running.children -= 1
            if not running.children:
                self._ask(running)

        self.timeline.after(turn.pause_s, one_done)
        for child in turn.children:
            inherited = _inherit(child, session)
            self._hint(running, HintKind.FORKED, content.keys, child=inherited.name.encode())
            self._start(inherited, content.copy(), one_done)

    def _pause(self, running: _Running, turn: Turn, content: Content) -> None:
        """The session's tools run, or a person thinks."""
        expected_s = None
        if self._features.expected_pauses and turn.pause is Pause.TOOL:
            expected_s = log_normal(self._expected, max(turn.pause_s, 1e-3), EXPECTED_SIGMA)
        self._hint(running, HintKind.PAUSED, expected_s=expected_s)

        def moved(worker: str) -> None:
            running.owners, running.served = (worker,), worker
            running.moved_s = self.timeline.now_s

        away = self._away(running, content, moved)
        away.expected_s = expected_s
        away.tool = HUMAN if turn.pause is Pause.HUMAN else "tool"
        # subagents go on from what their parent has: it stays where it is while they run
        self.between.paused(away, shared=bool(turn.children))

    def _away(self, running: _Running, content: Content, moved: Callable[[str], None]) -> Away:
        session, size = running.session, self.cluster.spec.block_tokens
        others = max(session.prefix_tokens, running.inherited)
        return Away(
            session.name.encode(),
            session.tenant,
            "tool",
            content,
            -(-others // size),
            running.served,
            self.timeline.now_s,
            running.turn,
            running.moved_s,
            moved,
        )

    def _end(self, running: _Running) -> None:
        session = running.session
        self.between.ended(self._away(running, running.content, lambda _worker: None))
        start_s, _ = self._spans[session.name]
        self._spans[session.name] = (start_s, self.timeline.now_s)
        self._hint(running, HintKind.ENDED)
        if running.ended is not None:
            running.ended()
            return
        self._open -= 1
        if self._waiting:
            session = self._waiting.popleft()
            self._open += 1
            self.timeline.after(0.0, lambda: self._start(session))

    def _ideal(self, content: Content) -> int:
        """Tokens that any cache could have: of all that was ever computed, the leading run."""
        keys, low, high = content.keys, 0, len(content.keys)
        while low < high:  # a chain's keys are known up to some block and unknown after it
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._computed:
                low = middle
            else:
                high = middle - 1
        return low * content.block_tokens

    def _hint(
        self,
        running: _Running,
        kind: HintKind,
        keys: Sequence[bytes] = (),
        *,
        expected_s: float | None = None,
        child: bytes = b"",
    ) -> None:
        if self._features.hints:
            session = running.session
            name = session.name.encode()
            told = Hint(session.tenant, name, kind, keys, expected_s, child)
            for pool in self.cluster.pools.values():
                pool.hint(told, now_s=self.timeline.now_s)

    # the cluster

    def _check(self, event: ClusterEvent) -> None:
        known = event.kind in ("add", "link") or event.target in self.cluster.workers
        if not known:
            raise ConfigError(
                f"event {event.kind} at {event.at_s} s: no worker {event.target!r}; there are "
                f"{', '.join(self.cluster.workers)}"
            )

    def _happen(self, event: ClusterEvent) -> None:
        workers, target = self.cluster.workers, event.target
        match event.kind:
            case "fail":
                lost = workers[target].fail()
                self._lose(target)
                self.dispatch.failed(lost)
            case "recover":
                if workers[target].failed:
                    self.cluster.restart(target)
                    self.router.find(target)
            case "drain" | "resume":
                workers[target].draining = event.kind == "drain"
                if event.kind == "drain":
                    self.between.drained(target)
            case "add":
                self.cluster.add(target, event.role)
                self.router.find(target)
            case "remove":
                lost = workers[target].fail()
                self.cluster.remove(target)
                self._lose(target)
                self.router.ledger.forget(target)
                self.dispatch.failed(lost)
            case "link":
                self.cluster.scale_link(target, event.factor)

    def _lose(self, worker: str) -> None:
        self.between.lost(worker)
        self.router.lose(worker)


def _urgency(session: Session) -> RequestClass:
    return RequestClass.BACKGROUND if session.background else RequestClass.INTERACTIVE


def _inherit(child: Session, parent: Session) -> Session:
    """A subagent is of its parent's tenant."""
    return replace(
        child,
        tenant=parent.tenant,
        prefix=parent.prefix,
        prefix_tokens=parent.prefix_tokens,
        background=parent.background,
        child=True,
    )
