"""Who waits for room to read into holds nothing, is served by rank, and has it in the end."""

import dataclasses
from collections.abc import Iterable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.plan import Sampled
from kimi_runtime.engine.request import KeyChain, Request, order_of, rank_of
from kimi_runtime.engine.room import Place, RoomLine
from kimi_runtime.engine.scheduler import Scheduler, SchedulerLimits
from kimi_runtime.spec.request import Priority
from kimi_runtime.umbp.feed import FeedLog

SIZE = 4
LIMITS = SchedulerLimits(
    block_tokens=SIZE, step_tokens=16, max_running=4, max_waiting=64, max_context_tokens=64
)


class Bench:
    """A scheduler and those who read before they join its queue; nobody gives up, ever."""

    def __init__(self, blocks: int, limits: SchedulerLimits = LIMITS) -> None:
        feed = FeedLog("w", epoch=1, tier="hbm", block_tokens=SIZE)
        self.blocks = KvBlocks(blocks, feed)
        self.scheduler = Scheduler(self.blocks, limits)
        self.line = RoomLine(self.scheduler)
        self.waiting: dict[int, Place] = {}
        self.reading: dict[int, tuple[Request, list[int], int]] = {}
        self.open: dict[int, tuple[Request, int]] = {}
        self.granted: list[int] = []
        self._number = 0

    def arrive(
        self,
        prompt: list[int],
        outputs: int,
        *,
        now_s: float = 0.0,
        priority: Priority = Priority.INTERACTIVE,
        pooled: int = 64,
        ticks: int = 0,
    ) -> Request:
        """A request of which a pool has so many blocks, and brings them in so many ticks."""
        self._number += 1
        request = Request(
            number=self._number,
            tokens=list(prompt),
            chain=KeyChain(b"k", b"root", SIZE),
            rank=rank_of(priority, now_s, background_delay_s=10.0),
            priority=priority,
        )
        self.open[request.number] = request, outputs
        request.blocks = self.blocks.acquire(request.reusable_keys)
        total = min(pooled, len(request.reusable_keys))

        def grant(fresh: list[int]) -> None:
            self.waiting.pop(request.number, None)
            behind = [order_of(place.request) for place in self.waiting.values()]
            assert all(order_of(request) < other for other in behind), "somebody was passed"
            self.granted.append(request.number)
            self.reading[request.number] = request, fresh, ticks

        place = Place(request, request.reusable_keys, total, grant)
        self.waiting[request.number] = place
        self.line.enter(place)
        return request

    def tick(self) -> None:
        """What was read is there; then a step."""
        for number, (request, fresh, left) in list(self.reading.items()):
            if left:
                self.reading[number] = request, fresh, left - 1
                continue
            del self.reading[number]
            for block in fresh:
                key = request.reusable_keys[len(request.blocks)]
                request.blocks.append(self.blocks.seal(block, key))
            request.computed = len(request.blocks) * SIZE
            self.scheduler.add(request)
        self.line.retry()
        plan = self.scheduler.plan()
        self.scheduler.commit(plan, [Sampled(row.request, 7) for row in plan.rows if row.sample])
        for request, outputs in list(self.open.values()):
            if len(request.tokens) - request.prompt_tokens == outputs:
                self.scheduler.remove(request)
                del self.open[request.number]
        self.line.retry()
        self.check()

    def check(self) -> None:
        for place in self.waiting.values():
            assert not place.request.blocks, "it holds blocks while it waits"
        requests: Iterable[Request] = (request for request, _ in self.open.values())
        held = [request.blocks for request in requests]
        self.blocks.check_integrity([*held, *(fresh for _, fresh, _ in self.reading.values())])

    def finish(self, within: int = 3000) -> None:
        for _ in range(within):
            if not self.open:
                assert self.blocks.available == self.blocks.total
                return
            self.tick()
        raise AssertionError(f"{len(self.open)} requests are open after {within} ticks")


def prompt(own: int, size: int, shared: int = 0) -> list[int]:
    return ([1] * shared + [own + 2] * size)[:size]


def test_blocks_that_somebody_waits_for_are_not_said_to_be_free():
    bench = Bench(8)
    first = bench.arrive(prompt(1, 5 * SIZE), 4)
    assert bench.line.unclaimed == 8 - 4, "what it was granted to read into"
    bench.arrive(prompt(2, 6 * SIZE), 4)
    assert list(bench.waiting) == [2]
    assert bench.blocks.available > 0 > bench.line.unclaimed, "more is waited for than there is"
    while first.number in bench.open:
        bench.tick()
    bench.finish()
    assert bench.line.unclaimed == bench.blocks.total


ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 40),  # tokens of the prompt
        st.integers(0, 30),  # of which others have the same
        st.integers(1, 12),  # outputs
        st.sampled_from(Priority),
        st.integers(0, 12),  # blocks in the pool
        st.integers(0, 5),  # ticks of a read
        st.integers(0, 4),  # ticks until the next arrival
    ),
    min_size=1,
    max_size=12,
)


