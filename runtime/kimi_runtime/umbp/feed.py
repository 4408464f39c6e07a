"""What an owner holds, told to whoever follows: a numbered log with snapshots.

`FeedLog` is the owner's side, `FeedFollower` the other. Both are pure: no I/O, no clock. The wire
format is `spec.umbp.FeedLine`, one JSON text a line behind its checksum; `Changes` are a batch
without it. A follower that has applied everything up to `seq` of the same epoch is EXACT; after a
gap, before the snapshot's end or while disconnected it is DEGRADED: what it says may be wrong,
which costs a miss.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Literal

import xxhash
from pydantic import TypeAdapter

from kimi_runtime.errors import ProtocolError
from kimi_runtime.spec.umbp import (
    FeedBatch,
    FeedEvent,
    FeedHello,
    FeedLine,
    FeedSnapshotPage,
    TierName,
)
from kimi_runtime.umbp.followed_keys import FollowedKeys, PlainKeys
from kimi_runtime.umbp.keys import hex_keys

SNAPSHOT_PAGE_KEYS = 4096
BATCH_EVENTS = 1024

LINE_SUM = "xxh3"
"""What a follower asks for that reads checksums: XXH3-64, in hexadecimal, of the line's JSON."""

_SUM_DIGITS = 16

_LINE: TypeAdapter[FeedHello | FeedSnapshotPage | FeedBatch] = TypeAdapter(FeedLine)


def feed_path(epoch: int | None, after: int) -> str:
    """Where an owner is asked for what comes after `(epoch, after)`, in lines with checksums."""
    return f"/feed?after={after}&sum={LINE_SUM}" + ("" if epoch is None else f"&epoch={epoch}")


def encode_line(line: FeedHello | FeedSnapshotPage | FeedBatch, *, summed: bool = False) -> bytes:
    """One line of a feed, newline included; with its checksum before it, if `summed`."""
    text = line.model_dump_json().encode()
    if not summed:
        return text + b"\n"
    return b"%b %b\n" % (xxhash.xxh3_64_hexdigest(text).encode(), text)


def decode_line(line: bytes) -> FeedHello | FeedSnapshotPage | FeedBatch:
    """Parse one line of a feed; ProtocolError if it is none, or not the one that was sent.

    A line that begins with JSON is of an owner that makes no checksums yet. No damage turns one
    kind into the other: behind a checksum's place no JSON begins.
    """
    if not line.startswith(b"{"):
        line = _checked(line)
    try:
        return _LINE.validate_json(line)
    except ValueError as exc:
        raise ProtocolError(f"a feed line does not parse: {exc}") from exc


def _checked(line: bytes) -> bytes:
    told, text = line[:_SUM_DIGITS], line[_SUM_DIGITS + 1 :].removesuffix(b"\n")
    space = line[_SUM_DIGITS : _SUM_DIGITS + 1]
    if space != b" " or told != xxhash.xxh3_64_hexdigest(text).encode():
        raise ProtocolError(f"a feed line does not parse: {len(line)} bytes are not what was sent")
    return text


Op = Literal["add", "remove", "clear"]


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes `first_seq ...` in order: what was done, and with which key (b"" for a clear)."""

    epoch: int
    first_seq: int
    events: Sequence[tuple[Op, bytes]]

    @property
    def removed(self) -> list[bytes]:
        """Keys that were lost, in order."""
        return [key for op, key in self.events if op == "remove"]

    def batch(self) -> FeedBatch:
        """As it goes over the wire.

        Not validated: a hexadecimal key is one by its making.
        """
        events = tuple(
            FeedEvent.model_construct(op=op, key=key.hex() if key else None)
            for op, key in self.events
        )
        return FeedBatch.model_construct(epoch=self.epoch, first_seq=self.first_seq, events=events)

    @classmethod
    def of(cls, batch: FeedBatch) -> "Changes":
        """What a batch says."""
        events = [(event.op, bytes.fromhex(event.key or "")) for event in batch.events]
        return cls(batch.epoch, batch.first_seq, events)


class FeedLog:
    """The owner's held keys and its last `keep_events` changes. Adding twice changes nothing."""

    def __init__(
        self,
        owner: str,
        *,
        epoch: int,
        tier: TierName,
        block_tokens: int = 0,
        keep_events: int = 65_536,
    ) -> None:
        self.owner, self.epoch, self.tier, self.block_tokens = owner, epoch, tier, block_tokens
        self.seq = 0
        self._held: dict[bytes, None] = {}
        self._events: deque[tuple[Op, bytes]] = deque(maxlen=keep_events)

    def __len__(self) -> int:
        """How many keys are held."""
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        """Whether the key is held."""
        return key in self._held

    def add(self, keys: Iterable[bytes]) -> None:
        """The owner now holds `keys`."""
        held, events, before = self._held, self._events, len(self._held)
        for key in keys:
            if key not in held:
                held[key] = None
                events.append(("add", key))
        self.seq += len(held) - before

    def remove(self, keys: Iterable[bytes]) -> None:
        """The owner no longer holds `keys`; keys it did not hold are passed over."""
        held, events, before = self._held, self._events, len(self._held)
        for key in keys:
            if key in held:
                del held[key]
                events.append(("remove", key))
        self.seq += before - len(held)

    def clear(self) -> None:
        """The owner holds nothing any more."""
        self._held.clear()
        self.seq += 1
        self._events.append(("clear", b""))

    def hello(self) -> FeedHello:
        """The first line for a new follower."""
        return FeedHello(
            owner=self.owner,
            epoch=self.epoch,
            seq=self.seq,
            tier=self.tier,
            block_tokens=self.block_tokens,
        )

    def resumes(self, epoch: int | None, after: int) -> bool:
        """Whether a follower at `(epoch, after)` can go on without a snapshot."""
        return epoch == self.epoch and self.seq - len(self._events) <= after <= self.seq

    def snapshot(self, page_keys: int = SNAPSHOT_PAGE_KEYS) -> Iterator[FeedSnapshotPage]:
        """The held keys as of now, in pages; the last page has `last`, even if it is empty.

        Taken whole before the first page is yielded, so later changes do not leak into it.
        """
        seq, held = self.seq, list(self._held)
        starts = range(0, len(held), page_keys)
        pages = [held[start : start + page_keys] for start in starts] or [[]]
        for number, page in enumerate(pages):
            yield FeedSnapshotPage(
                epoch=self.epoch,
                seq=seq,
                page=number,
                last=number == len(pages) - 1,
                keys=hex_keys(page),
            )

    def batch_after(self, after: int, limit: int = BATCH_EVENTS) -> FeedBatch | None:
        """`changes_after` as it goes over the wire."""
        changes = self.changes_after(after, limit)
        return None if changes is None else changes.batch()

    def changes_after(self, after: int, limit: int = BATCH_EVENTS) -> Changes | None:
        """The next changes after `after`, at most `limit`; empty if there are none.

        None if they are no longer in the log: the follower needs a snapshot.
        """
        if not self.resumes(self.epoch, after):
            return None
        behind = self.seq - after
        if behind <= limit:  # a deque is fast at its ends
            events = list(islice(reversed(self._events), behind))
            events.reverse()
        else:
            start = len(self._events) - behind
            events = list(islice(self._events, start, start + limit))
        return Changes(self.epoch, after + 1, events)


