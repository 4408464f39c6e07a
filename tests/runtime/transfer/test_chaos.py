"""Injected faults: each ends as it must, and every corruption is found by the tags."""

import asyncio
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime import clock
from kimi_runtime.errors import RegionGone, TransferCancelled, TransferLate
from kimi_runtime.spec.transfer import TransferChaos
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.chaos import ChaosPlan, ChaosTransport, Fault
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.umbp import tags

BLOCK = 20_000
GROUPS = (4096, 10_000, 5904)
BLOCKS = 16


async def hand_off(plan, batches):
    """Read blocks through chaos and check each with its tags: (accepted wrong, refused, injected).

    What a decode worker does with a hand-off: one block a batch, checked after it arrived.
    """
    fabric = Fabric()
    memory = private_memory(BLOCK * BLOCKS)
    memory.view[:] = os.urandom(memory.size_bytes)
    owner = LoopbackTransport("owner", fabric)
    chaos = ChaosTransport(LoopbackTransport("reader", fabric), plan)
    ref = owner.register(memory)
    keys = [bytes([n]) * 16 for n in range(BLOCKS)]
    truth = [memory.view[n * BLOCK : (n + 1) * BLOCK] for n in range(BLOCKS)]
    wanted = [tags.block_tags(key, GROUPS, block) for key, block in zip(keys, truth, strict=True)]
    session = await chaos.open(ref, deadline_s=1.0)
    wrong = refused = 0
    for batch in range(batches):
        n = batch % BLOCKS
        into = memoryview(bytearray(BLOCK))
        try:
            await session.read([Span(n * BLOCK, 0, BLOCK)], into, deadline_s=0.001)
        except (TransferLate, RegionGone):
            refused += 1
            continue
        if not tags.matches(keys[n], GROUPS, into, wanted[n]):
            refused += 1
        elif into != truth[n]:
            wrong += 1
    await chaos.aclose()
    await owner.aclose()
    return wrong, refused, [injection.fault for injection in chaos.injected]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_wrong_bytes_are_never_accepted_whatever_the_faults(seed):
    plan = ChaosPlan(
        seed, delay=0.1, drop=0.05, duplicate=0.1, corrupt=0.3, stall=0.05, rehome=0.1, delay_s=0
    )
    wrong, refused, injected = asyncio.run(hand_off(plan, 60))
    assert wrong == 0
    harmless = (Fault.DELAY, Fault.DUPLICATE)
    assert refused >= sum(fault not in harmless for fault in injected)


def test_every_single_flipped_bit_is_found():
    wrong, refused, injected = asyncio.run(hand_off(ChaosPlan(seed=7, corrupt=1.0), 400))
    assert (wrong, refused, injected) == (0, 400, [Fault.CORRUPT] * 400)


def test_a_process_s_file_names_the_faults_and_each_is_counted():
    asked = TransferChaos(seed=7, corrupt=1.0, delay_time=2.0)
    assert ChaosPlan.of(asked) == ChaosPlan(seed=7, corrupt=1.0, delay_s=2.0)
    assert all(
        ChaosPlan.of(TransferChaos(**{fault: 1.0})) == ChaosPlan(**{fault: 1.0}) for fault in Fault
    )


def test_equal_seeds_give_equal_faults():
    plan = ChaosPlan(seed=3, delay=0.2, corrupt=0.2, rehome=0.2, delay_s=0)
    assert asyncio.run(hand_off(plan, 40))[2] == asyncio.run(hand_off(plan, 40))[2]


@pytest.fixture
async def chaotic():
    """Opens a session of one fault, to 4 KiB that may be written."""
    fabric = Fabric()
    owner = LoopbackTransport("owner", fabric)
    memory = private_memory(4096)
    ref = owner.register(memory, writable=True)
    opened = []

    async def open_with(**chances):
        chaos = ChaosTransport(LoopbackTransport("reader", fabric), ChaosPlan(**chances))
        opened.append(chaos)
        return await chaos.open(ref, deadline_s=1.0), memory

    yield open_with
    for chaos in opened:
        await chaos.aclose()
    await owner.aclose()


@pytest.mark.parametrize("fault", ["drop", "stall"])
async def test_what_never_ends_is_ended_by_the_deadline(chaotic, fault):
    session, _ = await chaotic(**{fault: 1.0})
    start_s = clock.now_s()
    with pytest.raises(TransferLate):
        await session.read([Span(0, 0, 8)], memoryview(bytearray(8)), deadline_s=0.05)
    assert 0.05 <= clock.now_s() - start_s < 5
    assert session.counters.failed_batches <= session.counters.batches == 1


@pytest.mark.parametrize("fault", ["drop", "stall", "delay"])
async def test_closing_ends_what_is_stuck(chaotic, fault):
    session, _ = await chaotic(**{fault: 1.0}, delay_s=60.0)
    reading = asyncio.gather(
        session.read([Span(0, 0, 8)], memoryview(bytearray(8)), deadline_s=60.0),
        return_exceptions=True,
    )
    await asyncio.sleep(0)
    await session.aclose()
    assert isinstance((await reading)[0], TransferCancelled)


async def test_a_corrupted_write_spares_the_source(chaotic):
    session, memory = await chaotic(corrupt=1.0)
    data = memoryview(bytes(range(256)))
    await session.write([Span(0, 0, 256)], data, deadline_s=1.0)
    assert data == bytes(range(256))
    assert memory.view[:256] != data


async def test_a_duplicate_moves_its_bytes_twice(chaotic):
    session, _ = await chaotic(duplicate=1.0)
    await session.read([Span(0, 0, 100)], memoryview(bytearray(100)), deadline_s=1.0)
    assert session.counters.read_bytes == 200


async def test_a_rehomed_region_is_gone(chaotic):
    session, _ = await chaotic(rehome=1.0)
    with pytest.raises(RegionGone, match="epoch"):
        await session.read([Span(0, 0, 8)], memoryview(bytearray(8)), deadline_s=1.0)


def test_chances_that_pass_one_are_refused():
    with pytest.raises(ValueError, match="exclusive"):
        ChaosPlan(drop=0.7, corrupt=0.4)
