"""The step loop: asyncio around the scheduler that decides and the runner that computes.

One step after another runs in the runner's own thread, while the loop goes on serving. Whoever
leaves, is late or fails gives everything back at once, at the latest when the step that writes to
its blocks is over.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kimi_runtime import clock
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.fetch import Fetcher
from kimi_runtime.engine.follow import HttpProgress
from kimi_runtime.engine.freed import Freed
from kimi_runtime.engine.handoff import HandOffs
from kimi_runtime.engine.landing import Landing
from kimi_runtime.engine.plan import RowsFailed, Runner, Sampled, StepPlan
from kimi_runtime.engine.releases import Releaser
from kimi_runtime.engine.sampler import NothingAllowed, RequestSampler
from kimi_runtime.engine.scheduler import Scheduler
from kimi_runtime.engine.states import KeptState, StateMemory
from kimi_runtime.engine.store import PoolWriter
from kimi_runtime.engine.stream import Stream
from kimi_runtime.errors import KimistackError, RequestError

_INTEGRITY_EVERY_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of. All share one `KvBlocks`, `Freed` and `EngineCounters`."""

    runner: Runner
    scheduler: Scheduler
    fetcher: Fetcher
    landing: Landing
    freed: Freed
    counters: EngineCounters
    hand_offs: HandOffs | None = None
    progress: HttpProgress | None = None
    releaser: Releaser | None = None
    writer: PoolWriter | None = None
    states: StateMemory | None = None


