"""The engine around scheduler and runner: equal ids in every mode, and nothing ever leaks."""

import asyncio
import random
import threading
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hash_engine import EOS, VOCABULARY, Setup, hash_engine, request
from kimi_connect.wire import Outcome
from kimi_runtime.engine.plan import StepPlan
from kimi_runtime.errors import (
    CapacityError,
    DeadlineExceeded,
    KimistackError,
    Overloaded,
    RequestError,
    Unavailable,
)
from kimi_runtime.spec.request import FinishReason, KvPlan, Priority
from kimi_runtime.umbp.keys import hex_keys
from memory_pool import MemoryPool


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=size)


async def alone(ids: list[int], outputs: int) -> list[int]:
    """The reference: an engine of its own, nothing cached, one step for the whole prompt."""
    async with hash_engine(Setup(step_tokens=128)) as engine:
        return (await engine.generate(request(ids, outputs))).ids


PROMPTS = st.builds(
    lambda shared, own, size: (prompt(0, shared) + prompt(own, 60))[:size],
    st.integers(0, 40),
    st.integers(1, 3),
    st.integers(1, 60),
)


@settings(max_examples=40, deadline=None)
@given(
    work=st.lists(
        st.tuples(PROMPTS, st.integers(1, 10), st.sampled_from(Priority)), min_size=1, max_size=6
    ),
    blocks=st.integers(18, 40),
    step_tokens=st.sampled_from([2, 7, 64]),
    pooled=st.booleans(),
    at_once=st.booleans(),
)
def test_ids_do_not_depend_on_schedule_cache_pool_or_company(
    work, blocks, step_tokens, pooled, at_once
):
    async def check() -> None:
        setup = Setup(blocks=blocks, step_tokens=step_tokens, pool=MemoryPool() if pooled else None)
        async with hash_engine(setup) as engine:
            asked = [request(ids, outputs, priority=kind) for ids, outputs, kind in work]
            if at_once:
                answers = await asyncio.gather(*map(engine.generate, asked))
            else:
                answers = [await engine.generate(one) for one in asked]
            for (ids, outputs, _), answer in zip(work, answers, strict=True):
                assert answer.ids == await alone(ids, outputs)
                usage = answer.usage
                assert len(ids) == usage.hbm_tokens + usage.pool_tokens + usage.computed_tokens
            counted = engine.engine.counters().prompt_tokens
            assert counted.total() == sum(len(ids) for ids, _, _ in work)
            await engine.engine.drain(within_s=5.0)
            engine.assert_all_free()

    asyncio.run(check())


async def test_a_second_turn_computes_only_what_is_new():
    async with hash_engine() as engine:
        first = await engine.generate(request(prompt(1, 21), 6))
        turn = [*prompt(1, 21), *first.ids, *prompt(2, 5)]
        second = await engine.generate(request(turn, 6))
        assert (second.usage.hbm_tokens, second.usage.computed_tokens) == (24, 8)
        assert second.ids == await alone(turn, 6)


async def test_what_another_worker_computed_comes_from_the_pool():
    pool = MemoryPool()
    async with hash_engine(Setup(pool=pool)) as first:
        await first.generate(request(prompt(1, 22), 6))
        await first.engine.drain(within_s=5.0)
        assert first.engine.counters().pool_stored == len(pool.blocks) == 6
    async with hash_engine(Setup(pool=pool)) as second:
        answer = await second.generate(request(prompt(1, 22), 6))
        assert (answer.usage.pool_tokens, answer.usage.computed_tokens) == (20, 2)
        assert answer.ids == await alone(prompt(1, 22), 6)


async def test_every_tenant_s_blocks_are_put_under_its_name():
    pool = MemoryPool()
    async with hash_engine(Setup(pool=pool)) as engine:
        for tenant in ("one", "two"):
            asked = request(prompt(1, 22), 6).model_copy(update={"tenant": tenant})
            await engine.generate(asked)
        await engine.engine.drain(within_s=5.0)
    assert (pool.tenants, len(pool.blocks)) == ({"one", "two"}, 12)


async def test_the_pool_hears_of_blocks_that_were_found_here():
    pool = MemoryPool()
    async with hash_engine(Setup(pool=pool)) as engine:
        await engine.generate(request(prompt(1, 22), 6))
        assert pool.used_blocks == 0
        await engine.generate(request(prompt(1, 22), 6))
        assert pool.used_blocks == 5


@pytest.mark.parametrize("outcome", [Outcome.UNAVAILABLE, Outcome.CORRUPT, Outcome.LATE])
async def test_a_pool_that_fails_half_way_costs_time_and_is_counted(outcome):
    pool = MemoryPool()
    async with hash_engine(Setup(pool=pool)) as first:
        await first.generate(request(prompt(1, 22), 6))
        await first.engine.drain(within_s=5.0)
    pool.outcome, pool.loads_before = outcome, 2
    async with hash_engine(Setup(pool=pool)) as second:
        answer = await second.generate(request(prompt(1, 22), 6))
        assert (answer.usage.pool_tokens, answer.usage.computed_tokens) == (8, 14)
        assert answer.ids == await alone(prompt(1, 22), 6)
        assert second.engine.counters().pool_failures == {outcome.value: 1}


