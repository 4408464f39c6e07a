"""Sessions kept between hand-offs."""

import pytest

from kimi_runtime.errors import RegionGone, TransferCancelled
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.transfer.sessions import SessionCache


async def read_through(cache, ref):
    async with cache.session(ref, deadline_s=1.0) as session:
        await session.read([Span(0, 0, 1)], memoryview(bytearray(1)), deadline_s=1.0)


@pytest.fixture
async def parts():
    fabric = Fabric()
    owner, reader = LoopbackTransport("owner", fabric), LoopbackTransport("reader", fabric)
    refs = [owner.register(private_memory(64)) for _ in range(4)]
    yield owner, SessionCache(reader, limit=2), refs
    await reader.aclose()
    await owner.aclose()


async def test_a_session_is_opened_once(parts):
    _, cache, refs = parts
    async with cache.session(refs[0], deadline_s=1.0) as first:
        pass
    async with cache.session(refs[0], deadline_s=1.0) as second:
        assert first is second


async def test_idle_sessions_beyond_the_limit_are_closed_and_used_ones_are_not(parts):
    _, cache, refs = parts
    async with cache.session(refs[0], deadline_s=1.0) as used:
        for ref in refs[1:]:
            async with cache.session(ref, deadline_s=1.0):
                pass
        assert len(cache) == 3
        await used.read([Span(0, 0, 1)], memoryview(bytearray(1)), deadline_s=1.0)


async def test_a_session_whose_region_is_gone_is_dropped(parts):
    owner, cache, refs = parts
    async with cache.session(refs[0], deadline_s=1.0) as session:
        owner.release(refs[0])
    with pytest.raises(RegionGone):
        await read_through(cache, refs[0])
    assert len(cache) == 0
    with pytest.raises(TransferCancelled):
        await session.read([Span(0, 0, 1)], memoryview(bytearray(1)), deadline_s=1.0)


async def test_a_region_that_can_t_be_opened_leaves_nothing_behind(parts):
    owner, cache, refs = parts
    owner.release(refs[0])
    with pytest.raises(RegionGone):
        async with cache.session(refs[0], deadline_s=1.0):
            pass
    assert len(cache) == 0


async def test_closing_closes_all(parts):
    _, cache, refs = parts
    async with cache.session(refs[0], deadline_s=1.0) as session:
        pass
    await cache.aclose()
    with pytest.raises(TransferCancelled):
        await session.read([Span(0, 0, 1)], memoryview(bytearray(1)), deadline_s=1.0)