class StepLoop:
    """Computes steps for the streams that were entered, as long as `run` runs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._scheduler, self._counters = parts.scheduler, parts.counters
        self._streams: dict[int, Stream] = {}
        self._stepping: frozenset[int] = frozenset()
        """Requests that the runner's thread computes just now."""
        self._wake = parts.freed.steps
        self._closed = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._checked_s = clock.now_s()

    @property
    def streams(self) -> list[Stream]:
        """Everybody who has entered and not left."""
        return list(self._streams.values())

    def enter(self, stream: Stream) -> None:
        """Account for a request that is not scheduled yet."""
        self._streams[stream.request.number] = stream

    def schedule(self, stream: Stream) -> None:
        """Compute the request from now on."""
        stream.scheduled, stream.prepared_s = True, clock.now_s()
        self._scheduler.add(stream.request)
        self._wake.set()

    def leave(self, stream: Stream) -> None:
        """Give back all that the request holds; may be called again."""
        if self._streams.pop(stream.request.number, None) is not None:
            self._scheduler.remove(stream.request)
            if self._parts.writer is not None and stream.last_state is not None:
                self._parts.writer.offer_state(stream.last_state)
            if self._parts.states is not None and stream.request.number not in self._stepping:
                self._parts.states.drop(stream.request.number)
            self._parts.freed()

    async def aclose(self) -> None:
        """End `run` after the step it is in."""
        self._closed.set()
        self._wake.set()
        await self._ended.wait()

    async def run(self) -> None:
        """Compute steps until `aclose`. Raises what is our own bug; a failed step is not."""
        self._ended.clear()
        parts = self._parts
        thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(part.run(), name=type(part).__name__)
                    for part in (parts.hand_offs, parts.progress, parts.releaser, parts.writer)
                    if part is not None
                ]
                await self._compute_steps(thread)
                for task in beside:
                    task.cancel()
        finally:
            thread.shutdown()  # a step must not outlive the memory it writes to
            if parts.hand_offs is not None:
                parts.hand_offs.end_all()
            if parts.writer is not None:
                parts.writer.drop_all()
            self._ended.set()

    def check_integrity(self) -> None:
        """AssertionError unless every block is accounted for by exactly who holds it."""
        parts = self._parts
        requests = [stream.request for stream in self._streams.values()]
        everybody = dict.fromkeys((*requests, *self._scheduler.requests()))
        holders: list[Sequence[int]] = [request.blocks for request in everybody]
        holders.extend(parts.landing.holders())
        holders.extend(parts.hand_offs.holders() if parts.hand_offs is not None else ())
        holders.extend(parts.writer.holders() if parts.writer is not None else ())
        self._scheduler.blocks.check_integrity(holders)

    async def _compute_steps(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while not self._closed.is_set():
            self._wake.clear()
            plan = self._scheduler.plan()
            self._withdraw_preempted()
            self._tell_completed()
            if not plan.rows:
                self._check_now_and_then()
                await self._wake.wait()
                continue
            for row in plan.rows:
                if (stream := self._streams.get(row.request)) is not None:
                    stream.begin()
            samplers = self._samplers(plan)
            compute = partial(self._compute, group_done=self._group_watch(plan, loop))
            start_s = clock.now_s()
            self._stepping = frozenset(row.request for row in plan.rows)
            sampled, failures = await loop.run_in_executor(thread, compute, plan, samplers)
            self._stepping = frozenset()
            rows = ((row.start, len(row.ids)) for row in plan.rows)
            self._parts.fetcher.pace.step(rows, clock.now_s() - start_s)
            self._take_in(plan, sampled, failures)

    def _group_watch(
        self, plan: StepPlan, loop: asyncio.AbstractEventLoop
    ) -> Callable[[int], None] | None:
        """What the runner's thread calls after each layer group; None if no row is to be followed.

        A ticket is told once the first step runs, so that there may be none yet.
        """
        hand_offs = self._parts.hand_offs
        if hand_offs is None:
            return None
        followed = [
            (stream.request, row)
            for row in plan.rows
            if (stream := self._streams.get(row.request)) is not None and stream.asked.kv.early
        ]

        def tell(group: int) -> None:
            for request, row in followed:
                hand_offs.group_done(request, row, group)

        def group_done(group: int) -> None:
            loop.call_soon_threadsafe(tell, group)

        return group_done if followed else None

    def _samplers(self, plan: StepPlan) -> dict[int, RequestSampler]:
        streams = (self._streams.get(row.request) for row in plan.rows if row.sample)
        return {
            stream.request.number: stream.sampler
            for stream in streams
            if stream is not None and stream.sampler is not None
        }

    def _compute(
        self,
        plan: StepPlan,
        samplers: Mapping[int, RequestSampler],
        *,
        group_done: Callable[[int], None] | None = None,
    ) -> tuple[list[Sampled], dict[int, Exception]]:
        """Run the plan in the runner's thread; if it breaks, each row alone, to find whose fault
        it is: rows are independent, and computing one again writes the same bytes. Not so a state,
        which may have gone on already.
        """
        try:
            return list(self._parts.runner.run(plan, samplers, group_done=group_done)), {}
        except RowsFailed as exc:
            return list(exc.sampled), dict(exc.errors)
        except Exception as exc:
            self._counters.failed_steps += 1
            _log.exception("a step of %d rows failed", len(plan.rows))
            if len(plan.rows) == 1 or self._parts.states is not None:
                return [], {row.request: exc for row in plan.rows}
        sampled: list[Sampled] = []
        failures: dict[int, Exception] = {}
        for row in plan.rows:
            drawn, failed = self._compute(StepPlan((row,)), samplers)
            sampled.extend(drawn)
            failures.update(failed)
        return sampled, failures

    def _take_in(
        self, plan: StepPlan, sampled: Sequence[Sampled], failures: Mapping[int, Exception]
    ) -> None:
        """Tell the scheduler and the streams what a step brought."""
        self._counters.steps += 1
        self._counters.step_tokens += plan.tokens
        sealed = self._scheduler.commit(plan, sampled, failures)
        if self._parts.writer is not None:
            self._parts.writer.offer(sealed)
        if self._parts.states is not None:
            self._keep_states(plan, self._parts.states, failures)
        for number, exc in failures.items():
            if (stream := self._streams.get(number)) is not None:
                self._fail(stream, exc)
        for drawn in sampled:
            if (stream := self._streams.get(drawn.request)) is not None:
                self._push(stream, drawn)
        for row in plan.rows:
            if (stream := self._streams.get(row.request)) is not None:
                self._count_prompt(stream)
                if self._parts.hand_offs is not None:
                    self._parts.hand_offs.advance(stream.request)
        self._tell_completed()
        self._parts.freed()

    def _keep_states(
        self, plan: StepPlan, states: StateMemory, failures: Mapping[int, Exception]
    ) -> None:
        """Copy the states that are worth it. While an answer grows only the newest is: it goes to
        the pool when the turn ends.
        """
        for row in plan.rows:
            stream = self._streams.get(row.request)
            if stream is None:
                states.drop(row.request)  # it left while the step ran
            if stream is None or not row.keep_state or row.request in failures:
                continue
            request, end = stream.request, row.start + len(row.ids)
            keys = tuple(request.chain.keys[: end // request.chain.block_tokens])
            kept = KeptState(keys, bytes(states.state(row.request)), request.tenant)
            if end > request.prompt_tokens:
                stream.last_state = kept
            elif self._parts.writer is not None:
                self._parts.writer.offer_state(kept)

    def _push(self, stream: Stream, drawn: Sampled) -> None:
        self._counters.output_tokens += 1
        try:
            finish = stream.push(drawn)
        except Exception as exc:
            _log.exception("request %s could not take in id %d", stream.asked.request_id, drawn.id)
            self._fail(stream, exc)
            finish = None
        if finish is not None or stream.failure is not None:
            self._scheduler.remove(stream.request)

    def _fail(self, stream: Stream, exc: Exception) -> None:
        """End the request. Unless it is its own fault, the KV it was computed from is suspect:
        what shares it would fail as well, again and again.
        """
        stream.fail(_failure_of(stream, exc))
        if not isinstance(exc, RequestError | NothingAllowed):
            self._parts.fetcher.distrust(stream.request.chain.keys)

    def _withdraw_preempted(self) -> None:
        """A ticket pins blocks for as long as its prompt is computed, and a prompt that was
        preempted may wait for who needs these: its reader computes the rest.
        """
        for request in self._scheduler.take_preempted():
            stream, hand_offs = self._streams.get(request.number), self._parts.hand_offs
            if stream is not None and stream.told_early and hand_offs is not None:
                hand_offs.abandon(request, failed=False)
                stream.stop()

    def _tell_completed(self) -> None:
        for request in self._scheduler.take_completed():
            if (stream := self._streams.get(request.number)) is not None:
                self._count_prompt(stream)
                stream.complete()

    def _count_prompt(self, stream: Stream) -> None:
        if not stream.prompt_counted and stream.request.usage is not None:
            stream.prompt_counted = True
            self._counters.count_prompt(stream.request.usage)

    def _check_now_and_then(self) -> None:
        """Idle: time to see that no block was lost."""
        if clock.now_s() - self._checked_s > _INTEGRITY_EVERY_S:
            self._checked_s = clock.now_s()
            self.check_integrity()


def _failure_of(stream: Stream, exc: Exception) -> KimistackError:
    """What the caller is told; the log has the rest."""
    if isinstance(exc, KimistackError):
        return exc
    return KimistackError(
        f"the step that computed request {stream.asked.request_id} failed "
        f"({type(exc).__name__}); see this worker's log, then send the request again"
    )
