"""The wire format of the pool's socket."""

import contextlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect import payloads, small_puts, wire
from kimi_connect.frames import MAX_PAYLOAD, Frame, FrameDecoder, pack_frame
from kimi_connect.wire import Commitment, Extent, Gap, Grant, Granted, GroupTag, Op

keys = st.lists(st.binary(min_size=16, max_size=16), max_size=5)
sessions = st.binary(min_size=16, max_size=16)
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
extents = st.lists(st.builds(Extent, u64, u32), max_size=4).map(tuple)
group_tags = st.lists(
    st.builds(GroupTag, u32, st.binary(min_size=16, max_size=16)), max_size=4
).map(tuple)
some_bytes = st.binary(min_size=1, max_size=40).map(memoryview)
pinned = st.builds(wire.PinnedBlock, u64, u32, group_tags, extents)
MESSAGES = {
    "keys": (payloads.pack_keys, payloads.unpack_keys, keys),
    "pin": (
        lambda message: payloads.pack_pin(*message),
        payloads.unpack_pin,
        st.tuples(keys, st.integers(0, 10**6).map(float), st.text(max_size=20)),
    ),
    "reserve": (
        lambda message: payloads.pack_reserve(*message),
        payloads.unpack_reserve,
        st.tuples(
            st.lists(st.tuples(sessions, st.integers(1, 2**32 - 1)), max_size=5),
            st.text(max_size=20),
            st.sampled_from(wire.Priority),
        ),
    ),
    "put": (
        lambda message: small_puts.pack_put(*message),
        small_puts.unpack_put,
        st.tuples(
            st.lists(
                st.builds(small_puts.SmallBlock, sessions, group_tags, some_bytes), max_size=5
            ),
            st.text(max_size=20),
            st.sampled_from(wire.Priority),
        ),
    ),
    "hint": (
        payloads.pack_hint,
        payloads.unpack_hint,
        st.builds(
            payloads.HintFields,
            sessions,
            st.sampled_from(wire.HintKind),
            keys,
            st.none() | st.integers(0, 10**6).map(float),
            sessions,
            st.text(max_size=20),
        ),
    ),
    "reserved": (
        payloads.pack_reserved,
        payloads.unpack_reserved,
        st.lists(st.builds(Granted, st.sampled_from(Grant), u64, extents), max_size=5),
    ),
    "commit": (
        payloads.pack_commit,
        payloads.unpack_commit,
        st.lists(st.tuples(u64, group_tags), max_size=5),
    ),
    "committed": (
        payloads.pack_committed,
        payloads.unpack_committed,
        st.lists(st.sampled_from(Commitment), max_size=5),
    ),
    "generations": (
        payloads.pack_generations,
        payloads.unpack_generations,
        st.lists(u64, max_size=5),
    ),
    "pinned": (
        lambda message: payloads.pack_pinned(*message),
        payloads.unpack_pinned,
        st.tuples(u64, st.sampled_from(Gap), st.lists(pinned, max_size=4)),
    ),
    "unpin": (
        lambda message: payloads.pack_unpin(message[0], message[1], corrupt=message[2]),
        payloads.unpack_unpin,
        st.tuples(u64, u32, st.booleans()),
    ),
    "number": (payloads.pack_number, payloads.unpack_number, u64),
    "report": (
        lambda message: payloads.pack_report(*message),
        payloads.unpack_report,
        st.tuples(u64, u64),
    ),
    "hello": (
        wire.pack_hello,
        wire.unpack_hello,
        st.builds(
            wire.Hello,
            st.binary(min_size=32, max_size=32),
            st.binary(min_size=16, max_size=16),
            st.text(max_size=20),
            st.lists(u64, max_size=4).map(tuple),
            st.binary(min_size=32, max_size=32),
        ),
    ),
    "welcome": (
        wire.pack_welcome,
        wire.unpack_welcome,
        st.builds(
            wire.Welcome,
            st.binary(min_size=32, max_size=32),
            u64,
            u32,
            u64,
            st.floats(0, 1e6),
            st.floats(0, 1e6),
            st.text(max_size=40),
        ),
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_comes_back_as_it_went(name):
    pack, unpack, messages = MESSAGES[name]

    @settings(max_examples=20, deadline=None)
    @given(messages)
    def check(message):
        assert unpack(pack(message)) == message

    check()


@pytest.mark.parametrize("name", MESSAGES)
def test_no_payload_crashes_its_reader(name):
    _, unpack, _ = MESSAGES[name]

    @settings(max_examples=40, deadline=None)
    @given(st.binary(max_size=120))
    def check(payload):
        with contextlib.suppress(wire.WireError):
            unpack(payload)

    check()


def receive(decoder, data):
    """As much of `data` as the decoder has room for; how much."""
    room = decoder.room()
    count = min(len(data), room.nbytes)
    room[:count] = data[:count]
    decoder.received(count)
    return count


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Op), u64, st.binary(max_size=50)), max_size=6), st.data())
def test_frames_survive_any_cutting_of_the_stream(frames, data):
    stream = b"".join(pack_frame(*frame) for frame in frames)
    decoder, received = FrameDecoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        receive(decoder, stream[:size])
        stream = stream[size:]
        while (frame := decoder.next()) is not None:
            received.append(frame)
    assert received == [Frame(*frame) for frame in frames]


def test_a_frame_over_the_limit_is_refused_before_it_is_there():
    decoder = FrameDecoder()
    receive(decoder, (MAX_PAYLOAD + 1).to_bytes(4, "little") + bytes(9))
    with pytest.raises(wire.WireError, match="announces"):
        decoder.next()
    with pytest.raises(wire.WireError, match="limit"):
        pack_frame(Op.PIN, 1, bytes(MAX_PAYLOAD + 1))


@pytest.mark.parametrize("size", [300 << 10, MAX_PAYLOAD])
def test_a_frame_larger_than_the_buffer_passes_between_small_ones(size):
    decoder, small = FrameDecoder(), Frame(Op.PIN, 1, b"small")
    large = Frame(Op.PUT, 2, os.urandom(size))
    stream = b"".join(pack_frame(*frame) for frame in (small, large, small))
    received = []
    for at in range(0, len(stream), 200_000):
        rest = stream[at : at + 200_000]
        while rest:
            rest = rest[receive(decoder, rest) :]
            while (frame := decoder.next()) is not None:
                received.append(frame)
    assert received == [small, large, small]


def test_a_count_can_t_announce_more_than_there_is():
    with pytest.raises(wire.WireError, match="too short"):
        payloads.unpack_keys((2**32 - 1).to_bytes(4, "little") + bytes(64))


def test_proofs_bind_the_key_both_nonces_and_the_name():
    fields = (b"s" * 32, b"c" * 32, b"i" * 16, "engine")
    proof = wire.client_proof(b"k" * 32, *fields)
    assert proof != wire.client_proof(b"x" * 32, *fields)
    for position, other in enumerate((b"S" * 32, b"C" * 32, b"I" * 16, "other")):
        changed = [*fields[:position], other, *fields[position + 1 :]]
        assert proof != wire.client_proof(b"k" * 32, *changed)
    assert wire.server_proof(b"k" * 32, fields[0], fields[1]) != proof
