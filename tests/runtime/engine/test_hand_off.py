"""Hand-offs move exactly what is lacking, never yield wrong ids, and never pin for ever."""

import asyncio
import dataclasses
import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hash_engine import BLOCK_TOKENS, Running, Setup, hash_engine, request
from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.freed import Freed
from kimi_runtime.engine.geometry import KvGeometry
from kimi_runtime.engine.handoff import HandOffs, TicketUrls
from kimi_runtime.engine.request import KeyChain, Request
from kimi_runtime.errors import DeadlineExceeded, TransferLate
from kimi_runtime.spec.request import FinishReason, GenerateRequest, HandOff, KvPlan, RegionRef
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.chaos import ChaosPlan, ChaosTransport, Fault
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.umbp.feed import FeedLog
from memory_pool import MemoryPool

BLOCK_BYTES = BLOCK_TOKENS * 16


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=size)


def offering(ids: list[int], **fields: object) -> GenerateRequest:
    return request(ids, kv=KvPlan(offer=True), **fields)


def taking(ids: list[int], hand_off: HandOff, outputs: int = 6) -> GenerateRequest:
    return request(ids, outputs, kv=KvPlan(take=hand_off))


async def alone(ids: list[int], outputs: int = 6) -> list[int]:
    async with hash_engine(Setup(step_tokens=128)) as engine:
        return (await engine.generate(request(ids, outputs))).ids


class Pair:
    """A prefill and a decode engine on one fabric."""

    def __init__(self, chaos: ChaosPlan | None = None, **decode: object) -> None:
        fabric = Fabric()
        link = LoopbackTransport("d", fabric)
        self.link = ChaosTransport(link, chaos or ChaosPlan())
        self.prefill_setup = Setup(name="p", transport=LoopbackTransport("p", fabric))
        self.decode_setup = dataclasses.replace(Setup(name="d", transport=self.link), **decode)

    async def __aenter__(self) -> "Pair":
        self._prefill, self._decode = hash_engine(self.prefill_setup), None
        self.prefill: Running = await self._prefill.__aenter__()
        self._decode = hash_engine(self.decode_setup)
        self.decode: Running = await self._decode.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._decode is not None
        await self._decode.__aexit__(*exc)
        await self._prefill.__aexit__(*exc)

    async def offer(self, ids: list[int]) -> HandOff:
        answer = await self.prefill.generate(offering(ids))
        assert answer.finish is FinishReason.HANDED_OFF
        assert answer.ids == []
        return answer.hand_off

    async def finish(self, hand_off: HandOff) -> None:
        """Release and see that nothing is held on either side."""
        assert await self.prefill.engine.release(hand_off.ticket)
        self.prefill.assert_all_free()
        self.decode.assert_all_free()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 21, 24, 25])
async def test_decode_computes_the_last_token_alone(size):
    ids = prompt(1, size)
    async with Pair() as pair:
        hand_off = await pair.offer(ids)
        answer = await pair.decode.generate(taking(ids, hand_off))
        assert answer.ids == await alone(ids)
        assert answer.usage.computed_tokens == 1
        assert answer.usage.hand_off_tokens == size - 1
        assert pair.decode.runner.computed_tokens == 1 + 5
        assert pair.decode.engine.counters().hand_offs_taken == 1
        await pair.finish(hand_off)


@pytest.mark.parametrize("known", [0, 1, 3, 5])
async def test_only_the_blocks_that_decode_lacks_are_moved(known):
    ids = prompt(1, 23)
    async with Pair() as pair:
        if known:
            await pair.decode.generate(request(ids[: known * BLOCK_TOKENS], 1))
        hand_off = await pair.offer(ids)
        answer = await pair.decode.generate(taking(ids, hand_off))
        assert answer.ids == await alone(ids)
        assert answer.usage.hbm_tokens == known * BLOCK_TOKENS
        assert answer.usage.hand_off_bytes == (6 - known) * BLOCK_BYTES
        assert pair.decode.engine.counters().hand_off_bytes == (6 - known) * BLOCK_BYTES
        await pair.finish(hand_off)


async def test_pulled_blocks_serve_the_next_turn():
    ids = prompt(1, 23)
    async with Pair() as pair:
        first = await pair.decode.generate(taking(ids, await pair.offer(ids), outputs=9))
        turn = [*ids, *first.ids, *prompt(2, 6)]
        second = await pair.decode.generate(taking(turn, await pair.offer(turn)))
        assert second.ids == await alone(turn)
        assert second.usage.hbm_tokens == 28
        assert second.usage.computed_tokens == 1


