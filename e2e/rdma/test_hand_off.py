"""KV handed over by RDMA between two processes, and what goes wrong on the way. Needs a device."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimi_runtime.errors import (
    ConfigError,
    PeerGone,
    RegionGone,
    TransferError,
    TransferLate,
)
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.memory import DeviceMemory, private_memory
from kimi_runtime.transfer.network import NetworkSettings, RdmaSettings

verbs = pytest.importorskip("kimi_runtime.transfer.verbs", reason="pyverbs is not installed")

pytestmark = pytest.mark.rdma
KEY = b"k" * 32
SOON_S = 30.0
BLOCK = 256 << 10
BLOCKS = 64


def settings(**rdma):
    return NetworkSettings((KEY,), rdma=RdmaSettings(**rdma))


class Prefill:
    """The owner's process."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rwb", 0)
        pid, _, ref = self._lines.readline().decode().partition(" ")
        self.pid, self.ref = int(pid), RegionRef.model_validate_json(ref)

    def do(self, command):
        """Have it done; the first byte of its memory."""
        self._lines.write(f"{command}\n".encode())
        return int(self._lines.readline())

    def signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def close(self):
        self.signal(signal.SIGKILL)
        self._lines.read()
        self._lines.close()
        self._socket.close()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    """The socket at which owners are born."""
    path = str(tmp_path_factory.mktemp("prefill") / "socket")
    command = [sys.executable, str(Path(__file__).parent / "prefill.py"), path]
    process = subprocess.Popen([*command, str(BLOCK), str(BLOCKS)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    yield path
    process.kill()
    process.communicate()


@pytest.fixture
def prefill(nursery):
    owner = Prefill(nursery)
    yield owner
    owner.close()


@pytest.fixture
async def decode():
    """The reader's transport, its memory, and the reference that pins it."""
    try:
        transport = verbs.VerbsTransport("decode", settings(send_depth=16))
    except ConfigError as exc:
        pytest.skip(str(exc))
    memory = private_memory(BLOCK * BLOCKS)
    transport.register(memory)
    yield transport, memory
    await transport.aclose()


def missing_spans():
    """Every other block, into places of its own."""
    return [Span(n * BLOCK, (BLOCKS - 1 - n) * BLOCK, BLOCK) for n in range(0, BLOCKS, 2)]


def assert_handed_over(memory):
    for n in range(0, BLOCKS, 2):
        at = (BLOCKS - 1 - n) * BLOCK
        assert memory.view[at : at + BLOCK] == bytes([n + 1]) * BLOCK
        assert not memory.view[at - BLOCK] if at else True


async def wait_for_bytes(memory, at):
    async with asyncio.timeout(SOON_S):
        while not memory.view[at]:
            await asyncio.sleep(0)


async def test_missing_blocks_are_handed_over_between_two_processes(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    await session.read(missing_spans(), memory.view, deadline_s=SOON_S)
    assert_handed_over(memory)
    assert session.counters.read_bytes == BLOCK * BLOCKS // 2


async def test_a_write_reaches_the_other_process(prefill, decode):
    transport, _ = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    await session.write([Span(0, 0, 4)], memoryview(b"\xee" * 4), deadline_s=SOON_S)
    assert prefill.do("look") == 0xEE


async def test_a_peer_killed_in_the_middle_of_a_read_is_gone(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    whole = [Span(0, 0, BLOCK * BLOCKS)]
    reading = asyncio.gather(
        session.read(whole, memory.view, deadline_s=SOON_S), return_exceptions=True
    )
    await wait_for_bytes(memory, 0)
    start = time.monotonic()
    prefill.signal(signal.SIGKILL)
    outcome = (await reading)[0]
    assert isinstance(outcome, PeerGone) or outcome is None  # None: it had just ended
    assert time.monotonic() - start < 10
    memory.view[:] = bytes(BLOCK * BLOCKS)
    await asyncio.sleep(0.2)  # what is still under way would show
    assert memory.view == bytes(BLOCK * BLOCKS)
    with pytest.raises(PeerGone):
        await session.read(whole, memory.view, deadline_s=SOON_S)
    with pytest.raises(PeerGone):
        await transport.open(prefill.ref, deadline_s=1.0)


async def test_a_region_released_by_the_other_process_is_gone(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    await session.read([Span(0, 0, 8)], memory.view, deadline_s=SOON_S)
    prefill.do("release")
    with pytest.raises(RegionGone):
        await session.read([Span(0, 0, 8)], memory.view, deadline_s=SOON_S)
    with pytest.raises(RegionGone):
        await transport.open(prefill.ref, deadline_s=SOON_S)


async def test_a_region_deregistered_in_the_middle_of_a_read_gives_no_success(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    reading = asyncio.gather(
        session.read([Span(0, 0, BLOCK * BLOCKS)], memory.view, deadline_s=SOON_S),
        return_exceptions=True,
    )
    await wait_for_bytes(memory, 0)
    await asyncio.to_thread(prefill.do, "release")
    outcome = (await reading)[0]
    if outcome is None:  # it was done before: then every byte is right
        assert all(memory.view[n * BLOCK] == n + 1 for n in range(BLOCKS))
    else:
        assert isinstance(outcome, RegionGone)


async def test_queue_pairs_in_error_are_reset_and_reconnected(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    for _ in range(3):
        session._queues.flush()
        assert session._queues.broken == [0, 1, 2, 3]
        await session.read(missing_spans(), memory.view, deadline_s=SOON_S)
        assert session._queues.broken == []
    assert_handed_over(memory)


async def test_a_queue_pair_that_fails_under_one_batch_does_not_fail_another(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    async with asyncio.TaskGroup() as tasks:
        for span in missing_spans():
            tasks.create_task(session.read([span], memory.view, deadline_s=SOON_S))
        await wait_for_bytes(memory, (BLOCKS - 1) * BLOCK)
        session._queues.flush()
    assert_handed_over(memory)


async def test_a_request_that_the_card_refuses_fails_alone_and_the_pair_recovers(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    good = session._opened
    session._opened = type(good)(
        address=good.address,
        remote_key=good.remote_key ^ 0xFF00,
        writable=True,
        port=good.port,
        queue_pairs=good.queue_pairs,
    )
    with pytest.raises(RegionGone):
        await session.read([Span(0, 0, 8)], memory.view, deadline_s=SOON_S)
    session._opened = good
    await session.read(missing_spans(), memory.view, deadline_s=SOON_S)
    assert_handed_over(memory)


async def test_a_cancelled_read_leaves_both_sides_usable(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    for delay in range(5):
        task = asyncio.ensure_future(
            session.read([Span(0, 0, BLOCK * BLOCKS)], memory.view, deadline_s=SOON_S)
        )
        for _ in range(delay * 20):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        memory.view[:] = bytes(BLOCK * BLOCKS)
        await asyncio.sleep(0.05)
        assert memory.view == bytes(BLOCK * BLOCKS)
    await session.read(missing_spans(), memory.view, deadline_s=SOON_S)
    assert_handed_over(memory)


async def test_a_stopped_peer_does_not_matter_to_a_one_sided_read(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    prefill.signal(signal.SIGSTOP)
    try:
        await session.read(missing_spans(), memory.view, deadline_s=SOON_S)
        with pytest.raises(PeerGone, match="did not answer"):
            await transport.open(prefill.ref, deadline_s=0.5)
    finally:
        prefill.signal(signal.SIGCONT)
    assert_handed_over(memory)


async def test_a_read_that_can_t_finish_in_time_is_late_and_over(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    whole = [Span(0, 0, BLOCK * BLOCKS)]
    with contextlib.suppress(TransferLate):
        for _ in range(100):  # a busy machine may look at its clock only when the bytes are there
            await session.read(whole, memory.view, deadline_s=0.002)
        pytest.fail("16 MiB were read within 2 ms a hundred times")
    memory.view[:] = bytes(BLOCK * BLOCKS)
    await asyncio.sleep(0.1)
    assert memory.view == bytes(BLOCK * BLOCKS)
    await session.read(missing_spans(), memory.view, deadline_s=SOON_S)
    assert_handed_over(memory)


async def test_more_spans_than_the_send_queues_hold_are_posted_in_turn(prefill, decode):
    transport, memory = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    spans = [Span(n * 2000, n * 1000, 1000) for n in range(2000)]
    await session.read(spans, memory.view, deadline_s=SOON_S)
    source = b"".join(bytes([n + 1]) * BLOCK for n in range(BLOCKS))
    for remote, local, size in spans:
        assert memory.view[local : local + size] == source[remote : remote + size]


async def test_memory_that_is_not_registered_is_read_into_as_well(prefill, decode):
    transport, _ = decode
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    into = memoryview(bytearray(BLOCK * 2))
    await session.read([Span(BLOCK, 5, BLOCK)], into, deadline_s=SOON_S)
    assert into[5 : 5 + BLOCK] == bytes([2]) * BLOCK
    assert len(transport._local._kept) == 1


async def test_a_dma_buf_the_driver_can_t_take_is_refused_with_its_reason(decode):
    transport, _ = decode
    descriptor = os.open("/dev/null", os.O_RDWR)
    try:
        with pytest.raises(TransferError, match=r"registering 64KiB with rxe0 failed"):
            transport.register(DeviceMemory(descriptor, 4096, 65536))
    finally:
        os.close(descriptor)


async def test_an_unknown_device_or_address_names_what_is_there(decode):
    with pytest.raises(ConfigError, match=r"no RDMA device 'mlx5_9'; this host has rxe0"):
        verbs.VerbsTransport("x", settings(devices=["mlx5_9"]))
    with pytest.raises(ConfigError, match=r"port 1 of rxe0 has no GID 200; it has .*roce-v2 10\."):
        verbs.VerbsTransport("x", settings(gid_index=200))
    with pytest.raises(ConfigError, match=r"port 9 is not active on rxe0"):
        verbs.VerbsTransport("x", settings(port=9))
    with pytest.raises(ConfigError, match=r"port 1 of rxe0 has no partition at P_Key index 40"):
        verbs.VerbsTransport("x", settings(pkey_index=40))


async def test_the_first_device_that_is_there_is_used(decode):
    transport = verbs.VerbsTransport("x", settings(devices=["mlx5_9", "rxe0"]))
    assert transport.device.startswith("rxe0 ")
    await transport.aclose()


async def test_device_objects_and_threads_end_with_the_transport(prefill):
    def objects():
        shown = subprocess.run(["rdma", "-j", "resource"], capture_output=True, check=True)
        (device,) = json.loads(shown.stdout)
        return {kind: device[kind] for kind in ("qp", "cq", "mr", "pd")}

    def threads():
        return [thread.name for thread in threading.enumerate() if "verbs" in thread.name]

    before = objects()
    transport = verbs.VerbsTransport("decode", settings())
    memory = private_memory(BLOCK * BLOCKS)
    transport.register(memory)
    session = await transport.open(prefill.ref, deadline_s=SOON_S)
    reading = asyncio.gather(
        session.read([Span(0, 0, BLOCK * BLOCKS)], memory.view, deadline_s=SOON_S),
        return_exceptions=True,
    )
    await asyncio.sleep(0)
    await transport.aclose()
    await reading
    prefill.do("look")
    async with asyncio.timeout(SOON_S):
        while objects() != before or threads():
            await asyncio.sleep(0.01)
