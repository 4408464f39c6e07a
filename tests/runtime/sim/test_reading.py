"""A worker short of memory reads what it can once there is room, and keeps nothing meanwhile."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.engine.request import Request
from kimi_runtime.engine.scheduler import SchedulerLimits
from kimi_runtime.sim.content import Content, KnownChain
from kimi_runtime.sim.fit import fitted_constants
from kimi_runtime.sim.links import Links
from kimi_runtime.sim.pool import SimPool
from kimi_runtime.sim.reading import ROOM_S
from kimi_runtime.sim.timeline import Timeline
from kimi_runtime.sim.timing import timing_of
from kimi_runtime.sim.work import Work
from kimi_runtime.sim.worker import SimWorker
from kimi_runtime.spec.worker import Role

BLOCK = 64
TIMING = timing_of("kimi-k2.6", "MI355X", tensor=4, constants=fitted_constants())
LIMITS = SchedulerLimits(
    block_tokens=BLOCK, step_tokens=512, max_running=8, max_waiting=64, max_context_tokens=8192
)


class Bench:
    """One worker and its node's pool, which has the first `pooled` blocks of every text."""

    def __init__(self, blocks: int, *, fast: bool = True, gbs: float = 1.0) -> None:
        self.timeline = Timeline()
        size = BLOCK * TIMING.kv_token_bytes
        self.links = Links(self.timeline, {"w/host": gbs * 1e9})
        self.pool = SimPool("n", "n", 4096, size, 1e-11)
        self.worker = SimWorker(
            "w",
            TIMING,
            LIMITS,
            blocks,
            role=Role.BOTH,
            node="n",
            timeline=self.timeline,
            links=self.links,
            pool=self.pool,
            fast=fast,
        )
        self.works: list[Work] = []
        self.ended: dict[int, float] = {}

    def ask(self, text: int, tokens: int, output: int, *, at_s: float, pooled: int = 0) -> Work:
        """A request; the pool has so many blocks of what it says."""
        number = len(self.works)
        content = Content(BLOCK)
        content.extend(text, tokens)
        self.pool.store(content.keys[:pooled], tenant="default", now_s=0.0)
        content.extend(1000 + number, output)
        chain = KnownChain(content.keys, BLOCK)
        request = Request(number, bytearray(tokens), chain, at_s)

        def ended() -> None:
            self.ended[number] = self.timeline.now_s

        work = Work(request, output, began=lambda: None, ended=ended)
        self.works.append(work)
        self.timeline.at(at_s, lambda: self.worker.arrive(work))
        return work

    def run(self) -> list[float]:
        """Until all is quiet: everybody has ended, and nothing is held. When each ended."""
        self.timeline.run()
        assert sorted(self.ended) == list(range(len(self.works)))
        assert self.worker.blocks.available == self.worker.blocks.total
        assert not self.pool.pool.open_pins
        return [self.ended[number] for number in range(len(self.works))]


def computed(work: Work) -> int:
    assert work.request.usage is not None
    return work.request.usage.computed_tokens


def test_what_finds_no_room_is_read_as_soon_as_there_is_some_and_not_computed():
    bench = Bench(40)
    bench.ask(1, 30 * BLOCK, 300, at_s=0.0)
    late = bench.ask(2, 31 * BLOCK, 10, at_s=1.0, pooled=30)
    first_s, late_s = bench.run()
    assert computed(late) == BLOCK
    assert first_s < late_s < first_s + 2.0


def test_a_request_that_waits_keeps_no_block_here_and_none_of_its_source():
    bench = Bench(40)
    bench.ask(2, 9 * BLOCK, 1, at_s=0.0)  # 9 blocks of it stay cached
    bench.ask(1, 30 * BLOCK, 300, at_s=1.0)
    late = bench.ask(2, 31 * BLOCK, 10, at_s=2.0, pooled=30)
    bench.timeline.run(2.5)
    assert bench.worker.reader.waiting
    assert not late.request.blocks
    assert not bench.pool.pool.open_pins
    bench.worker.check_integrity()
    bench.run()
    assert computed(late) == BLOCK


def test_who_waited_too_long_computes_with_what_is_here():
    bench = Bench(40)
    bench.ask(1, 30 * BLOCK, 600, at_s=0.0)
    bench.worker.slowness = 20.0
    late = bench.ask(2, 31 * BLOCK, 10, at_s=1.0, pooled=30)
    first_s, _ = bench.run()
    assert first_s > 1.0 + ROOM_S
    assert bench.worker.reader.late == 1
    assert computed(late) == 31 * BLOCK


ASKS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.integers(1, 31 * BLOCK),
        st.integers(1, 120),
        st.floats(0.0, 4.0),
        st.integers(0, 31),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=40, deadline=None)
@given(asks=ASKS, blocks=st.integers(36, 90), gbs=st.sampled_from([0.001, 0.1, 10.0]))
def test_any_mix_ends_and_fast_forwarding_changes_nothing(asks, blocks, gbs):
    ends = []
    for fast in (True, False):
        bench = Bench(blocks, fast=fast, gbs=gbs)
        for text, tokens, output, at_s, pooled in asks:
            bench.ask(text, tokens, output, at_s=at_s, pooled=pooled)
        ends.append(bench.run())
    for ours, theirs in zip(*ends, strict=True):
        assert abs(ours - theirs) < 1e-6
