"""The owner's side of the verbs transport: it connects queue pairs, and the card does the rest."""

import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

from kimi_runtime.errors import ProtocolError, TransferError
from kimi_runtime.transfer.exports import Export
from kimi_runtime.transfer.handshake import accept_from
from kimi_runtime.transfer.serving import Connection, Steps
from kimi_runtime.transfer.verbs_device import Access, Registration, VerbsDevice, mapped
from kimi_runtime.transfer.verbs_wire import (
    LENGTH,
    MAX_QUEUE_PAIRS,
    PURPOSE,
    Connect,
    Connected,
    QueuePairInfo,
    Reconnect,
    Reconnected,
    Refused,
    pack,
    unpack_length,
    unpack_request,
)

Find = Callable[[int, int, int], tuple[Export, Registration] | None]


def new_psn() -> int:
    """The number of a first packet: 24 bits, at random, so that strays of an old one don't fit."""
    return secrets.randbits(24)


class Owner:
    """Connects the queue pairs of readers that hold a call key to regions that `find` knows."""

    def __init__(self, device: VerbsDevice, find: Find, call_keys: Sequence[bytes]) -> None:
        self._device, self._find, self._call_keys = device, find, call_keys

    def serve(self, connection: Connection) -> Steps:
        """One session, until the reader closes it."""
        yield from accept_from(connection, self._call_keys, PURPOSE)
        request = unpack_request((yield from _frame(connection)))
        if not isinstance(request, Connect) or not 0 < len(request.queue_pairs) <= MAX_QUEUE_PAIRS:
            raise ProtocolError("a session begins with the queue pairs of its reader")
        found = self._find(request.key, request.epoch, request.size_bytes)
        if found is None:
            yield from connection.send(pack(Refused()))
            return
        export, registration = found
        completions = self._device.completion_queue(1)  # nothing is ever posted on these pairs
        pairs: list[Any] = []
        try:
            ours = []
            for theirs in request.queue_pairs:
                pair = self._device.queue_pair(completions, sends=1)
                pairs.append(pair)
                ours.append(QueuePairInfo(number=pair.qp_num, psn=new_psn()))
                access = Access.WRITE if export.writable else Access.READ
                self._device.connect(pair, ours[-1].psn, theirs, request.port, access)
            reply = Connected(
                address=registration.base,
                remote_key=registration.remote_key,
                writable=export.writable,
                port=self._device.port,
                queue_pairs=ours,
            )
            yield from connection.send(pack(reply))
            yield from self._reconnects(connection, request, pairs, access)
        finally:
            for part in (*pairs, completions):
                with suppress(TransferError), mapped("closing a queue pair"):
                    part.close()

    def _reconnects(
        self, connection: Connection, session: Connect, pairs: Sequence[Any], access: Access
    ) -> Steps:
        while True:
            connection.idle()
            request = unpack_request((yield from _frame(connection)))
            if not isinstance(request, Reconnect) or not 0 <= request.index < len(pairs):
                raise ProtocolError("only a queue pair of the session can be reconnected")
            theirs = session.queue_pairs[request.index]
            psn = new_psn()
            self._device.connect(
                pairs[request.index],
                psn,
                QueuePairInfo(number=theirs.number, psn=request.psn),
                session.port,
                access,
            )
            yield from connection.send(pack(Reconnected(psn=psn)))


def _frame(connection: Connection) -> Generator[int, None, bytearray]:
    """The next frame's payload."""
    head = bytearray(LENGTH.size)
    yield from connection.receive(memoryview(head))
    payload = bytearray(unpack_length(head))
    yield from connection.receive(memoryview(payload))
    return payload