async def test_the_front_that_a_hand_off_brought_is_in_the_pool_of_who_took_it():
    ids, pool = prompt(1, 23), MemoryPool()
    async with Pair(pool=pool) as pair:
        first = await pair.decode.generate(taking(ids, await pair.offer(ids), outputs=9))
    async with Pair(pool=pool) as pair:
        turn = [*ids, *first.ids, *prompt(2, 6)]
        second = await pair.decode.generate(request(turn, 6))
        assert second.ids == await alone(turn)
        assert second.usage.pool_tokens == 28


async def test_a_prompt_offered_again_has_the_tags_of_its_blocks_as_they_are_now():
    ids = prompt(1, 23)
    async with Pair() as pair:
        first = await pair.offer(ids)
        await pair.prefill.engine.release(first.ticket)
        for seed in range(2, 14):  # more than all blocks
            await pair.prefill.generate(request(prompt(seed, 30), 1))
        answer = await pair.decode.generate(taking(ids, await pair.offer(ids)))
        assert answer.usage.hand_off_tokens == 22
        assert pair.decode.engine.counters().hand_off_failures == {}


CHAOS = st.fixed_dictionaries(
    {fault.value: st.sampled_from([0.0, 0.3]) for fault in (Fault.DUPLICATE, Fault.REHOME)}
    | {fault.value: st.sampled_from([0.0, 0.13]) for fault in (Fault.DROP, Fault.STALL)}
    | {"corrupt": st.sampled_from([0.0, 0.13, 0.14])}
)


@settings(max_examples=30, deadline=None)
@given(
    chaos=CHAOS,
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    pooled=st.booleans(),
)
def test_a_bad_link_never_yields_other_ids(chaos, seed, sizes, pooled):
    async def check() -> None:
        plan = ChaosPlan(seed=seed, **chaos)
        pool = MemoryPool() if pooled else None
        async with Pair(plan, deadline_s=0.02, pool=pool) as pair:
            works = [prompt(0, 12)[:size] + prompt(size, max(0, size - 12)) for size in sizes]
            offers = [await pair.offer(ids) for ids in works]
            answers = await asyncio.gather(
                *(
                    pair.decode.generate(taking(ids, one))
                    for ids, one in zip(works, offers, strict=True)
                )
            )
            for ids, answer in zip(works, answers, strict=True):
                assert answer.ids == await alone(ids)
            counters = pair.decode.engine.counters()
            faults = {one.fault for one in pair.link.injected} - {Fault.DUPLICATE, Fault.DELAY}
            assert bool(counters.hand_off_failures) >= bool(faults - {Fault.CORRUPT})
            for one in offers:
                await pair.prefill.engine.release(one.ticket)
            await pair.decode.engine.drain(within_s=5.0)
            pair.prefill.assert_all_free()
            pair.decode.engine.check_integrity()
            assert counters.quarantined_blocks == 0

    asyncio.run(check())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("corrupt", "corrupt"), ("rehome", "region_gone"), ("drop", "late"), ("stall", "late")],
)
async def test_a_fault_is_counted_by_its_reason_and_costs_only_time(fault, reason):
    ids = prompt(1, 23)
    async with Pair(ChaosPlan(**{fault: 1.0}), deadline_s=0.05) as pair:
        hand_off = await pair.offer(ids)
        answer = await pair.decode.generate(taking(ids, hand_off))
        assert answer.ids == await alone(ids)
        counters = pair.decode.engine.counters()
        assert counters.hand_off_failures == {reason: 1}
        assert counters.hand_offs_taken == 0
        await pair.finish(hand_off)


async def test_a_prefill_worker_that_is_gone_costs_only_time():
    ids = prompt(1, 23)
    async with Pair() as pair:
        hand_off = await pair.offer(ids)
        transport = pair.prefill_setup.transport
        assert transport is not None
        await transport.aclose()
        answer = await pair.decode.generate(taking(ids, hand_off))
        assert answer.ids == await alone(ids)
        assert answer.usage.computed_tokens == 23
        assert pair.decode.engine.counters().hand_off_failures.total() == 1


async def test_blocks_reused_after_the_lease_are_not_taken_for_the_old_ones():
    ids = prompt(1, 40)
    async with Pair() as pair:
        hand_off = await pair.offer(ids)
        assert await pair.prefill.engine.release(hand_off.ticket)
        for seed in range(2, 10):
            await pair.prefill.generate(request(prompt(seed, 40), 1))
        answer = await pair.decode.generate(taking(ids, hand_off))
        assert answer.ids == await alone(ids)
        assert pair.decode.engine.counters().hand_off_failures == {"corrupt": 1}