class FollowState(StrEnum):
    """How far a follower's copy can be trusted."""

    EXACT = "exact"
    DEGRADED = "degraded"


class FeedFollower:
    """One owner's keys as its feed told them. Never claims EXACT for what it may have missed.

    A connection starts with a hello; until then nothing on it is believed, so that a late line of
    an earlier connection cannot lift the state. Lines lost, repeated or swapped cost a reconnect.
    """

    def __init__(self, keys: FollowedKeys | None = None) -> None:
        self.owner = ""
        self.tier: TierName | None = None
        self.epoch: int | None = None
        self.seq = 0
        self.state = FollowState.DEGRADED
        self.keys: FollowedKeys = PlainKeys() if keys is None else keys
        self._greeted = False
        self._target_seq = 0
        self._next_page = 0
        self._pages_seq = 0

    def resume_point(self) -> tuple[int | None, int]:
        """`(epoch, after)` to ask the owner for on a new connection."""
        return self.epoch, self.seq

    def apply(self, line: FeedHello | FeedSnapshotPage | FeedBatch) -> bool:
        """Take one line in. False: there is a gap, reconnect from `resume_point()`."""
        if isinstance(line, FeedHello):
            self._hello(line)
            return True
        if not self._greeted:
            return False
        if isinstance(line, FeedSnapshotPage):
            return self._snapshot_page(line)
        return self.take(Changes.of(line))

    def take(self, changes: Changes) -> bool:
        """Like `apply` of a batch."""
        behind = self.seq + 1 - changes.first_seq
        if not self._greeted or changes.epoch != self.epoch or behind < 0:
            return self._gap()
        new = changes.events[behind:] if behind else changes.events  # the rest was sent before
        self.seq += len(new)
        # a key is held, or not, by the last that was said of it
        last = {key: op for op, key in new}
        if b"" in last:
            self.keys.clear()
            cleared = max(place for place, (op, _) in enumerate(new) if op == "clear")
            last = {key: op for op, key in new[cleared + 1 :]}
        if last:
            self.keys.hold([key for key, op in last.items() if op == "add"])
            self.keys.lose([key for key, op in last.items() if op == "remove"])
        self._trust_if_caught_up()
        return True

    def disconnected(self) -> None:
        """The stream ended: keep the keys, stop trusting them."""
        self.state = FollowState.DEGRADED
        self._greeted = False

    def _hello(self, hello: FeedHello) -> None:
        same = (hello.owner, hello.tier, hello.epoch) == (self.owner, self.tier, self.epoch)
        if not same or self.seq > hello.seq:
            self.epoch, self.seq = hello.epoch, 0
            self.keys.clear()  # a restarted owner holds none of what it held before
        self.owner, self.tier, self._target_seq = hello.owner, hello.tier, hello.seq
        self._greeted = True
        self._drop_pages()
        self.state = FollowState.DEGRADED
        self._trust_if_caught_up()

    def _snapshot_page(self, page: FeedSnapshotPage) -> bool:
        if page.epoch != self.epoch or page.page != self._next_page:
            return self._gap()
        if page.page == 0:
            self._pages_seq = page.seq
        if page.seq != self._pages_seq or page.seq < self.seq:
            return self._gap()  # pages of two snapshots, or of one older than what is known
        self.keys.stage([bytes.fromhex(key) for key in page.keys])
        self._next_page += 1
        if page.last:
            self.keys.swap()
            self.seq, self._next_page = page.seq, 0
            self._trust_if_caught_up()
        return True

    def _trust_if_caught_up(self) -> None:
        self._target_seq = max(self._target_seq, self.seq)
        if self.seq == self._target_seq:
            self.state = FollowState.EXACT

    def _drop_pages(self) -> None:
        self.keys.unstage()
        self._next_page = 0

    def _gap(self) -> bool:
        """Nothing of the line was taken: the copy is still right up to `seq`, and resumable."""
        self.disconnected()
        return False
