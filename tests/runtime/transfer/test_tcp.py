"""What only the tcp transport has: peers to prove, connections that break, and threads that end."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from kimi_runtime import clock
from kimi_runtime.errors import ConfigError, PeerGone, RegionGone, TransferLate
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer import serving
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.transfer.network import NetworkSettings, split_address
from kimi_runtime.transfer.tcp import TcpTransport

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SOON_S = 10.0
SIZE = 4 << 20

OWNER = """
import sys
from kimi_runtime.transfer.memory import private_memory
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.tcp import TcpTransport
memory = private_memory(int(sys.argv[1]))
memory.view[:] = b"x" * memory.size_bytes
settings = NetworkSettings((b"k" * 32,), port=int(sys.argv[2]))
print(TcpTransport("owner", settings).register(memory).model_dump_json(), flush=True)
sys.stdin.read()
"""


def transport(peer, *keys, **settings):
    return TcpTransport(peer, NetworkSettings(keys or (KEY,), **settings))


def start_owner(size, port=0):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(size), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    return process, RegionRef.model_validate_json(process.stdout.readline())


@pytest.fixture
def owner():
    """Another process with a region, and its reference."""
    process, ref = start_owner(256 << 20)
    yield process, ref
    process.kill()
    process.communicate()


@pytest.fixture
async def pair():
    """An owner and a reader in this process, with a filled region between them."""
    owner, reader = transport("owner"), transport("reader")
    memory = private_memory(SIZE)
    memory.view[:] = os.urandom(SIZE)
    yield owner, reader, memory, owner.register(memory, writable=True)
    await reader.aclose()
    await owner.aclose()


def streams_open(owner):
    return owner._server.connections


async def until(condition, what):
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


async def read_all(session, size=SIZE, deadline_s=SOON_S):
    into = memoryview(bytearray(size))
    await session.read([Span(0, 0, size)], into, deadline_s=deadline_s)
    return into


async def test_a_batch_is_spread_over_the_streams(pair):
    owner, reader, memory, ref = pair
    session = await reader.open(ref, deadline_s=SOON_S)
    assert streams_open(owner) == 1
    assert await read_all(session) == memory.view
    assert streams_open(owner) == 4
    await session.aclose()
    await until(lambda: streams_open(owner) == 0, "the owner keeps no stream of a closed session")


async def test_many_scattered_spans_arrive_in_place(pair):
    _, reader, memory, ref = pair
    session = await reader.open(ref, deadline_s=SOON_S)
    count, size = 3000, 700
    spans = [Span(n * 1000, (count - 1 - n) * size, size) for n in range(count)]
    into = memoryview(bytearray(count * size))
    await session.read(spans, into, deadline_s=SOON_S)
    for remote, local, _ in spans:
        assert into[local : local + size] == memory.view[remote : remote + size]


@pytest.mark.parametrize(
    ("owner_keys", "reader_keys"),
    [((KEY, OTHER_KEY), (KEY,)), ((OTHER_KEY,), (KEY, OTHER_KEY)), ((KEY,), (OTHER_KEY, KEY))],
    ids=["owner first", "reader first", "reader has a newer one"],
)
async def test_during_a_rotation_either_end_may_be_first(owner_keys, reader_keys):
    owner, reader = transport("owner", *owner_keys), transport("reader", *reader_keys)
    try:
        session = await reader.open(owner.register(private_memory(64)), deadline_s=SOON_S)
        assert await read_all(session, 64) == bytes(64)
    finally:
        await reader.aclose()
        await owner.aclose()


async def test_a_peer_without_the_call_key_reaches_nothing(pair):
    owner, _, _, ref = pair
    stranger = transport("stranger", OTHER_KEY)
    with pytest.raises(PeerGone, match="call key"):
        await stranger.open(ref, deadline_s=SOON_S)
    await stranger.aclose()
    await until(lambda: streams_open(owner) == 0, "it was dropped")


async def test_an_owner_without_the_call_key_is_not_believed():
    impostor, reader = transport("owner", OTHER_KEY), transport("reader")
    ref = impostor.register(private_memory(64))
    with pytest.raises(PeerGone, match="call key"):
        await reader.open(ref, deadline_s=SOON_S)
    await reader.aclose()
    await impostor.aclose()


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)])
async def test_noise_on_the_port_ends_only_its_own_connection(pair, noise):
    owner, reader, memory, ref = pair
    with socket.create_connection(split_address(ref.address)) as stranger:
        stranger.sendall(noise)
        session = await reader.open(ref, deadline_s=SOON_S)
        assert await read_all(session) == memory.view
    await until(lambda: streams_open(owner) == 4, "the stranger is gone")


async def test_who_does_not_say_who_it_is_is_dropped(pair, monkeypatch):
    owner, _, _, ref = pair
    monkeypatch.setattr(serving, "HELLO_S", 0.0)
    with socket.create_connection(split_address(ref.address)):
        await until(lambda: streams_open(owner) == 1, "it is there")
        await until(lambda: streams_open(owner) == 0, "and was dropped while it said nothing")


async def test_a_malformed_request_ends_the_stream_and_moves_nothing(pair):
    owner, reader, memory, ref = pair
    before = bytes(memory.view)
    session = await reader.open(ref, deadline_s=SOON_S)
    stream = session._streams[0]
    lie = session._remote.model_copy(update={"size_bytes": 2 * SIZE})
    session._remote = lie  # so that our own check lets the span pass
    with pytest.raises(PeerGone):
        await session.write([Span(SIZE - 8, 0, 16)], memoryview(bytes(16)), deadline_s=SOON_S)
    assert memory.view == before
    assert stream._sock is None
    await until(lambda: streams_open(owner) == 0, "the owner dropped it")


async def test_a_killed_owner_is_gone_and_its_successor_has_other_regions(owner):
    process, ref = owner
    reader = transport("reader")
    session = await reader.open(ref, deadline_s=SOON_S)
    assert await read_all(session, 1 << 20) == b"x" * (1 << 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(PeerGone):
        await read_all(session, 1 << 20)
    _, port = split_address(ref.address)
    successor, _ = start_owner(256 << 20, port)
    try:
        with pytest.raises(RegionGone):
            await read_all(session, 1 << 20)
    finally:
        successor.kill()
        successor.communicate()
    await reader.aclose()


async def test_an_owner_killed_in_the_middle_of_a_read_ends_it(owner):
    process, ref = owner
    reader = transport("reader")
    session = await reader.open(ref, deadline_s=SOON_S)
    into = memoryview(bytearray(256 << 20))
    reading = asyncio.gather(
        session.read([Span(0, 0, 256 << 20)], into, deadline_s=SOON_S), return_exceptions=True
    )
    await until(lambda: into[0] or into[-1] or into[128 << 20], "bytes arrive")
    process.send_signal(signal.SIGKILL)
    assert isinstance((await reading)[0], PeerGone)
    assert (session.counters.read_bytes, session.counters.failed_batches) == (0, 1)
    await reader.aclose()


async def test_a_stalled_owner_makes_a_read_late_and_the_target_is_left_alone(owner):
    process, ref = owner
    reader = transport("reader")
    session = await reader.open(ref, deadline_s=SOON_S)
    await read_all(session, 4)
    process.send_signal(signal.SIGSTOP)
    try:
        into = memoryview(bytearray(256 << 20))
        start_s = clock.now_s()
        with pytest.raises(TransferLate):
            await session.read([Span(0, 0, 256 << 20)], into, deadline_s=0.3)
        assert clock.now_s() - start_s < 3.0
        with pytest.raises(PeerGone, match="did not answer"):
            await reader.open(ref, deadline_s=0.2)
        into[:16] = bytes(16)
    finally:
        process.send_signal(signal.SIGCONT)
    assert await read_all(session, 1 << 20) == b"x" * (1 << 20)
    assert into[:16] == bytes(16)
    await reader.aclose()


async def test_a_broken_idle_stream_is_made_anew(pair):
    owner, reader, memory, ref = pair
    session = await reader.open(ref, deadline_s=SOON_S)
    await read_all(session)
    for stream in session._streams:
        stream._sock.shutdown(socket.SHUT_RDWR)  # as a firewall that forgot it
    await until(lambda: streams_open(owner) == 0, "they broke")
    assert await read_all(session) == memory.view


async def test_releasing_a_region_while_it_is_read_gives_no_bytes_away(pair):
    owner, reader, memory, _ = pair
    outcomes = []
    for _ in range(20):
        ref = owner.register(memory)
        session = await reader.open(ref, deadline_s=SOON_S)
        reading = asyncio.gather(read_all(session), return_exceptions=True)
        for _ in range(len(outcomes)):
            await asyncio.sleep(0)
        owner.release(ref)
        kept = bytes(memory.view[:64])
        memory.view[:64] = bytes(64)  # somebody else's now
        outcome = (await reading)[0]
        assert isinstance(outcome, RegionGone) or outcome[:64] == kept
        memory.view[:64] = kept
        outcomes.append(type(outcome))
        await session.aclose()
    assert RegionGone in outcomes


async def test_no_write_lands_after_a_release(pair):
    owner, reader, memory, _ = pair
    data = memoryview(b"\xff" * SIZE)
    for turn in range(20):
        ref = owner.register(memory, writable=True)
        session = await reader.open(ref, deadline_s=SOON_S)
        memory.view[:] = bytes(SIZE)
        writing = asyncio.gather(
            session.write([Span(0, 0, SIZE)], data, deadline_s=SOON_S), return_exceptions=True
        )
        for _ in range(turn):
            await asyncio.sleep(0)
        owner.release(ref)
        memory.view[:] = bytes(SIZE)
        await writing
        await session.aclose()
        assert memory.view == bytes(SIZE)


async def test_everything_ends_with_the_transport():
    def threads():
        return {thread for thread in threading.enumerate() if "-tcp-" in thread.name}

    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        owner, reader = transport("owner"), transport("reader")
        memory = private_memory(SIZE)
        session = await reader.open(owner.register(memory), deadline_s=SOON_S)
        await read_all(session)
        reading = asyncio.gather(read_all(session), return_exceptions=True)
        await asyncio.sleep(0)
        await reader.aclose()
        await owner.aclose()
        await reading
    await until(lambda: not threads(), "no thread is left")
    assert descriptors() <= before
    data = memory.view.obj
    memory.view.release()
    data.close()  # BufferError if another view of it were left


async def test_what_is_not_an_address_names_what_is_wrong():
    with pytest.raises(ConfigError, match="call key"):
        NetworkSettings(())
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        transport("owner", host="203.0.113.1").register(private_memory(8))
    reader = transport("reader")
    ref = RegionRef(transport="tcp", peer="p", address="nowhere", key=1, size_bytes=8, epoch=1)
    with pytest.raises(PeerGone, match="host:port"):
        await reader.open(ref, deadline_s=SOON_S)
    await reader.aclose()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_both_families_of_addresses_work(host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    owner, reader = transport("owner", host=host), transport("reader")
    try:
        ref = owner.register(private_memory(64))
    except ConfigError as exc:
        pytest.skip(str(exc))
    session = await reader.open(ref, deadline_s=SOON_S)
    assert await read_all(session, 64) == bytes(64)
    await reader.aclose()
    await owner.aclose()
