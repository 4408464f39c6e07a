"""How many bytes wake a receiver."""

import select
import socket

import pytest

from kimi_runtime.transfer.threshold import LEAST_BYTES, MOST_BYTES, Threshold

AT_ONCE_MS, SOON_MS = 50, 5000


@pytest.fixture
def connection():
    """Both ends of a connection over loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        yield sender, receiver


def readable(sock, within_ms):
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(within_ms))


def test_a_receiver_is_woken_once_there_is_half_of_what_it_waits_for(connection):
    sender, receiver = connection
    Threshold(receiver).expect(4 * LEAST_BYTES)
    sender.sendall(bytes(2 * LEAST_BYTES - 1))
    assert not readable(receiver, AT_ONCE_MS)
    sender.sendall(b"x")
    assert readable(receiver, SOON_MS)


def test_few_bytes_are_waited_for_all_together(connection):
    sender, receiver = connection
    Threshold(receiver).expect(5)
    sender.sendall(b"four")
    assert not readable(receiver, AT_ONCE_MS)
    sender.sendall(b"5")
    assert readable(receiver, SOON_MS)


def test_a_receiver_is_woken_when_the_connection_ends_however_little_came(connection):
    sender, receiver = connection
    Threshold(receiver).expect(8 * MOST_BYTES)
    sender.sendall(b"x")
    sender.shutdown(socket.SHUT_WR)
    assert readable(receiver, SOON_MS)


def test_more_is_waited_for_than_a_fresh_connection_s_buffer_holds(connection):
    sender, receiver = connection
    Threshold(receiver).expect(8 * MOST_BYTES)
    sender.setblocking(False)
    poll = select.poll()
    poll.register(sender, select.POLLOUT)
    sent = 0
    while sent < MOST_BYTES:
        assert poll.poll(SOON_MS), f"the system took {sent} bytes and no more"
        sent += sender.send(bytes(64 << 10))
    assert readable(receiver, SOON_MS)