async def test_blocks_beyond_what_may_wait_for_the_pool_are_dropped_and_counted():
    async with hash_engine(Setup(blocks=16, pool=MemoryPool(), step_tokens=128)) as engine:
        await engine.generate(request(prompt(1, 40), 1))
        await engine.engine.drain(within_s=5.0)
        counters = engine.engine.counters()
        assert (counters.pool_stored, counters.pool_dropped) == (2, 8)
        engine.assert_all_free()


class Gate:
    """Holds a step in the runner's thread until it is opened."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.opened = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, plan: StepPlan) -> None:
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.opened.wait(20)


async def test_a_client_that_leaves_frees_everything_at_the_end_of_the_step():
    gate = Gate()
    async with hash_engine(Setup(before_step=gate)) as engine:
        chunks = engine.engine.generate(request(prompt(1, 20), 50))
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(anext(chunks))
            await gate.entered.wait()
            reading.cancel()
            await asyncio.wait({reading})
            assert engine.engine.load().in_flight == {}
            engine.engine.check_integrity()
            assert engine.engine.load().free_blocks < 64  # the step still writes to them
            gate.opened.set()
        await engine.generate(request(prompt(2, 4), 1))
        engine.assert_all_free()
        assert engine.engine.counters().finished == {"left": 1, "length": 1}


async def test_closing_the_stream_in_the_middle_frees_everything():
    async with hash_engine() as engine:
        async with aclosing(engine.engine.generate(request(prompt(1, 20), 60))) as chunks:
            await anext(chunks)
        await engine.generate(request(prompt(2, 4), 1))
        engine.assert_all_free()


async def test_the_deadline_ends_a_request_and_frees_it():
    gate = Gate()
    async with hash_engine(Setup(before_step=gate)) as engine:
        with pytest.raises(DeadlineExceeded, match="not done after 50 ms"):
            await engine.generate(request(prompt(1, 20), 50, deadline_ms=50))
        gate.opened.set()
        await engine.generate(request(prompt(2, 4), 1))
        engine.assert_all_free()
        assert engine.engine.counters().finished["late"] == 1


async def test_a_step_that_breaks_fails_only_the_request_at_fault():
    bad = prompt(9, 10)

    def break_on_bad(plan: StepPlan) -> None:
        if any(row.ids[:4] == tuple(bad[:4]) for row in plan.rows):
            raise ZeroDivisionError("a kernel went wrong")

    async with hash_engine(Setup(before_step=break_on_bad)) as engine:
        good, failed = await asyncio.gather(
            engine.generate(request(prompt(1, 10), 5)),
            engine.generate(request(bad, 5)),
            return_exceptions=True,
        )
        assert not isinstance(good, BaseException)
        assert good.ids == await alone(prompt(1, 10), 5)
        assert type(failed) is KimistackError
        assert "ZeroDivisionError" in str(failed)
        engine.assert_all_free()
        assert engine.engine.counters().finished == {"failed": 1, "length": 1}


async def test_kv_that_a_request_failed_on_is_not_used_again():
    broken = threading.Event()

    def break_once(plan: StepPlan) -> None:
        if broken.is_set():
            raise ZeroDivisionError("not a number")

    pool = MemoryPool()
    async with hash_engine(Setup(pool=pool, before_step=break_once)) as engine:
        await engine.generate(request(prompt(1, 12), 1))
        broken.set()
        with pytest.raises(KimistackError):
            await engine.generate(request(prompt(1, 12), 1))
        broken.clear()
        again = await engine.generate(request(prompt(1, 12), 1))
        assert again.usage.computed_tokens == 12


@pytest.mark.parametrize(
    ("sampling", "outputs", "finish"),
    [
        ({}, 6, FinishReason.LENGTH),
        ({"max_tokens": 0}, 0, FinishReason.LENGTH),
        ({"max_tokens": 1000}, 108, FinishReason.LENGTH),
    ],
)
async def test_a_generation_ends_at_max_tokens_or_the_context(sampling, outputs, finish):
    async with hash_engine() as engine:
        answer = await engine.generate(request(prompt(1, 20), 6, sampling=sampling))
        assert (len(answer.ids), answer.finish) == (outputs, finish)
        engine.assert_all_free()


async def test_a_stop_id_ends_the_generation_and_is_part_of_it():
    free = await alone(prompt(1, 9), 12)
    async with hash_engine() as engine:
        stopped = await engine.generate(
            request(prompt(1, 9), 12, sampling={"stop_ids": (free[5],)})
        )
        cut = free.index(free[5]) + 1
        assert (stopped.ids, stopped.finish) == (free[:cut], FinishReason.STOP)


async def test_the_end_of_turn_ends_the_generation_unless_it_is_ignored():
    bias = {"logit_bias": {EOS: 100.0}}
    async with hash_engine() as engine:
        ended = await engine.generate(
            request(prompt(1, 9), 4, sampling={"ignore_eos": False, **bias})
        )
        assert (ended.ids, ended.finish) == ([EOS], FinishReason.STOP)
        ignored = await engine.generate(request(prompt(1, 9), 4, sampling=bias))
        assert (ignored.ids, ignored.finish) == ([EOS] * 4, FinishReason.LENGTH)


async def test_a_stop_string_is_found_across_ids():
    free = await alone(prompt(1, 9), 20)
    text = VOCABULARY.decode_text(free[3:6])
    async with hash_engine() as engine:
        answer = await engine.generate(
            request(prompt(1, 9), 20, sampling={"stop_strings": (text,)})
        )
        assert answer.finish is FinishReason.STOP
        assert text in VOCABULARY.decode_text(answer.ids)
        assert answer.ids == free[: len(answer.ids)]


async def test_a_grammar_holds_and_its_end_ends_the_generation():
    grammar = {"kind": "json_schema", "text": '{"type": "boolean"}'}
    async with hash_engine() as engine:
        answer = await engine.generate(request(prompt(1, 9), 40, grammar=grammar))
        assert answer.finish is FinishReason.STOP
        assert VOCABULARY.decode_text(answer.ids) in ("true", "false")
        with pytest.raises(RequestError):
            await engine.generate(request([1], grammar={"kind": "lark", "text": "start: ("}))
        engine.assert_all_free()


async def test_the_first_ids_and_the_end_say_where_the_prompts_kv_came_from():
    async with hash_engine() as engine:
        chunks = (await engine.generate(request(prompt(1, 9), 3))).chunks
        assert chunks[0].usage == chunks[-1].usage is not None


async def test_what_can_never_be_served_is_refused_at_once():
    async with hash_engine(Setup(blocks=8)) as engine:
        for asked, error in (
            (request(prompt(1, 128), 1), RequestError),
            (request(prompt(1, 30), 8), CapacityError),
            (request([VOCABULARY.size], 1), RequestError),
            (request([1], 1, adapter="lora"), RequestError),
            (request([1], 1, kv=KvPlan(offer=True)), RequestError),
        ):
            with pytest.raises(error):
                await engine.generate(asked)
        assert engine.engine.counters().refused.total() == 5
        engine.assert_all_free()


async def test_a_full_queue_refuses_and_draining_refuses():
    gate = Gate()
    setup = Setup(max_running=1, max_waiting=1, before_step=gate)
    async with hash_engine(setup) as engine, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(engine.generate(request(prompt(1, 4), 2)))
        await gate.entered.wait()
        second = tasks.create_task(engine.generate(request(prompt(2, 4), 2)))
        while engine.engine.load().waiting < 1:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await engine.generate(request(prompt(3, 4), 2))
        assert 0 < refused.value.retry_after_s <= 60
        draining = tasks.create_task(engine.engine.drain(within_s=10.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="draining"):
            await engine.generate(request(prompt(3, 4), 2))
        gate.opened.set()
        await draining
        assert first.result().finish is second.result().finish is FinishReason.LENGTH


async def test_draining_cancels_what_does_not_end_in_time():
    gate = Gate()
    async with hash_engine(Setup(before_step=gate)) as engine, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.generate(request(prompt(1, 4), 100)))
        await gate.entered.wait()
        await engine.engine.drain(within_s=0.01)
        gate.opened.set()
        assert (await running).finish is FinishReason.CANCELLED


async def test_draining_frees_the_blocks_of_a_stream_that_nobody_reads():
    async with hash_engine() as engine:
        chunks = engine.engine.generate(request(prompt(1, 20), 100))
        await anext(chunks)
        await engine.engine.drain(within_s=0.0)
        while engine.engine.load().free_blocks < engine.setup.blocks:
            await asyncio.sleep(0.001)
        assert [chunk.finish async for chunk in chunks][-1] is FinishReason.CANCELLED


async def test_a_closed_engine_leaves_no_thread_behind():
    async with hash_engine() as engine:
        await engine.generate(request(prompt(1, 20), 1))
        assert any(thread.name.startswith("runner") for thread in threading.enumerate())
    assert not any(thread.name.startswith("runner") for thread in threading.enumerate())


async def test_other_tenants_blocks_are_never_hit():
    async with hash_engine() as engine:
        await engine.generate(request(prompt(1, 20), 1, tenant="a"))
        other = await engine.generate(request(prompt(1, 20), 1, tenant="b"))
        assert other.usage.computed_tokens == 20


async def test_keys_of_the_router_that_are_not_ours_are_counted():
    async with hash_engine() as engine:
        keys = hex_keys([b"k" * 16])
        await engine.generate(request(prompt(1, 20), 1, kv=KvPlan(keys=keys)))
        assert engine.engine.counters().key_mismatches == 1


async def test_a_slow_reader_gets_fewer_and_larger_chunks():
    async with hash_engine() as engine:
        chunks = engine.engine.generate(request(prompt(1, 4), 30))
        sizes = [len((await anext(chunks)).ids)]
        while engine.engine.load().running:
            await asyncio.sleep(0.001)
        sizes += [len(chunk.ids) async for chunk in chunks]
        assert sum(sizes) == 30
        assert len(sizes) <= 3