@pytest.mark.parametrize(("field", "value"), [("model_digest", "other"), ("layout", "hash/8")])
async def test_nothing_is_read_from_another_model_or_layout(field, value):
    ids = prompt(1, 23)
    async with Pair(**{field: value}) as pair:
        hand_off = await pair.offer(ids)
        answer = await pair.decode.generate(taking(ids, hand_off))
        assert answer.usage.hand_off_bytes == 0
        assert pair.decode.engine.counters().hand_off_failures == {"layout": 1}
        await pair.finish(hand_off)


async def test_a_hand_off_of_another_prompt_gives_only_what_is_shared():
    ids = prompt(1, 23)
    other = [*ids[:14], *prompt(2, 9)]
    async with Pair() as pair:
        hand_off = await pair.offer(other)
        answer = await pair.decode.generate(taking(ids, hand_off))
        assert answer.ids == await alone(ids)
        assert answer.usage.hand_off_tokens == 12
        assert pair.decode.engine.counters().hand_off_failures == {"keys": 1}


async def test_the_tail_of_a_longer_prompt_is_not_read():
    ids = prompt(1, 23)
    async with Pair() as pair:
        answer = await pair.decode.generate(taking(ids[:22], await pair.offer(ids)))
        assert answer.ids == await alone(ids[:22])
        assert answer.usage.hand_off_bytes == 5 * BLOCK_BYTES
        assert pair.decode.engine.counters().hand_off_failures == {"keys": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 2**40},
        {"size_bytes": BLOCK_BYTES * 2},
        {"tags": ("00",)},
        {"tags": ("not hex", "00")},
        {"tags": ("00" * 16, "00" * 16)},
    ],
)
async def test_a_malformed_hand_off_is_a_failure_of_its_own_and_no_crash(change):
    ids = prompt(1, 23)
    async with Pair() as pair:
        hand_off = await pair.offer(ids)
        blocks = (hand_off.blocks[0].model_copy(update=change), *hand_off.blocks[1:])
        answer = await pair.decode.generate(
            taking(ids, hand_off.model_copy(update={"blocks": blocks}))
        )
        assert answer.ids == await alone(ids)
        assert pair.decode.engine.counters().hand_off_failures.total() == 1
        await pair.finish(hand_off)


async def test_an_offer_is_released_once_and_an_unknown_ticket_never():
    async with Pair() as pair:
        hand_off = await pair.offer(prompt(1, 23))
        free = pair.prefill.engine.load().free_blocks
        assert free == pair.prefill.setup.blocks - 6
        assert await pair.prefill.engine.release(hand_off.ticket)
        assert not await pair.prefill.engine.release(hand_off.ticket)
        assert not await pair.prefill.engine.release("p.1.99")
        pair.prefill.assert_all_free()
        assert pair.prefill.engine.counters().hand_offs_released == 1


async def test_the_leases_end_frees_the_pins():
    setup = Setup(transport=LoopbackTransport("p", Fabric()), lease_s=0.02)
    async with hash_engine(setup) as engine:
        await engine.generate(offering(prompt(1, 23)))
        async with asyncio.timeout(5.0):
            while not engine.engine.counters().hand_offs_expired:
                await asyncio.sleep(0.005)
        engine.assert_all_free()


async def test_pins_leave_room_for_others_as_soon_as_they_end():
    setup = Setup(blocks=8, transport=LoopbackTransport("p", Fabric()))
    async with hash_engine(setup) as engine, asyncio.TaskGroup() as tasks:
        hand_off = (await engine.generate(offering(prompt(1, 30)))).hand_off
        waits = tasks.create_task(engine.generate(request(prompt(2, 20), 3)))
        with pytest.raises(DeadlineExceeded):
            await engine.generate(request(prompt(3, 20), 3, deadline_ms=30))
        assert not waits.done()
        await engine.engine.release(hand_off.ticket)
        assert (await waits).ids == await alone(prompt(2, 20), 3)


async def test_a_client_that_leaves_wakes_those_who_waited_for_its_blocks():
    setup = Setup(blocks=8, transport=LoopbackTransport("p", Fabric()))
    async with hash_engine(setup) as engine, asyncio.TaskGroup() as tasks:
        await engine.generate(offering(prompt(1, 20)))
        stuck = tasks.create_task(engine.generate(request(prompt(2, 24), 3)))
        while engine.engine.load().free_blocks:
            await asyncio.sleep(0.001)
        waits = tasks.create_task(engine.generate(request(prompt(3, 5), 3)))
        while not engine.engine.load().waiting:
            await asyncio.sleep(0.001)
        stuck.cancel()
        assert (await waits).ids == await alone(prompt(3, 5), 3)


class StuckTransport(LoopbackTransport):
    """Its reads are late, and its sessions never come to an end: they may write for ever."""

    async def open(self, remote: RegionRef, *, deadline_s: float) -> "StuckTransport":
        return self

    async def read(self, spans: Sequence[Span], into: memoryview, *, deadline_s: float) -> None:
        raise TransferLate("nothing came")

    async def aclose(self) -> None:
        await asyncio.Event().wait()


