"""An engine that computes sooner than its pool could bring."""

import random

from hash_engine import Setup, hash_engine, request
from kimi_connect.wire import Source
from memory_pool import MemoryPool


def prompt(seed, size):
    return random.Random(seed).choices(range(500), k=size)


def roomy(pool):
    return Setup(pool=pool, blocks=200, step_tokens=256, max_context_tokens=600)


async def test_what_would_come_later_than_it_is_computed_is_not_waited_for_and_counted():
    pool, long = MemoryPool(), prompt(1, 202)
    async with hash_engine(roomy(pool)) as first:
        expected = await first.generate(request(long, 6))
        await first.engine.drain(within_s=5.0)
    pool.source, pool.seconds = Source.PEER, 3600.0
    async with hash_engine(roomy(pool)) as second:
        await second.generate(request(prompt(2, 202), 1))  # so that it knows its own pace
        answer = await second.generate(request(long, 6))
        assert (answer.usage.pool_tokens, answer.usage.computed_tokens) == (0, 202)
        assert second.engine.counters().pool_failures == {"dear": 1}
        assert answer.ids == expected.ids


async def test_an_engine_that_has_not_computed_yet_takes_what_there_is():
    pool, long = MemoryPool(), prompt(1, 202)
    async with hash_engine(roomy(pool)) as first:
        await first.generate(request(long, 6))
        await first.engine.drain(within_s=5.0)
    pool.seconds = 3600.0
    async with hash_engine(roomy(pool)) as second:
        answer = await second.generate(request(long, 6))
        assert answer.usage.pool_tokens > 0
