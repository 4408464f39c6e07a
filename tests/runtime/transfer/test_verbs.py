"""The pure parts of the verbs transport: a port's addresses, and what its two ends say."""

import ipaddress

import pytest

from kimi_runtime.errors import ConfigError, ProtocolError, TransferError
from kimi_runtime.transfer import gpu_memory
from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.plan import cut, total_bytes
from kimi_runtime.transfer.verbs_gids import Gid, GidKind, choose_gid
from kimi_runtime.transfer.verbs_wire import (
    LENGTH,
    MAX_FRAME_BYTES,
    Connect,
    Connected,
    PortInfo,
    QueuePairInfo,
    Reconnect,
    Reconnected,
    Refused,
    pack,
    unpack_length,
    unpack_reply,
    unpack_request,
)

PORT = PortInfo(gid="00" * 10 + "ffff0a4d0001", lid=0, mtu=3, reads=16)
PAIRS = [QueuePairInfo(number=17, psn=4), QueuePairInfo(number=18, psn=2**24 - 1)]


def gid(index, kind, address):
    parsed = ipaddress.ip_address(address)
    v6 = parsed if parsed.version == 6 else ipaddress.IPv6Address(f"::ffff:{address}")
    return Gid(index, kind, v6.packed)


# the table of a usual RoCE card: link-local and IPv4, each as v1 and v2
TABLE = [
    gid(0, GidKind.ROCE_V1, "fe80::1"),
    gid(1, GidKind.ROCE_V2, "fe80::1"),
    gid(2, GidKind.ROCE_V1, "10.0.0.7"),
    gid(3, GidKind.ROCE_V2, "10.0.0.7"),
    gid(4, GidKind.ROCE_V2, "2001:db8::7"),
]


def test_the_address_of_choice_is_ipv4_by_roce_v2():
    assert choose_gid(TABLE, None, port="p").index == 3


def test_without_ipv4_a_routable_address_comes_before_a_link_local_one():
    assert choose_gid([TABLE[1], TABLE[4]], None, port="p").index == 4
    assert choose_gid(TABLE[:2], None, port="p").index == 1


def test_an_index_that_is_given_is_taken_whatever_it_is():
    assert choose_gid(TABLE, 0, port="p") is TABLE[0]


def test_an_infiniband_port_uses_its_one_entry():
    only = gid(0, GidKind.IB, "fe80::2:c903:a1:1")
    assert choose_gid([only], None, port="p") is only


@pytest.mark.parametrize(
    ("table", "index", "message"),
    [
        ([], None, r"port 1 of rxe0 has no RoCE v2 address \(none\)"),
        (TABLE[:1], None, "give its network interface an IPv4 address"),
        (
            TABLE,
            9,
            r"port 1 of rxe0 has no GID 9; it has 0: roce-v1 fe80::1, .*3: roce-v2 10.0.0.7",
        ),
    ],
    ids=["empty", "only v1", "no such index"],
)
def test_a_table_without_a_usable_address_says_what_is_there(table, index, message):
    with pytest.raises(ConfigError, match=message):
        choose_gid(table, index, port="port 1 of rxe0")


def test_a_span_is_cut_at_the_largest_message_of_the_device():
    spans = [Span(0, 100, 10), Span(50, 0, 4), Span(60, 4, 5)]
    pieces = list(cut(spans, 4))
    assert pieces == [(0, 100, 4), (4, 104, 4), (8, 108, 2), (50, 0, 4), (60, 4, 4), (64, 8, 1)]
    assert total_bytes(pieces) == total_bytes(spans)


@pytest.mark.parametrize(
    "request_",
    [
        Connect(key=1, epoch=2**52 - 1, size_bytes=1 << 40, port=PORT, queue_pairs=PAIRS),
        Reconnect(index=1, psn=5),
    ],
)
def test_a_request_arrives_as_it_was_sent(request_):
    frame = pack(request_)
    assert unpack_length(frame[: LENGTH.size]) == len(frame) - LENGTH.size
    assert unpack_request(frame[LENGTH.size :]) == request_


@pytest.mark.parametrize(
    "reply",
    [
        Connected(address=2**63, remote_key=2**32 - 1, writable=True, port=PORT, queue_pairs=PAIRS),
        Reconnected(psn=5),
        Refused(),
    ],
)
def test_a_reply_arrives_as_it_was_sent(reply):
    assert unpack_reply(pack(reply)[LENGTH.size :]) == reply


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b'{"type":"connected"}', b'{"type":"reconnect","index":"a"}']
)
def test_what_no_reader_would_ask_is_refused(payload):
    with pytest.raises(ProtocolError, match="malformed"):
        unpack_request(payload)


def test_a_frame_beyond_the_limit_is_not_read():
    with pytest.raises(ProtocolError, match="control frame"):
        unpack_length(LENGTH.pack(MAX_FRAME_BYTES + 1))


def library_of(**calls):
    """A driver whose exported functions behave as told, set up like ctypes' own."""
    return type("Library", (), {name: staticmethod(call) for name, call in calls.items()})()


def test_a_buffer_of_a_pool_is_named_by_its_offset_in_the_allocation():
    def export(_address, _nbytes, descriptor, offset):
        descriptor._obj.value, offset._obj.value = 7, 0x1200
        return 0

    library = library_of(hsa_amd_portable_export_dmabuf=export)
    assert gpu_memory._export_hsa(library, 0x7F0000001200, 64) == (7, 0x1200)

    def find(base, size, address):
        base._obj.value, size._obj.value = 0x7F0000000000, 4097
        return 0 if address.value >= 0x7F0000000000 else 1

    def handle(descriptor, _base, pages, kind, _flags):
        descriptor._obj.value = 8
        return 0 if (pages.value, kind.value) == (8192, 1) else 1

    library = library_of(cuMemGetAddressRange_v2=find, cuMemGetHandleForAddressRange=handle)
    assert gpu_memory._export_cuda(library, 0x7F0000000100, 64) == (8, 0x100)


def test_memory_that_the_driver_does_not_export_is_refused_with_its_status():
    library = library_of(hsa_amd_portable_export_dmabuf=lambda *_: 4097)
    with pytest.raises(TransferError, match=r"at 0x1000 .* returned 4097"):
        gpu_memory._export_hsa(library, 0x1000, 64)
