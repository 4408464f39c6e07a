"""The scripted engine gives what its script says, faults included."""

import asyncio
import itertools

import pytest

from kimi_runtime.engine.adapters.scripted import Pace, ScriptedAdapter, scripted_info
from kimi_runtime.engine.adapters.scripts import Reply, Script, derived, replayed
from kimi_runtime.errors import DeadlineExceeded, Overloaded, RequestError, Unavailable
from kimi_runtime.spec.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    KvPlan,
    Sampling,
)


def request(ids=range(200), *, max_tokens=50, deadline_ms=10_000, **fields) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, stop_ids=fields.pop("stop_ids", ()))
    return GenerateRequest(
        request_id="r", ids=tuple(ids), sampling=sampling, deadline_ms=deadline_ms, **fields
    )


def adapter(script: Script | None = None, **options) -> ScriptedAdapter:
    info = scripted_info("w", total_blocks=options.pop("total_blocks", 64))
    return ScriptedAdapter(info, script or derived(1000), **options)


async def chunks_of(engine: ScriptedAdapter, asked: GenerateRequest) -> list[GenerateChunk]:
    return [chunk async for chunk in engine.generate(asked)]


async def ids_of(engine: ScriptedAdapter, asked: GenerateRequest) -> list[int]:
    return [number for chunk in await chunks_of(engine, asked) for number in chunk.ids]


async def test_a_prompt_continued_with_half_the_answer_gets_the_other_half():
    whole = await ids_of(adapter(derived(1000, length=10)), request())
    rest = await ids_of(adapter(derived(1000, length=5)), request([*range(200), *whole[:5]]))
    assert rest == whole[5:]
    assert len(set(whole)) > 5


async def test_a_recorded_conversation_is_replayed_to_its_turns_end():
    engine = adapter(replayed([(1, 2, 3, 9, 4, 5, 9, 6)], turn_ends=[9]))
    assert await ids_of(engine, request([1, 2])) == [3, 9]
    assert await ids_of(engine, request([1, 2, 3, 9])) == [4, 5, 9]
    with pytest.raises(RequestError, match="begins none"):
        await ids_of(engine, request([7]))


async def test_an_endless_script_ends_at_max_tokens_or_a_stop_id():
    engine = adapter(lambda _: Reply(itertools.count()))
    last = (await chunks_of(engine, request(max_tokens=30_000)))[-1]
    assert last.finish is FinishReason.LENGTH
    chunks = await chunks_of(engine, request(stop_ids=(7,)))
    assert (chunks[-1].finish, chunks[-1].ids) == (FinishReason.STOP, (7,))


async def test_a_scripted_error_comes_after_the_ids_before_it():
    engine = adapter(lambda _: Reply(range(9), error=Unavailable("down"), fail_after=3))
    chunks = engine.generate(request())
    assert [(await anext(chunks)).ids for _ in range(3)] == [(0,), (1,), (2,)]
    with pytest.raises(Unavailable, match="down"):
        await anext(chunks)
    assert engine.load().running == 0


async def test_a_cut_stream_ends_without_finish():
    chunks = await chunks_of(adapter(lambda _: Reply(range(9), cut_after=2)), request())
    assert [chunk.finish for chunk in chunks] == [None, None]


async def test_a_stalled_stream_ends_by_its_deadline():
    engine = adapter(lambda _: Reply(range(9), stall_after=2))
    with pytest.raises(DeadlineExceeded):
        await chunks_of(engine, request(deadline_ms=30))
    assert engine.counters().finished == {"late": 1}
    assert engine.load().in_flight == {}


async def test_the_cache_forgets_the_end_of_the_oldest_chain_first():
    engine = adapter(total_blocks=4)
    await ids_of(engine, request(range(192)))
    await ids_of(engine, request(range(1000, 1128)))
    assert len(engine.feed) == 4
    again = (await chunks_of(engine, request(range(192))))[-1]
    assert again.usage is not None
    assert (again.usage.hbm_tokens, again.usage.computed_tokens) == (128, 64)


async def test_a_slow_prefill_fills_the_queue_and_the_next_request_is_refused():
    engine = adapter(pace=Pace(prefill_tokens_per_s=1.0), max_running=1, max_waiting=1)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(chunks_of(engine, request())) for _ in range(2)]
        while engine.load().running + engine.load().waiting < 2:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await chunks_of(engine, request())
        assert refused.value.retry_after_s > 0
        await engine.drain(within_s=0.01)
    assert [task.result()[-1].finish for task in running] == [FinishReason.CANCELLED] * 2


async def test_an_offer_is_pinned_until_it_is_released_once():
    engine = adapter()
    offered = (await chunks_of(engine, request(kv=KvPlan(offer=True))))[-1]
    assert offered.finish is FinishReason.HANDED_OFF
    assert offered.hand_off is not None
    assert [block.tokens for block in offered.hand_off.blocks] == [64, 64, 64, 8]
    taker = adapter()
    taken = (await chunks_of(taker, request(kv=KvPlan(take=offered.hand_off))))[-1]
    assert taken.usage is not None
    assert (taken.usage.hand_off_tokens, taken.usage.computed_tokens) == (199, 1)
    assert await engine.release(offered.hand_off.ticket)
    assert not await engine.release(offered.hand_off.ticket)