SHARED_WITH_WHO_IS_STRIPPED = [
    (21, 0, 2, Priority.INTERACTIVE, 5, 0, 0),
    (13, 12, 1, Priority.BACKGROUND, 3, 0, 1),
    (33, 12, 1, Priority.INTERACTIVE, 8, 0, 0),
]


@example(arrivals=SHARED_WITH_WHO_IS_STRIPPED, blocks=13, step_tokens=1, max_running=1)
@settings(max_examples=60, deadline=None)
@given(
    arrivals=ARRIVALS,
    blocks=st.integers(13, 30),
    step_tokens=st.sampled_from([1, 3, 16, 64]),
    max_running=st.integers(1, 5),
)
def test_any_mix_ends_though_nobody_ever_gives_up(arrivals, blocks, step_tokens, max_running):
    limits = dataclasses.replace(LIMITS, step_tokens=step_tokens, max_running=max_running)
    bench = Bench(blocks, limits)
    for now, (size, shared, outputs, priority, pooled, ticks, pause) in enumerate(arrivals):
        ids = prompt(now, size, shared)
        bench.arrive(ids, outputs, now_s=float(now), priority=priority, pooled=pooled, ticks=ticks)
        bench.check()
        for _ in range(pause):
            bench.tick()
    bench.finish()


@settings(max_examples=40, deadline=None)
@given(arrivals=ARRIVALS, data=st.data())
def test_leaving_while_waiting_leaves_nothing_behind(arrivals, data):
    bench = Bench(13)
    for now, (size, shared, outputs, priority, pooled, ticks, pause) in enumerate(arrivals):
        ids = prompt(now, size, shared)
        bench.arrive(ids, outputs, now_s=float(now), priority=priority, pooled=pooled, ticks=ticks)
        for _ in range(pause):
            bench.tick()
        if bench.waiting and data.draw(st.booleans()):
            number = data.draw(st.sampled_from(sorted(bench.waiting)))
            bench.line.leave(bench.waiting.pop(number))
            del bench.open[number]
            bench.line.retry()
            bench.check()
    bench.finish()


def test_a_large_read_is_not_passed_by_small_ones_that_keep_coming():
    bench = Bench(16)
    bench.arrive(prompt(0, 40), 12, pooled=0)
    bench.tick()
    large = bench.arrive(prompt(1, 50), 1, now_s=1.0)
    for now in range(40):
        bench.arrive(prompt(2 + now, 9), 4, now_s=2.0 + now)
        bench.tick()
    assert large.number in bench.granted
    assert bench.granted.index(large.number) <= 1
    bench.finish()


def test_what_a_request_has_is_lent_to_others_while_it_waits_and_taken_again():
    bench = Bench(16)
    bench.arrive(prompt(1, 24), 1, pooled=0)
    bench.finish()  # its 6 blocks stay cached
    running = bench.arrive(prompt(0, 16), 30, pooled=0)
    bench.tick()
    again = bench.arrive(prompt(1, 56), 1, now_s=1.0)
    assert not again.blocks
    assert bench.blocks.held(again.reusable_keys) == 6
    assert again.to_compute == 4
    while running.number in bench.open:
        assert again.number in bench.waiting
        bench.tick()
    assert again.number in bench.granted
    bench.finish()


def test_room_is_left_for_those_of_the_queue_who_were_there_before():
    bench = Bench(16)
    running = bench.arrive(prompt(0, 40), 8, pooled=0)
    bench.tick()
    first = bench.arrive(prompt(1, 40), 1, now_s=1.0, pooled=0)  # in the queue: it lacks 10
    bench.tick()
    small = bench.arrive(prompt(2, 9), 1, now_s=2.0)
    assert small.number in bench.waiting
    while running.number in bench.open:
        bench.tick()
    bench.tick()
    assert first.computed
    bench.finish()


def test_an_interactive_request_that_is_read_for_takes_room_from_background_work():
    bench = Bench(14)
    background = bench.arrive(prompt(0, 40), 12, priority=Priority.BACKGROUND, pooled=0)
    bench.tick()
    bench.tick()
    assert background.blocks
    urgent = bench.arrive(prompt(1, 40), 1, now_s=1.0)
    bench.tick()
    assert urgent.number in bench.granted
    assert bench.scheduler.preemptions == 1
    bench.finish()
