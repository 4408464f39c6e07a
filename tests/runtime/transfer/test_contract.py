"""What every transport promises."""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from kimi_runtime.errors import ConfigError, PeerGone, RegionGone, TransferCancelled, TransferLate
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer import open_transport
from kimi_runtime.transfer.base import LinkCounters, Session, Span, Transport
from kimi_runtime.transfer.chaos import ChaosPlan
from kimi_runtime.transfer.memory import Memory, private_memory, shared_memory
from kimi_runtime.transfer.network import NetworkSettings

SIZE = 3 << 20
SOON_S = 20.0


@dataclass
class Pair:
    """An owner with a region of known bytes, and a reader."""

    owner: Transport
    reader: Transport
    memory: Memory
    ref: RegionRef
    bytes: bytes

    async def session(self) -> Session:
        return await self.reader.open(self.ref, deadline_s=SOON_S)


def new_memory(transport: Transport, folder: Path, size: int = SIZE) -> Memory:
    if transport.name == "shm":
        return shared_memory(folder / f"region-{os.urandom(4).hex()}", size)
    return private_memory(size)


TRANSPORTS = ["loopback", "shm", "tcp", "verbs"]


@pytest.fixture(params=[*TRANSPORTS, *(f"chaos({name})" for name in TRANSPORTS)])
async def pair(request, tmp_path):
    name = request.param.removeprefix("chaos(").removesuffix(")")
    chaos = ChaosPlan() if request.param.startswith("chaos") else None
    network = NetworkSettings(call_keys=(os.urandom(32),))
    try:
        owner = await open_transport(name, peer="owner", chaos=chaos, network=network)
    except ConfigError as exc:
        if name != "verbs":
            raise
        pytest.skip(str(exc))
    reader = await open_transport(name, peer="reader", chaos=chaos, network=network)
    memory = new_memory(owner, tmp_path)
    data = os.urandom(SIZE)
    memory.view[:] = data
    yield Pair(owner, reader, memory, owner.register(memory, writable=True), data)
    await reader.aclose()
    await owner.aclose()


async def test_spans_arrive_where_they_were_asked_for_and_nothing_else_changes(pair):
    session = await pair.session()
    into = memoryview(bytearray(SIZE))
    spans = [Span(0, 100, 7), Span(SIZE - 5, 0, 5), Span(4096, 8192, 1 << 20), Span(7, 107, 3)]
    await session.read(spans, into, deadline_s=SOON_S)
    expected = bytearray(SIZE)
    for remote, local, size in spans:
        expected[local : local + size] = pair.bytes[remote : remote + size]
    assert into == expected


async def test_a_write_is_seen_by_the_owner(pair):
    session = await pair.session()
    data = os.urandom(2 << 20)
    await session.write([Span(1000, 5, (2 << 20) - 5)], memoryview(data), deadline_s=SOON_S)
    expected = bytearray(pair.bytes)
    expected[1000 : 1000 + len(data) - 5] = data[5:]
    assert pair.memory.view == expected


async def test_a_read_only_region_refuses_writes_but_can_be_read(pair):
    ref = pair.owner.register(pair.memory)
    session = await pair.reader.open(ref, deadline_s=SOON_S)
    with pytest.raises(RegionGone, match="reading only"):
        await session.write([Span(0, 0, 8)], memoryview(bytes(8)), deadline_s=SOON_S)
    into = memoryview(bytearray(8))
    await session.read([Span(0, 0, 8)], into, deadline_s=SOON_S)
    assert into == pair.bytes[:8]
    assert pair.memory.view == pair.bytes


@pytest.mark.parametrize(
    "span",
    [Span(SIZE - 7, 0, 8), Span(-1, 0, 8), Span(0, 97, 8), Span(0, -1, 8), Span(0, 0, 0)],
    ids=["remote end", "remote start", "local end", "local start", "empty"],
)
async def test_a_span_outside_either_memory_moves_nothing(pair, span):
    session = await pair.session()
    into = memoryview(bytearray(104))
    with pytest.raises(ValueError, match="Span"):
        await session.read([Span(0, 0, 8), span], into, deadline_s=SOON_S)
    assert into == bytes(104)
    with pytest.raises(ValueError, match="Span"):
        await session.write([span], into, deadline_s=SOON_S)


async def test_an_empty_batch_succeeds(pair):
    session = await pair.session()
    await session.read([], memoryview(bytearray(1)), deadline_s=SOON_S)


