"""What a pool daemon and its clients say to each other over the node's Unix socket, in `frames`.

Every request has one answer with its number. A connection starts with a mutual challenge: CHALLENGE
from the daemon, HELLO with a proof from the client, WELCOME with a proof from the daemon (or
REFUSED). Bytes of KV do not pass here, since both sides map the arena file; only the few of a small
PUT do, which cost less than a second call.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

VERSION = 7
KEY_BYTES = 16
TAG_BYTES = 16
SESSION_BYTES = 16
NONCE_BYTES = 32
MAX_KEYS = 1024
"""Keys a client puts into one request. The daemon may answer for fewer: ask again for the rest."""
MAX_GROUPS = 255
"""Layer groups of a block, each with a tag: their count is a byte."""

U8, U16, U32, U64 = (struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))


class WireError(ValueError):
    """The peer sent something that is no frame or message of this protocol."""


class Op(IntEnum):
    """The kind of a frame."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    RESERVE = 10
    RESERVED = 11
    COMMIT = 12
    COMMITTED = 13
    ABORT = 14
    PIN = 15
    PINNED = 16
    RENEW = 17
    UNPIN = 18
    HELD = 19
    REPORT = 20
    COUNT = 21
    ERROR = 22
    TOUCH = 23
    USED = 24
    HINT = 25
    SERVED = 26
    QUOTE = 27
    QUOTED = 28
    DEEPEST = 29
    PUT = 30
    KEEP = 31
    KEPT = 32


class Outcome(str, Enum):  # noqa: UP042  (StrEnum needs Python 3.11; engines run 3.10 too)
    """Why a load's run ended. "No answer" and "not there" never look the same."""

    HIT = "hit"
    MISS = "miss"
    UNAVAILABLE = "unavailable"
    CORRUPT = "corrupt"
    LATE = "late"


class Grant(IntEnum):
    """The answer to one key of a RESERVE."""

    RESERVED = 0
    HELD = 1
    FULL = 2


class Commitment(IntEnum):
    """The answer to one block of a COMMIT. DUPLICATE: the key was held already, which is as good.

    EXPIRED: the reservation was over before the commit came; nothing was kept.
    """

    COMMITTED = 0
    DUPLICATE = 1
    EXPIRED = 2


class Gap(IntEnum):
    """Why a PINNED run is shorter than what was asked.

    CORRUPT and LATE: the next block was on the node's SSD, and did not come from there intact, or
    not in time.
    """

    NONE = 0
    MISS = 1
    EVICTED = 2
    CORRUPT = 3
    LATE = 4


class Priority(IntEnum):
    """How dear a block is to who puts it, beside the chance that it is wanted again."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class HintKind(IntEnum):
    """What a HINT tells of a session.

    ACTIVE: a turn runs. PAUSED: it waits for a tool or a person. ENDED: it is over. COMPACTED: it
    gave up these blocks. FORKED: another session goes on from these blocks.
    """

    ACTIVE = 0
    PAUSED = 1
    ENDED = 2
    COMPACTED = 3
    FORKED = 4


class Source(IntEnum):
    """Where the daemon would bring a block from."""

    MEMORY = 0
    SSD = 1
    PEER = 2


class Stretch(NamedTuple):
    """`blocks` that follow each other in a run, and seconds until all are in the node's memory."""

    blocks: int
    source: Source
    seconds: float


def outcome_of(gap: Gap) -> Outcome:
    """What a gap means to who asked."""
    if gap is Gap.NONE:
        return Outcome.HIT
    return {Gap.CORRUPT: Outcome.CORRUPT, Gap.LATE: Outcome.LATE}.get(gap, Outcome.MISS)


class Extent(NamedTuple):
    """`pages` pages of the arena from page `first`."""

    first: int
    pages: int


class Granted(NamedTuple):
    """Where one block may be written. Only RESERVED has a generation and extents."""

    grant: Grant
    generation: int = 0
    extents: "tuple[Extent, ...]" = ()


class GroupTag(NamedTuple):
    """The tag of one layer group: the next `size` bytes of a block."""

    size: int
    tag: bytes


class PinnedBlock(NamedTuple):
    """Where one block lies, and the tags its bytes must have, group by group."""

    generation: int
    size: int
    tags: "tuple[GroupTag, ...]"
    extents: "tuple[Extent, ...]"