async def test_blocks_that_a_late_transfer_may_still_write_to_are_never_used_again():
    ids = prompt(1, 23)
    fabric = Fabric()
    source = Setup(transport=LoopbackTransport("p", fabric))
    async with hash_engine(source) as prefill:
        hand_off = (await prefill.generate(offering(ids))).hand_off
        async with hash_engine(Setup(transport=StuckTransport("d", fabric))) as decode:
            answer = await decode.generate(taking(ids, hand_off))
            assert answer.ids == await alone(ids)
            assert decode.engine.counters().quarantined_blocks == 6
            assert decode.engine.load().free_blocks == decode.setup.blocks - 6
            decode.engine.check_integrity()


async def test_an_offer_that_is_cancelled_pins_nothing():
    entered, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    memory = memoryview(bytearray(64))

    def view(block: int) -> memoryview:
        loop.call_soon_threadsafe(entered.set)
        assert go_on.wait(20)
        return memory

    blocks = KvBlocks(4, FeedLog("w", epoch=1, tier="hbm", block_tokens=4))
    link = LoopbackTransport("p", Fabric())
    hand_offs = HandOffs(
        "w",
        [link.register(private_memory(256))],
        KvGeometry("layout", 4, (64,)),
        blocks,
        view,
        EngineCounters(),
        lease_s=30.0,
        urls=TicketUrls(release=str, progress=str),
        freed=Freed(),
    )
    taken = blocks.allocate(1)
    assert taken is not None
    asked = Request(1, [1, 2, 3], KeyChain(b"k", b"r", 4), 0.0, blocks=taken, computed=3)
    async with asyncio.TaskGroup() as tasks:
        offering_it = tasks.create_task(hand_offs.offer(asked))
        await entered.wait()
        assert hand_offs.holders() == [(taken[0],)]
        offering_it.cancel()
        await asyncio.wait({offering_it})
        go_on.set()
    assert hand_offs.holders() == []
    blocks.check_integrity([taken])


async def test_a_client_that_leaves_during_the_pull_frees_the_blocks():
    ids = prompt(1, 23)
    async with Pair(ChaosPlan(drop=1.0), deadline_s=20.0) as pair:
        await pair.decode.generate(request(ids[:9], 1))
        hand_off = await pair.offer(ids)
        async with asyncio.TaskGroup() as tasks:
            pulling = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
            while not pair.link.injected:
                await asyncio.sleep(0.001)
            assert pair.decode.engine.load().waiting == 1
            other = await pair.decode.generate(request(prompt(2, 9), 3))
            assert other.ids == await alone(prompt(2, 9), 3)
            pulling.cancel()
        await pair.finish(hand_off)


async def test_draining_ends_a_pull_that_does_not():
    ids = prompt(1, 23)
    async with Pair(ChaosPlan(drop=1.0), deadline_s=20.0) as pair, asyncio.TaskGroup() as tasks:
        pulling = tasks.create_task(pair.decode.generate(taking(ids, await pair.offer(ids))))
        while not pair.link.injected:
            await asyncio.sleep(0.001)
        await pair.decode.engine.drain(within_s=0.01)
        assert (await pulling).finish is FinishReason.CANCELLED
        pair.decode.assert_all_free()


async def test_a_pull_without_room_in_time_is_given_up_and_the_prompt_computed():
    ids = prompt(1, 23)
    async with Pair(blocks=16, deadline_s=0.05) as pair, asyncio.TaskGroup() as tasks:
        hand_off = (await pair.offer(ids)).model_copy(update={"lease_s": 0.15})
        pinned = (await pair.decode.generate(offering(prompt(2, 56)))).hand_off
        taking_it = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
        async with asyncio.timeout(5.0):
            while not pair.decode.engine.counters().hand_off_failures:
                await asyncio.sleep(0.005)
        assert pair.decode.engine.counters().hand_off_failures == {"no_room": 1}
        assert await pair.decode.engine.release(pinned.ticket)
        assert (await taking_it).ids == await alone(ids)


async def test_a_pull_waits_for_room_and_then_happens():
    ids = prompt(1, 23)
    async with Pair(blocks=16) as pair, asyncio.TaskGroup() as tasks:
        hand_off = await pair.offer(ids)
        full = pair.decode.engine.generate(request(prompt(2, 56), 8))
        await anext(full)
        pulling = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
        _ = [chunk async for chunk in full]
        answer = await pulling
        assert answer.usage.hand_off_tokens == 22
        assert answer.ids == await alone(ids)
