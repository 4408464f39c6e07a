"""An engine whose memory is full waits for room to read into; it computes if that takes long."""

import asyncio
import random
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from hash_engine import Setup, hash_engine, request
from kimi_runtime.engine.plan import StepPlan
from memory_pool import MemoryPool


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=size)


async def stored(pool: MemoryPool, *prompts: list[int]) -> list[list[int]]:
    """Put the prompts' KV into the pool; what they are answered with."""
    async with hash_engine(Setup(pool=pool)) as one:
        answers = [(await one.generate(request(ids, 3))).ids for ids in prompts]
        await one.engine.drain(within_s=5.0)
    return answers


async def test_what_the_pool_has_is_read_once_those_who_run_are_done():
    pool, ids = MemoryPool(), prompt(1, 40)
    (expected,) = await stored(pool, ids)
    async with hash_engine(Setup(pool=pool, blocks=16)) as one, asyncio.TaskGroup() as tasks:
        long = tasks.create_task(one.generate(request(prompt(2, 30), 30)))
        while not one.engine.load().running:
            await asyncio.sleep(0.001)
        waiting = await one.generate(request(ids, 3))
        assert (await long).finish is not None
        assert waiting.ids == expected
        assert waiting.usage.pool_tokens == 36
        assert not one.engine.counters().pool_failures


async def test_who_leaves_while_it_waits_leaves_nothing_behind_and_the_next_goes_on():
    pool, first, second = MemoryPool(), prompt(1, 40), prompt(3, 36)
    _, expected = await stored(pool, first, second)
    async with hash_engine(Setup(pool=pool, blocks=16)) as one, asyncio.TaskGroup() as tasks:
        tasks.create_task(one.generate(request(prompt(2, 30), 30)))
        while not one.engine.load().running:
            await asyncio.sleep(0.001)
        leaves = tasks.create_task(one.generate(request(first, 3)))
        stays = tasks.create_task(one.generate(request(second, 3)))
        while one.engine.load().waiting < 2:
            await asyncio.sleep(0)
        leaves.cancel()
        assert (await stays).ids == expected
    one.assert_all_free()


async def test_without_room_in_time_the_prompt_is_computed_and_it_is_counted():
    pool, ids = MemoryPool(), prompt(1, 40)
    (expected,) = await stored(pool, ids)
    going = threading.Event()
    going.set()

    def before_step(plan: StepPlan) -> None:
        assert going.wait(20.0)

    setup = Setup(pool=pool, blocks=16, deadline_s=0.01, before_step=before_step)
    async with hash_engine(setup) as one, asyncio.TaskGroup() as tasks:
        tasks.create_task(one.generate(request(prompt(2, 30), 30)))
        while not one.engine.load().running:
            await asyncio.sleep(0.001)
        going.clear()
        late = tasks.create_task(one.generate(request(ids, 3)))
        async with asyncio.timeout(10.0):
            while not one.engine.counters().pool_failures:
                await asyncio.sleep(0.001)
        going.set()
        answer = await late
        assert one.engine.counters().pool_failures == {"no_room": 1}
        assert (answer.usage.pool_tokens, answer.usage.computed_tokens) == (0, 40)
        assert answer.ids == expected


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(5, 44), st.integers(1, 12)), min_size=2, max_size=7),
    blocks=st.integers(15, 30),
)
def test_any_mix_over_any_memory_is_answered_as_it_is_alone(sizes, blocks):
    async def run() -> None:
        pool = MemoryPool()
        prompts = [prompt(number % 3, size) for number, (size, _) in enumerate(sizes)]
        async with hash_engine(Setup(pool=pool)) as roomy:
            wanted = [
                (await roomy.generate(request(ids, outputs))).ids
                for ids, (_, outputs) in zip(prompts, sizes, strict=True)
            ]
            await roomy.engine.drain(within_s=5.0)
        async with hash_engine(Setup(pool=pool, blocks=blocks)) as tight:
            async with asyncio.TaskGroup() as tasks:
                answers = [
                    tasks.create_task(tight.generate(request(ids, outputs)))
                    for ids, (_, outputs) in zip(prompts, sizes, strict=True)
                ]
            assert [one.result().ids for one in answers] == wanted
            assert not tight.engine.counters().pool_failures
            await tight.engine.drain(within_s=5.0)
            tight.assert_all_free()

    asyncio.run(run())
