"""One simulated worker: the production scheduler and blocks, in a shell that waits instead of
computing. Pure.

What is around the scheduler in production is done here over virtual time, in the same order.
Whoever changes its state first calls `touch`, which ends a fast-forward with the step under way.
"""

import dataclasses
import math
from collections.abc import Sequence

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.plan import Sampled, StepPlan
from kimi_runtime.engine.request import Request
from kimi_runtime.engine.scheduler import Scheduler, SchedulerLimits, SealedBlock
from kimi_runtime.sim.links import Links
from kimi_runtime.sim.pool import KEPT_EVENTS, SimPool
from kimi_runtime.sim.reading import Reader
from kimi_runtime.sim.storing import Writer
from kimi_runtime.sim.timeline import Timeline, Timer
from kimi_runtime.sim.timing import StepTiming
from kimi_runtime.sim.window import Window
from kimi_runtime.sim.work import Work
from kimi_runtime.spec.sizes import state_bytes
from kimi_runtime.spec.worker import LoadReport, Role
from kimi_runtime.umbp.feed import FeedLog

PAUSE_BINS = 20
"""Per doubling, of the histogram of pauses between tokens."""
LEAST_WINDOW = 2
"""Steps; fewer are not worth a window."""


class SimWorker:
    """A worker on the timeline. `slowness` multiplies all that its timing says.

    With `fast`, unchanged decode batches are fast-forwarded: the same result, sooner.
    """

    def __init__(
        self,
        name: str,
        timing: StepTiming,
        limits: SchedulerLimits,
        total_blocks: int,
        *,
        role: Role,
        node: str,
        timeline: Timeline,
        links: Links,
        pool: SimPool | None,
        slowness: float = 1.0,
        fast: bool = True,
        epoch: int = 1,
    ) -> None:
        self.name, self.role, self.node, self.timing = name, role, node, timing
        self.timeline, self.slowness, self.fast, self.epoch = timeline, slowness, fast, epoch
        self.feed = FeedLog(
            name,
            epoch=epoch,
            tier="hbm",
            block_tokens=limits.block_tokens,
            keep_events=KEPT_EVENTS,
        )
        self.blocks = KvBlocks(total_blocks, self.feed)
        self.scheduler = Scheduler(self.blocks, limits, tables=False)
        self.work: dict[int, Work] = {}
        self.pauses: dict[int, int] = {}
        """Tokens by the logarithm of how long after the one before they came."""
        self.steps, self.busy_s = 0, 0.0
        self.draining = self.failed = False
        self.last_request = ""
        self.last_step = (0, 0)
        """Rows that generated in the newest step, and the tokens they held."""
        self.reader = Reader(
            name,
            self.scheduler,
            token_bytes=timing.kv_token_bytes,
            state_bytes=state_bytes(timing.model),
            timeline=timeline,
            links=links,
            pool=pool,
            touch=self.touch,
            schedule=self._schedule,
            brought=self._offer,
        )
        self.writer = None
        if pool is not None:
            self.writer = Writer(
                name,
                self.blocks,
                pool,
                block_bytes=limits.block_tokens * timing.kv_token_bytes,
                timeline=timeline,
                links=links,
                sync=self._before_release,
                freed=self._freed,
            )
        self._running: Timer | None = None
        self._wake: Timer | None = None
        self._window: Window | None = None
        self._settled = False
        """Whoever waits was tried by the newest plan, and nothing has changed since."""
        self._works: list[Work] = []
        """Whose steps the window is."""
        self._reports = 0

    def arrive(self, work: Work) -> None:
        """A request is here: it is read for, then computed."""
        self.touch()
        self.work[work.request.number] = work
        self.reader.begin(work)
        self._kick()

    def leave(self, work: Work) -> None:
        """The request, or its computed prompt, is not wanted any more: all of it goes back."""
        if work.left:
            return
        self.touch()
        work.left = True
        self.work.pop(work.request.number, None)
        self.reader.stop(work)
        self.scheduler.remove(work.request)
        self._freed()

    def fail(self) -> list[Work]:
        """The process is gone with all it held; what it was working on."""
        self.sync()
        lost, self.work = list(self.work.values()), {}
        self.failed = True
        for work in lost:
            work.left = True
            self.reader.stop(work)
        if self.writer is not None:
            self.writer.stop()
        for timer in (self._running, self._wake):
            if timer is not None:
                timer.cancel()
        self._running = self._wake = self._window = None
        return lost

    def lend(self, keys: Sequence[bytes]) -> list[int]:
        """Keep the leading run of `keys` that is here until it is given back; its blocks."""
        self.touch()
        stateful = self.scheduler.limits.checkpoints is not None
        return [] if self.failed or stateful else self.blocks.acquire(keys)

    def give_back(self, lent: Sequence[int]) -> None:
        """What was lent is read."""
        if not self.failed:
            self._before_release()
            self.blocks.release(lent)
            self._freed()

    def sync(self) -> None:
        """Bring everything up to now, so that it can be looked at."""
        if self._window is not None:
            self._advance(self._window, self._window.over_by(self.timeline.now_s))

    def _before_release(self) -> None:
        """Before blocks are given back: that may let somebody start with the next step."""
        if self.scheduler.waiting:
            self.touch()
        else:
            self.sync()

    def touch(self) -> None:
        """Before a change: end a window. The step under way stays as it was planned."""
        self.sync()
        self._settled = False
        window = self._window
        if window is None:
            return
        self._window = None
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        seconds = window.step_s(window.done)
        if window.done >= window.steps:
            window.settle()
            self._step()
        elif self.scheduler.waiting:
            window.settle()
            plan = self.scheduler.plan()  # the window has taken its blocks, so this only notes it
            self._run(plan, seconds, until_s=window.ends_s(window.done + 1))
        else:
            self._close(window, seconds)

    def report(self) -> LoadReport:
        """`GET /load`."""
        self.sync()
        self._reports += 1
        scheduler, unclaimed = self.scheduler, self.reader.unclaimed
        decoding = self._window is not None and not scheduler.waiting  # nobody has more to compute
        reading = [work.request for work in self.work.values() if work.scheduled_s is None]
        return LoadReport(
            epoch=self.epoch,
            seq=self._reports,
            waiting=scheduler.waiting + len(reading),
            running=scheduler.running,
            queued_tokens=(0 if decoding else scheduler.queued_tokens)
            + sum(one.to_compute for one in reading),
            free_blocks=max(unclaimed, 0),
            short_blocks=max(-unclaimed, 0),
            total_blocks=self.blocks.total,
            steps=self.steps,
            last_request={"router": self.last_request} if self.last_request else {},
            in_flight={"router": len(self.work)},
            draining=self.draining,
        )

    def check_integrity(self) -> None:
        """AssertionError unless every block is accounted for by exactly who holds it."""
        self.sync()
        requests = (work.request for work in self.work.values())
        everybody = dict.fromkeys((*requests, *self.scheduler.requests()))
        holders: list[Sequence[int]] = [request.blocks for request in everybody]
        holders += [work.blocks for work in self.work.values()]
        holders += [] if self.writer is None else self.writer.holders()
        self.blocks.check_integrity(holders)

    def _schedule(self, work: Work) -> None:
        work.scheduled_s = self.timeline.now_s
        self.scheduler.add(work.request)
        self._kick()

    def _freed(self) -> None:
        """Blocks were given back outside a step."""
        if self.reader.waiting:
            self.touch()
            self.reader.retry()
        self._kick()

    def _kick(self) -> None:
        """Who idles looks for work, once all that happens now has happened."""
        idle = self._running is None and self._wake is None and self._window is None
        if idle and not self.failed:
            self._wake = self.timeline.after(0.0, self._woken)

    def _woken(self) -> None:
        self._wake = None
        if self._running is None:
            self._step()

    def _step(self) -> None:
        plan = self.scheduler.plan()
        self._settled = True
        self._tell_completed()
        if plan.rows:
            seconds = self._seconds(plan)
            self._run(plan, seconds, until_s=self.timeline.now_s + seconds)

    def _run(self, plan: StepPlan, seconds: float, *, until_s: float) -> None:
        self.busy_s += seconds
        self._running = self.timeline.at(until_s, lambda: self._stepped(plan, seconds))

    def _close(self, window: Window, seconds: float) -> None:
        """The step of a window that is under way is its last one."""
        self.scheduler.begin_decodes()
        window.steps = window.done + 1
        works, self._works = self._works, []
        self.busy_s += seconds
        ends_s = window.ends_s(window.steps)
        self._running = self.timeline.at(ends_s, lambda: self._closed(window, works, seconds))

    def _closed(self, window: Window, works: list[Work], seconds: float) -> None:
        self._running = None
        self.steps += 1
        sealed = window.advance(window.steps)
        window.settle()
        self.scheduler.end_decodes()
        self._settled = self._settled and not sealed
        self._offer(sealed)
        waited = 0
        for work in works:
            if not work.left:
                work.made += 1
                waited += 1
        self._over(seconds, waited)

    def _seconds(self, plan: StepPlan) -> float:
        rows, held, new, pairs, handed_over = 0, 0, 0, 0.0, 0
        for row in plan.rows:
            work, count = self.work.get(row.request), len(row.ids)
            if work is not None and work.made and count == 1:
                rows, held = rows + 1, held + row.start
                continue
            if work is not None and work.computing_s is None:
                work.computing_s = self.timeline.now_s
            new, pairs = new + count, pairs + count * (row.start + count / 2)
            if work is not None and not work.output_tokens:
                handed_over += row.start + count == len(work.request.tokens)
        self.last_step = (rows, held)
        seconds = self.timing.step_s(rows, held, new, pairs)
        return self.slowness * (seconds + handed_over * self.timing.constants.prompt_s)

    def _stepped(self, plan: StepPlan, seconds: float) -> None:
        self._running = None
        self.steps += 1
        sampled = [Sampled(row.request, 0) for row in plan.rows if row.sample]
        sealed = self.scheduler.commit(plan, sampled)
        self._settled = self._settled and not sealed
        self._offer(sealed)
        if self.scheduler.limits.checkpoints is not None:
            for row in plan.rows:
                if row.keep_state and (work := self.work.get(row.request)) is not None:
                    self._keep_state(work.request, row.start + len(row.ids))
        waited = 0
        for drawn in sampled:
            work = self.work.get(drawn.request)
            if work is not None:
                waited += work.made > 0
                work.made += 1
                if work.made == 1 or work.made == work.output_tokens:
                    self._made(work)
        self._over(seconds, waited)

    def _over(self, seconds: float, waited: int) -> None:
        """A step is over, in which so many answers had to wait for their next token."""
        self._pause(seconds, waited)
        self._tell_completed()
        self.reader.retry()
        if self._running is None and self._wake is None and not self.failed:
            self._go_on()

    def _made(self, work: Work) -> None:
        """Its first token is there, or its last."""
        if work.made == work.output_tokens:
            work.left, self._settled = True, False
            del self.work[work.request.number]
            if self.scheduler.limits.checkpoints is not None:
                size = work.request.chain.block_tokens
                self._keep_state(work.request, work.request.computed // size * size)
            self.scheduler.remove(work.request)
        if work.made == 1:
            work.began()
        if work.made == work.output_tokens:
            work.ended()

    def _tell_completed(self) -> None:
        for request in self.scheduler.take_completed():
            work = self.work.get(request.number)
            if work is not None:
                work.began()

    def _offer(self, sealed: list[SealedBlock]) -> None:
        if self.writer is not None and sealed:
            self.writer.offer(sealed)

    def _keep_state(self, request: Request, end: int) -> None:
        """Of a prompt, or of an answer that is over: while one grows only its newest would be."""
        answering = end > request.prompt_tokens
        if self.writer is not None and (not answering or request.number not in self.work):
            keys = request.chain.keys[: end // request.chain.block_tokens]
            self.writer.offer_state(keys, request.tenant)

    def _pause(self, seconds: float, tokens: int) -> None:
        if tokens:
            step = round(PAUSE_BINS * math.log2(max(seconds, 1e-6)))
            self.pauses[step] = self.pauses.get(step, 0) + tokens

    def _go_on(self) -> None:
        """The next step, or many at once."""
        window = self._calm() if self.fast else None
        if window is None:
            self._step()
            return
        self._window = window
        window.advance(0)
        self._watch(window)

    def _calm(self) -> Window | None:
        """A window, if for some steps nothing but decoding happens."""
        scheduler = self.scheduler
        running = scheduler.running
        somebody_waits = scheduler.waiting > 0 or self.reader.waiting
        if not running or (somebody_waits and not self._settled):
            return None
        if running > scheduler.limits.step_tokens:
            return None
        waiting: set[int] = set()
        if scheduler.waiting:
            waiting.update(one.number for one in scheduler.requests()[: scheduler.waiting])
        works: list[Work] = []
        steps = scheduler.limits.max_context_tokens
        for number, work in reversed(self.work.items()):  # who came last may be computing yet
            if work.scheduled_s is None or number in waiting:
                continue
            if not work.made or work.request.lacking != 1:
                return None
            works.append(work)
            steps = min(steps, work.output_tokens - work.made - 1)
        if len(works) != running or steps < LEAST_WINDOW:
            return None
        works.sort(key=_rank)
        window = Window.of(
            [work.request for work in works],
            self.blocks,
            self.timing,
            slowness=self.slowness,
            start_s=self.timeline.now_s,
            steps=steps,
        )
        if window.taken > self.blocks.available:
            return None
        if somebody_waits:
            # a block that is filled may be what somebody who waits can begin with
            window = dataclasses.replace(window, steps=window.next_seal())
            if window.steps < LEAST_WINDOW:
                return None
        self._works = works
        return window

    def _watch(self, window: Window) -> None:
        """Look again when a block is filled that the pool is to have, or at the window's end."""
        stop = window.steps if self.writer is None else window.next_seal()
        self._wake = self.timeline.at(window.ends_s(stop), lambda: self._look(window, stop))

    def _look(self, window: Window, stop: int) -> None:
        self._wake = None
        self._advance(window, stop)
        if stop >= window.steps:
            window.settle()
            self._window = None
            self._go_on()
        else:
            self._watch(window)

    def _advance(self, window: Window, done: int) -> None:
        """So many steps of the window are over."""
        before = window.done
        if done <= before:
            return
        sealed = window.advance(done)
        self._settled = self._settled and not sealed
        count, rows = done - before, len(window.requests)
        self.last_step = (rows, window.held)
        seconds = window.ends_s(done) - window.ends_s(before)
        self.steps += count
        self.busy_s += seconds
        self._pause(seconds / count, rows * count)
        for work in self._works:
            work.made += count
        self._offer(sealed)


def _rank(work: Work) -> tuple[float, int]:
    request: Request = work.request
    return request.rank, request.number
