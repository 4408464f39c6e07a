"""The scheduler keeps its budget, its books and its promise that everybody's turn comes."""

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hash_runner import HashRunner
from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.plan import Row, StepPlan
from kimi_runtime.engine.request import KeyChain, Request, rank_of
from kimi_runtime.engine.scheduler import Scheduler, SchedulerLimits
from kimi_runtime.errors import CapacityError, Overloaded, RequestError
from kimi_runtime.spec.request import Priority
from kimi_runtime.umbp.feed import FeedLog

LIMITS = SchedulerLimits(
    block_tokens=4, step_tokens=16, max_running=4, max_waiting=64, max_context_tokens=64
)


class Bench:
    """A scheduler and a runner, driven by hand; a request ends after `outputs` ids."""

    def __init__(self, blocks: int = 16, limits: SchedulerLimits = LIMITS) -> None:
        feed = FeedLog("w", epoch=1, tier="hbm", block_tokens=limits.block_tokens)
        self.blocks = KvBlocks(blocks, feed)
        self.scheduler = Scheduler(self.blocks, limits)
        self.runner = HashRunner(blocks, limits.block_tokens)
        self.open: dict[int, tuple[Request, int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.pins: list[int] = []
        self._number = 0

    def add(
        self,
        prompt: list[int],
        outputs: int,
        *,
        arrived_s: float = 0.0,
        priority: Priority = Priority.INTERACTIVE,
        fetched: bool = False,
    ) -> Request:
        self._number += 1
        limits = self.scheduler.limits
        request = Request(
            number=self._number,
            tokens=list(prompt),
            chain=KeyChain(b"k", b"root", limits.block_tokens),
            rank=rank_of(priority, arrived_s, background_delay_s=10.0),
            priority=priority,
            samples=outputs > 0,
        )
        self.scheduler.check(len(prompt), outputs)
        if fetched:
            self.fetch(request)
        self.scheduler.add(request)
        self.open[request.number] = request, outputs
        return request

    def fetch(self, request: Request) -> None:
        """As a hand-off does: all KV but the last token's, the end of it in a private block."""
        count = len(request.tokens) - request.samples
        blocks = self.blocks.allocate(-(-count // self.scheduler.limits.block_tokens))
        if not count or blocks is None:
            return
        row = Row(0, 0, tuple(request.tokens[:count]), tuple(blocks), sample=False)
        self.runner.run(StepPlan((row,)), {})
        for index, key in enumerate(request.reusable_keys):
            blocks[index] = self.blocks.seal(blocks[index], key)
        request.blocks, request.computed = blocks, count

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.check_plan(plan)
        self.scheduler.commit(plan, self.runner.run(plan, {}))
        for request, outputs in list(self.open.values()):
            if outputs and len(request.tokens) - request.prompt_tokens == outputs:
                self.end(request)
        for request in self.scheduler.take_completed():
            self.end(request)
        self.check_integrity()
        return plan

    def check_integrity(self) -> None:
        holders = [request.blocks for request in self.scheduler.requests()]
        self.blocks.check_integrity([*holders, self.pins])

    def end(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.outputs[request.number] = request.tokens[request.prompt_tokens :]
        del self.open[request.number]

    def check_plan(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        limits = self.scheduler.limits
        assert plan.tokens <= limits.step_tokens
        assert len({row.request for row in plan.rows}) == len(plan.rows) <= limits.max_running
        for row in plan.rows:
            request, _ = self.open[row.request]
            end = row.start + len(row.ids)
            assert row.ids == tuple(request.tokens[row.start : end])
            assert len(row.blocks) == -(-end // limits.block_tokens)
            assert row.sample == (request.samples and end == len(request.tokens))

    def finish(self, within_steps: int = 2000) -> dict[int, list[int]]:
        for _ in range(within_steps):
            if not self.open:
                assert self.blocks.available == self.blocks.total
                return self.outputs
            before = len(self.open)
            rows = self.step().rows
            assert rows or len(self.open) < before, "requests are open and nothing happens"
        raise AssertionError(f"{len(self.open)} requests open after {within_steps} steps")


def alone(prompt: list[int], outputs: int) -> list[int]:
    """What a request yields with the machine to itself and nothing cached."""
    bench = Bench()
    request = bench.add(prompt, outputs)
    return bench.finish()[request.number]


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=size)


PROMPTS = st.builds(
    lambda shared, own, size: (prompt(0, shared) + prompt(own, 40))[:size],
    st.integers(0, 30),
    st.integers(1, 4),
    st.integers(1, 40),
)
WORK = st.lists(
    st.tuples(
        PROMPTS,
        st.integers(0, 12),
        st.sampled_from(Priority),
        st.integers(0, 6),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    work=WORK,
    blocks=st.integers(13, 24),
    step_tokens=st.sampled_from([1, 3, 16, 64]),
    max_running=st.integers(1, 5),
)
def test_everybody_ends_with_the_ids_it_gets_alone(work, blocks, step_tokens, max_running):
    limits = dataclasses.replace(LIMITS, step_tokens=step_tokens, max_running=max_running)
    bench = Bench(blocks, limits)
    wanted = {}
    for now, (ids, outputs, priority, steps, fetched) in enumerate(work):
        request = bench.add(
            ids, outputs, arrived_s=float(now // 2), priority=priority, fetched=fetched
        )
        wanted[request.number] = alone(ids, outputs)
        for _ in range(steps):
            bench.step()
    assert bench.finish() == wanted


@settings(max_examples=40, deadline=None)
@given(work=WORK, data=st.data())
def test_leaving_at_any_moment_gives_everything_back_and_disturbs_nobody(work, data):
    bench = Bench(13)
    wanted = {}
    for now, (ids, outputs, priority, _, fetched) in enumerate(work):
        request = bench.add(
            ids, outputs, arrived_s=float(now // 2), priority=priority, fetched=fetched
        )
        wanted[request.number] = alone(ids, outputs)
    for _ in range(data.draw(st.integers(0, 6))):
        if not bench.open:
            break
        plan = bench.scheduler.plan()
        leaver, _ = bench.open[data.draw(st.sampled_from(sorted(bench.open)))]
        bench.scheduler.remove(leaver)
        del bench.open[leaver.number], wanted[leaver.number]
        bench.check_integrity()
        bench.scheduler.commit(plan, bench.runner.run(plan, {}))
        assert not leaver.blocks
        for request, outputs in list(bench.open.values()):
            if outputs and len(request.tokens) - request.prompt_tokens == outputs:
                bench.end(request)
        for request in bench.scheduler.take_completed():
            bench.end(request)
        bench.check_integrity()
    bench.finish()
    assert {number: bench.outputs[number] for number in wanted} == wanted


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_generate():
    bench = Bench()
    bench.add(prompt(1, 4), 8, arrived_s=1)
    bench.step()
    bench.add(prompt(2, 40), 1, arrived_s=0)
    sizes = [tuple(len(row.ids) for row in bench.step().rows) for _ in range(3)]
    assert sizes == [(1, 15), (1, 15), (1, 10)]


def test_only_prompts_are_queued_tokens_and_not_what_was_sampled_just_now():
    bench = Bench()
    bench.add(prompt(1, 8), 4)
    assert bench.scheduler.queued_tokens == 8
    bench.step()
    assert bench.scheduler.running == 1
    assert bench.scheduler.queued_tokens == 0


def test_a_cached_prefix_is_not_computed_again_but_for_the_last_token():
    bench = Bench()
    bench.add(prompt(1, 16), 1)
    bench.finish()
    again = bench.add(prompt(1, 16), 1)
    assert bench.step().rows[0].start == 12
    assert again.usage is not None
    assert (again.usage.hbm_tokens, again.usage.computed_tokens) == (12, 4)


def test_a_prompt_whose_kv_is_wanted_alone_may_need_no_step():
    bench = Bench()
    bench.add(prompt(1, 16), 0)
    bench.finish()
    bench.add(prompt(1, 16), 0)
    assert bench.step().rows == ()
    assert not bench.open


def test_a_preempted_request_recomputes_only_what_was_lost():
    bench = Bench(blocks=8)
    first = bench.add(prompt(1, 8), 18, arrived_s=0)
    second = bench.add(prompt(2, 8), 14, arrived_s=1)
    outputs = bench.finish()
    assert bench.scheduler.preemptions == 1
    assert outputs[first.number] == alone(prompt(1, 8), 18)
    assert outputs[second.number] == alone(prompt(2, 8), 14)
    rows = [row for plan in bench.plans for row in plan.rows if row.request == second.number]
    ends = [row.start + len(row.ids) for row in rows]
    resumed = [row.start for row, end in zip(rows[1:], ends, strict=False) if row.start != end]
    assert len(resumed) == 1
    assert resumed[0] > 0


def test_an_interactive_request_takes_the_slot_of_a_background_one():
    bench = Bench(limits=dataclasses.replace(LIMITS, max_running=1))
    background = bench.add(prompt(1, 8), 9, arrived_s=0, priority=Priority.BACKGROUND)
    bench.step()
    interactive = bench.add(prompt(2, 8), 2, arrived_s=1)
    bench.step()
    bench.step()
    assert interactive.number in bench.outputs
    assert bench.finish()[background.number] == alone(prompt(1, 8), 9)


def test_a_background_request_that_waited_long_enough_goes_first():
    bench = Bench(limits=dataclasses.replace(LIMITS, max_running=1))
    old = bench.add(prompt(1, 4), 1, arrived_s=0, priority=Priority.BACKGROUND)
    bench.add(prompt(2, 4), 1, arrived_s=11)
    bench.step()
    assert list(bench.outputs) == [old.number]


def test_blocks_pinned_by_others_delay_and_do_not_hang():
    bench = Bench(blocks=4)
    pinned = bench.blocks.allocate(4)
    assert pinned is not None
    bench.add(prompt(1, 10), 2)
    assert bench.scheduler.plan().rows == ()
    bench.pins = pinned[1:]
    bench.blocks.release(pinned[:1])
    assert [len(row.ids) for row in bench.step().rows] == [4]
    bench.pins = []
    bench.blocks.release(pinned[1:])
    bench.finish()


def test_blocks_fetched_for_the_queue_never_block_those_that_run():
    bench = Bench(blocks=8)
    running = bench.add(prompt(1, 12), 12, arrived_s=1)
    bench.step()
    waiting = bench.add(prompt(2, 18), 1, arrived_s=0, fetched=True)
    assert len(waiting.blocks) == 5
    outputs = bench.finish()
    assert outputs[running.number] == alone(prompt(1, 12), 12)
    assert outputs[waiting.number] == alone(prompt(2, 18), 1)


def test_blocks_fetched_for_a_later_request_never_block_an_earlier_one():
    bench = Bench(blocks=8)
    later = bench.add(prompt(2, 31), 1, arrived_s=1, fetched=True)
    assert bench.blocks.available == 0
    earlier = bench.add(prompt(1, 24), 1, arrived_s=0)
    bench.step()
    assert bench.plans[0].rows[0].request == earlier.number
    assert bench.finish()[later.number] == alone(prompt(2, 31), 1)


def test_a_request_does_not_start_where_the_next_block_of_another_would_preempt_it():
    bench = Bench(blocks=8)
    bench.add(prompt(1, 15), 16, arrived_s=0)
    bench.step()
    bench.add(prompt(2, 15), 3, arrived_s=1)
    bench.finish()
    assert bench.scheduler.preemptions == 0


def test_a_failed_row_ends_its_request_alone():
    bench = Bench()
    doomed = bench.add(prompt(1, 6), 5, arrived_s=0)
    other = bench.add(prompt(2, 6), 5, arrived_s=1)
    plan = bench.scheduler.plan()
    sampled = [drawn for drawn in bench.runner.run(plan, {}) if drawn.request == other.number]
    bench.scheduler.commit(plan, sampled, failed={doomed.number})
    del bench.open[doomed.number]
    bench.check_integrity()
    assert bench.blocks.held(doomed.chain.keys) == 0
    assert bench.finish() == {other.number: alone(prompt(2, 6), 5)}


def check(bench: Bench, prompt_tokens: int, max_tokens: int) -> Callable[[], None]:
    return lambda: bench.scheduler.check(prompt_tokens, max_tokens, retry_after_s=2.5)


def test_what_can_never_fit_is_refused_with_the_numbers():
    bench = Bench(blocks=4)
    with pytest.raises(RequestError, match="has 64 tokens, but the context holds 64"):
        check(bench, 64, 1)()
    with pytest.raises(CapacityError, match=r"needs 5 blocks of 4 tokens, but .* has 4"):
        check(bench, 12, 6)()
    check(bench, 12, 5)()


def test_a_full_queue_refuses_and_says_when_to_come_back():
    bench = Bench(limits=dataclasses.replace(LIMITS, max_waiting=1))
    bench.add(prompt(1, 4), 1)
    with pytest.raises(Overloaded) as refused:
        check(bench, 4, 1)()
    assert refused.value.retry_after_s == 2.5