async def test_a_released_region_can_neither_be_opened_nor_read(pair):
    session = await pair.session()
    pair.owner.release(pair.ref)
    pair.owner.release(pair.ref)  # releasing twice is allowed
    with pytest.raises(RegionGone):
        await session.read([Span(0, 0, 8)], memoryview(bytearray(8)), deadline_s=SOON_S)
    with pytest.raises(RegionGone):
        await session.write([Span(0, 0, 8)], memoryview(bytearray(8)), deadline_s=SOON_S)
    with pytest.raises(RegionGone):
        await pair.session()


async def test_releasing_one_region_leaves_another_of_the_same_memory(pair):
    other = pair.owner.register(pair.memory)
    pair.owner.release(pair.ref)
    session = await pair.reader.open(other, deadline_s=SOON_S)
    into = memoryview(bytearray(8))
    await session.read([Span(8, 0, 8)], into, deadline_s=SOON_S)
    assert into == pair.bytes[8:16]


async def test_another_epoch_or_key_is_another_region(pair):
    for change in ({"epoch": pair.ref.epoch + 1}, {"key": pair.ref.key + 1_000_003}):
        with pytest.raises(RegionGone):
            await pair.reader.open(pair.ref.model_copy(update=change), deadline_s=SOON_S)


async def test_no_time_is_late_and_moves_nothing(pair):
    session = await pair.session()
    into = memoryview(bytearray(SIZE))
    with pytest.raises(TransferLate):
        await session.read([Span(0, 0, SIZE)], into, deadline_s=0.0)
    assert into == bytes(SIZE)


async def test_a_cancelled_read_leaves_the_target_alone_from_then_on(pair):
    session = await pair.session()
    into = memoryview(bytearray(SIZE))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(session.read([Span(0, 0, SIZE)], into, deadline_s=SOON_S))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        into[:] = bytes(SIZE)
        await session.read([Span(0, 0, 1)], memoryview(bytearray(1)), deadline_s=SOON_S)
    assert task.cancelled()
    assert into == bytes(SIZE)


async def test_concurrent_batches_do_not_mix(pair):
    session = await pair.session()
    part = SIZE // 16
    targets = [memoryview(bytearray(part)) for _ in range(16)]
    async with asyncio.TaskGroup() as tasks:
        for n, target in enumerate(targets):
            tasks.create_task(session.read([Span(n * part, 0, part)], target, deadline_s=SOON_S))
    assert b"".join(targets) == pair.bytes


async def test_counters_tell_bytes_batches_failures_and_time(pair):
    session = await pair.session()
    assert session.counters == LinkCounters()
    buffer = memoryview(bytearray(SIZE))
    await session.read([Span(0, 0, 1000), Span(2000, 2000, 24)], buffer, deadline_s=SOON_S)
    await session.write([Span(0, 0, 512)], buffer, deadline_s=SOON_S)
    with pytest.raises(TransferLate):
        await session.read([Span(0, 0, SIZE)], buffer, deadline_s=0.0)
    counters = session.counters
    assert (counters.read_bytes, counters.written_bytes) == (1024, 512)
    assert (counters.batches, counters.failed_batches) == (3, 1)
    assert counters.busy_s > 0


async def test_closing_a_session_ends_its_running_batches_and_refuses_new_ones(pair):
    session = await pair.session()
    into = memoryview(bytearray(SIZE))
    reading = asyncio.gather(
        session.read([Span(0, 0, SIZE)], into, deadline_s=SOON_S), return_exceptions=True
    )
    await asyncio.sleep(0)
    await session.aclose()
    into[:] = bytes(SIZE)
    assert isinstance((await reading)[0], TransferCancelled)
    with pytest.raises(TransferCancelled):
        await session.read([Span(0, 0, 1)], into, deadline_s=SOON_S)
    await session.aclose()
    assert into == bytes(SIZE)


async def test_closing_the_owner_takes_its_regions_away(pair):
    session = await pair.session()
    await pair.owner.aclose()
    with pytest.raises((RegionGone, PeerGone)):
        await session.read([Span(0, 0, 8)], memoryview(bytearray(8)), deadline_s=SOON_S)


async def test_closing_the_reader_closes_its_sessions(pair):
    session = await pair.session()
    await pair.reader.aclose()
    with pytest.raises(TransferCancelled):
        await session.read([Span(0, 0, 8)], memoryview(bytearray(8)), deadline_s=SOON_S)
