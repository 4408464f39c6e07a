"""What two ends of a verbs session tell each other over their authenticated control connection.

Frames are a length (u32, big-endian) and JSON. The reader sends `Connect` once and `Reconnect`
after a queue pair failed; the owner answers each. The connection lives as long as the session: its
end tells the owner to destroy its queue pairs, and the reader that its peer is gone.
"""

import struct

import msgspec

from kimi_runtime.errors import ProtocolError

PURPOSE = b"verbs"
LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 64 << 10
MAX_QUEUE_PAIRS = 64


class QueuePairInfo(msgspec.Struct, frozen=True):
    """A queue pair as its peer needs it: its number, and the number of its first packet."""

    number: int
    psn: int


class PortInfo(msgspec.Struct, frozen=True):
    """The port behind the queue pairs. `gid` in hex, `lid` for InfiniBand, `mtu` as ibv_mtu.

    `reads` is how many RDMA reads it serves at once on one queue pair.
    """

    gid: str
    lid: int
    mtu: int
    reads: int


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Open the region (key, epoch, size) for these queue pairs."""

    key: int
    epoch: int
    size_bytes: int
    port: PortInfo
    queue_pairs: list[QueuePairInfo]


class Reconnect(msgspec.Struct, frozen=True, tag="reconnect"):
    """Reset the queue pair at `index`; the reader's starts again at `psn`."""

    index: int
    psn: int


class Connected(msgspec.Struct, frozen=True, tag="connected"):
    """The region lies at `address` of the owner and is reached with `remote_key`."""

    address: int
    remote_key: int
    writable: bool
    port: PortInfo
    queue_pairs: list[QueuePairInfo]


class Reconnected(msgspec.Struct, frozen=True, tag="reconnected"):
    """The owner's queue pair is ready and starts at `psn`."""

    psn: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The region is gone."""


Request = Connect | Reconnect
Reply = Connected | Reconnected | Refused
Message = Request | Reply


def pack(message: Message) -> bytes:
    """A frame."""
    payload = msgspec.json.encode(message)
    return LENGTH.pack(len(payload)) + payload


def unpack_length(data: bytes | bytearray) -> int:
    """Bytes of the frame's payload; ProtocolError for more than a frame has."""
    (size,) = LENGTH.unpack(data)
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a control frame of {size} bytes; at most {MAX_FRAME_BYTES} are read")
    return int(size)


def unpack_request(payload: bytes | bytearray) -> Request:
    """What a reader asked; ProtocolError for anything else."""
    try:
        return msgspec.json.decode(payload, type=Request)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"a malformed control frame: {exc}") from exc


def unpack_reply(payload: bytes | bytearray) -> Reply:
    """What an owner answered; ProtocolError for anything else."""
    try:
        return msgspec.json.decode(payload, type=Reply)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"a malformed control frame: {exc}") from exc