@dataclass(frozen=True)
class Hello:
    """The client's side of the handshake.

    `instance` names this client of this process over its reconnects. `writing` are generations
    that one of its threads may still store to; the daemon frees every other reservation of it.
    """

    nonce: bytes
    instance: bytes
    name: str
    writing: "tuple[int, ...]"
    proof: bytes


@dataclass(frozen=True)
class Welcome:
    """The daemon's side: what a client needs to map the arena, and the times it grants."""

    proof: bytes
    epoch: int
    page_bytes: int
    pages: int
    pin_lease_s: float
    reservation_ttl_s: float
    arena: str


def client_proof(
    call_key: bytes, server_nonce: bytes, nonce: bytes, instance: bytes, name: str
) -> bytes:
    """What a HELLO must carry: only a holder of the call key can answer the daemon's nonce."""
    message = b"umbp client" + server_nonce + nonce + instance + name.encode()
    return hmac.new(call_key, message, hashlib.sha256).digest()


def server_proof(call_key: bytes, server_nonce: bytes, nonce: bytes) -> bytes:
    """What a WELCOME must carry."""
    return hmac.new(call_key, b"umbp daemon" + nonce + server_nonce, hashlib.sha256).digest()


class Cursor:
    """Reads a payload from its start; WireError past its end."""

    def __init__(self, payload: bytes) -> None:
        self._payload, self._at = payload, 0

    def unpack(self, form: struct.Struct) -> "tuple[int, ...]":
        """The fields of one struct of integers."""
        return form.unpack(self.take(form.size))

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        data = self._payload[self._at : self._at + size]
        if len(data) != size:
            raise WireError(f"a payload of {len(self._payload)} bytes ends too early")
        self._at += size
        return data

    def view(self, size: int) -> memoryview:
        """As `take`, without a copy."""
        at, self._at = self._at, self._at + size
        if self._at > len(self._payload):
            raise WireError(f"a payload of {len(self._payload)} bytes ends too early")
        return memoryview(self._payload)[at : self._at]

    def count(self, item_bytes: int) -> int:
        """A u32 count of items that are at least `item_bytes` each, so that it can't lie."""
        (count,) = self.unpack(U32)
        if count * item_bytes > len(self._payload) - self._at:
            raise WireError(f"a payload announces {count} items and is too short for them")
        return count

    def text(self) -> str:
        """A string after its u16 length."""
        (size,) = self.unpack(U16)
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as exc:
            raise WireError("a text is no UTF-8") from exc

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._payload):
            raise WireError(f"a payload has {len(self._payload) - self._at} bytes too many")


def pack_text(text: str) -> bytes:
    """A string with its u16 length, cut to what that can say."""
    data = text.encode()[:0xFFFF]
    return U16.pack(len(data)) + data


def unpack_text(payload: bytes) -> str:
    """The text of an ERROR or REFUSED."""
    return Cursor(payload).text()


_WELCOME = struct.Struct("<QIQdd")


def pack_hello(hello: Hello) -> bytes:
    """HELLO's payload."""
    head = U16.pack(VERSION) + hello.nonce + hello.instance + pack_text(hello.name)
    writing = b"".join(U64.pack(generation) for generation in hello.writing)
    return head + U32.pack(len(hello.writing)) + writing + hello.proof


def unpack_hello(payload: bytes) -> Hello:
    """HELLO's payload; WireError also for another version."""
    cursor = Cursor(payload)
    (version,) = cursor.unpack(U16)
    if version != VERSION:
        raise WireError(f"the client speaks version {version}, this daemon {VERSION}")
    nonce, instance, name = cursor.take(NONCE_BYTES), cursor.take(16), cursor.text()
    writing = tuple(cursor.unpack(U64)[0] for _ in range(cursor.count(8)))
    hello = Hello(nonce, instance, name, writing, cursor.take(32))
    cursor.end()
    return hello


def pack_welcome(welcome: Welcome) -> bytes:
    """WELCOME's payload."""
    fields = _WELCOME.pack(
        welcome.epoch,
        welcome.page_bytes,
        welcome.pages,
        welcome.pin_lease_s,
        welcome.reservation_ttl_s,
    )
    return welcome.proof + fields + pack_text(welcome.arena)


def unpack_welcome(payload: bytes) -> Welcome:
    """WELCOME's payload."""
    cursor = Cursor(payload)
    proof = cursor.take(32)
    epoch, page_bytes, pages, lease_s, ttl_s = _WELCOME.unpack(cursor.take(_WELCOME.size))
    return Welcome(proof, epoch, page_bytes, pages, lease_s, ttl_s, cursor.text())
