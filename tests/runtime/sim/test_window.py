"""Fast-forwarding unchanged decode batches gives what stepping gives."""

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_runtime.engine.request import Request
from kimi_runtime.engine.scheduler import SchedulerLimits
from kimi_runtime.sim.content import Content, KnownChain
from kimi_runtime.sim.fit import fitted_constants
from kimi_runtime.sim.links import Links
from kimi_runtime.sim.pool import SimPool
from kimi_runtime.sim.timeline import Timeline
from kimi_runtime.sim.timing import timing_of
from kimi_runtime.sim.work import Work
from kimi_runtime.sim.worker import SimWorker
from kimi_runtime.spec.worker import Role

BLOCK = 8
TIMING = timing_of("kimi-k2.6", "MI355X", tensor=4, constants=fitted_constants())


@dataclass(frozen=True)
class Ask:
    """One request: what it says, and when it comes and leaves."""

    at_s: float
    text: int
    prompt: int
    output: int
    leaves_after_s: float | None
    lent_for_s: float | None = None
    """A peer reads what is here of the text, from half a second later on."""


@dataclass
class Seen:
    """What a run of a worker showed."""

    times: list[tuple[str, int, float]] = field(default_factory=list)
    feed: list[tuple[str, str | None]] = field(default_factory=list)
    counters: tuple[int, ...] = ()


asks = st.lists(
    st.builds(
        Ask,
        at_s=st.floats(0, 1.5),
        text=st.integers(1, 3),
        prompt=st.integers(1, 60),
        output=st.integers(1, 70),
        leaves_after_s=st.none() | st.floats(0.01, 1),
        lent_for_s=st.none() | st.floats(0.01, 1),
    ),
    min_size=1,
    max_size=8,
)


def simulated(asked: list[Ask], *, blocks: int, pooled: bool, fast: bool) -> Seen:
    """Run them on one worker."""
    seen, timeline = Seen(), Timeline()
    links = Links(timeline, {"w/host": 63e9})
    size = BLOCK * TIMING.kv_token_bytes
    pool = SimPool("n", "n", 16, size, 1e-11) if pooled else None
    limits = SchedulerLimits(BLOCK, 64, 6, 64, 4096)
    worker = SimWorker(
        "w",
        TIMING,
        limits,
        blocks,
        role=Role.BOTH,
        node="n",
        timeline=timeline,
        links=links,
        pool=pool,
        fast=fast,
    )

    def ask(number: int, one: Ask) -> None:
        content = Content(BLOCK)
        content.extend(one.text, one.prompt)
        whole = content.copy()
        whole.extend(100 + number, one.output)
        request = Request(number, [0] * one.prompt, KnownChain(whole.keys, BLOCK), one.at_s)
        work = Work(
            request,
            one.output,
            began=lambda: seen.times.append(("began", number, timeline.now_s)),
            ended=lambda: seen.times.append(("ended", number, timeline.now_s)),
        )
        worker.arrive(work)
        if one.leaves_after_s is not None:
            timeline.after(one.leaves_after_s, lambda: worker.leave(work))

    def lend(one: Ask) -> None:
        content = Content(BLOCK)
        content.extend(one.text, 60)
        lent = worker.lend(content.keys)
        timeline.after(one.lent_for_s or 0.0, lambda: worker.give_back(lent))

    for number, one in enumerate(asked):
        if one.lent_for_s is not None:
            timeline.at(one.at_s + 0.5, lambda one=one: lend(one))
        timeline.at(one.at_s, lambda number=number, one=one: ask(number, one))
    timeline.run()
    worker.check_integrity()
    batch = worker.feed.batch_after(0, limit=10_000)
    assert batch is not None
    seen.feed = [(event.op, event.key) for event in batch.events]
    seen.counters = (worker.steps, worker.blocks.cached, worker.scheduler.preemptions)
    assert not worker.work
    return seen


# the last prompt token of the third is a step of its own, and its first token is told
LATE_FIRST_TOKEN = [
    Ask(0.0, 1, 4, 1, None),
    Ask(0.0, 1, 51, 1, None),
    Ask(0.0, 1, 10, 3, None),
]


@settings(max_examples=60, deadline=None)
@example(asked=LATE_FIRST_TOKEN, blocks=20, pooled=False)
@given(asked=asks, blocks=st.integers(20, 60), pooled=st.booleans())
def test_fast_forwarding_equals_stepping(asked: list[Ask], blocks: int, pooled: bool):
    stepped = simulated(asked, blocks=blocks, pooled=pooled, fast=False)
    fast = simulated(asked, blocks=blocks, pooled=pooled, fast=True)
    assert fast.feed == stepped.feed
    assert fast.counters == stepped.counters
    assert [one[:2] for one in fast.times] == [one[:2] for one in stepped.times]
    for ours, theirs in zip(fast.times, stepped.times, strict=True):
        assert abs(ours[2] - theirs[2]) < 1e-9
