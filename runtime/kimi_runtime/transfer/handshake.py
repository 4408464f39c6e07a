"""Both ends of a connection prove that they hold the call key, which never crosses the wire.

    acceptor → dialler   magic, nonce a
    dialler → acceptor   nonce d, up to `MAX_KEYS` proofs: HMAC(key, purpose ‖ "dialler" ‖ a ‖ d)
    acceptor → dialler   HMAC(key, purpose ‖ "acceptor" ‖ d ‖ a) with the key that matched, or zeros

A dialler proves each key it has, so that during a rotation neither end need be the first to read
the new file. The acceptor proves itself too: a reader must not take KV from whoever took the port,
nor write its own there. It authenticates the connection and does not encrypt it.
"""

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence

from kimi_runtime.errors import PeerGone, Unauthorized
from kimi_runtime.transfer.serving import Connection, Steps

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_KEYS = 4
_MAGIC = b"KIMIXFR\1"
_GREETING = struct.Struct(f"!8s{NONCE_BYTES}s")
_CLAIM = struct.Struct(f"!{NONCE_BYTES}s" + f"{PROOF_BYTES}s" * MAX_KEYS)
_REFUSED = bytes(PROOF_BYTES)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """The next `size` bytes of a blocking socket; ConnectionResetError if they don't come."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionResetError("the peer closed the connection")
        view = view[got:]
    return bytes(data)


def dial_in(sock: socket.socket, call_keys: Sequence[bytes], purpose: bytes) -> None:
    """The dialler's part, on a blocking socket; PeerGone if the two don't share a key."""
    magic, theirs = _GREETING.unpack(receive_exactly(sock, _GREETING.size))
    if magic != _MAGIC:
        raise PeerGone("what listens there is no transport of this version")
    ours = secrets.token_bytes(NONCE_BYTES)
    proofs = [_proof(key, purpose, b"dialler", theirs, ours) for key in call_keys[:MAX_KEYS]]
    proofs += [_REFUSED] * (MAX_KEYS - len(proofs))
    sock.sendall(_CLAIM.pack(ours, *proofs))
    answer = receive_exactly(sock, PROOF_BYTES)
    good = False
    for key in call_keys[:MAX_KEYS]:
        good |= hmac.compare_digest(answer, _proof(key, purpose, b"acceptor", ours, theirs))
    if not good:
        raise PeerGone("the peer does not hold this deployment's call key, or refused ours")


def accept_from(connection: Connection, call_keys: Sequence[bytes], purpose: bytes) -> Steps:
    """The acceptor's part; raises Unauthorized after having told the dialler."""
    ours = secrets.token_bytes(NONCE_BYTES)
    yield from connection.send(_GREETING.pack(_MAGIC, ours))
    claim = bytearray(_CLAIM.size)
    yield from connection.receive(memoryview(claim))
    theirs, *proofs = _CLAIM.unpack(claim)
    answer = _REFUSED
    for key in call_keys:
        expected = _proof(key, purpose, b"dialler", ours, theirs)
        for proof in proofs:
            if hmac.compare_digest(proof, expected):
                answer = _proof(key, purpose, b"acceptor", theirs, ours)
    yield from connection.send(answer)
    if answer == _REFUSED:
        raise Unauthorized("the dialler does not hold this deployment's call key")
    connection.admit()


def _proof(key: bytes, purpose: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(key, b"\0".join((purpose, role, first + second)), hashlib.sha256).digest()
