"""The arena's own directory: which block lies where, readable without asking the daemon.

It is a table of 128-byte cells. A block's head cell is one of the `PROBE` slots from the one its
key names, so a look-up reads one window and no more; what does not fit into a head goes on in spare
cells. Only the daemon writes. Every head has a sequence number, odd while it is written and another
one whenever it changed: who copied a block, and finds the number it began with, has copied that
block whole. That is not relied on for what is served, since the tags bind the bytes to the key: a
torn entry, on whatever machine, fails its tags.

    cell = seq u64, kind u8, priority u8, tags u8, tenant bytes u8, extents u32, generation u64,
           size u32, next u32 (a spare cell's number + 1; 0: none), key 16; then 80 bytes of
           tenant, tags (size u32, tag 16) and extents (first u64, pages u32), little-endian

A reservation has a head of its own, in a spare cell, with its writer's instance as its key: what a
daemon that starts must know of the one before it.
"""

import struct
from typing import NamedTuple

from kimi_connect.wire import TAG_BYTES, Extent, GroupTag, PinnedBlock, Priority

CELL_BYTES = 128
PROBE = 16
"""Slots a block may be in. With a fifth of the slots free, one in millions finds none."""

EMPTY, BLOCK, RESERVATION, MORE = 0, 1, 2, 3

HEAD = struct.Struct("<QBBBBIQII16s")
SEQ = struct.Struct("<Q")
BODY_BYTES = CELL_BYTES - HEAD.size
_TAG = struct.Struct(f"<I{TAG_BYTES}s")
_EXTENT = struct.Struct("<QI")
_TAG_AND_EXTENT = struct.Struct(f"<I{TAG_BYTES}sQI")
_KEY_AT = 32
_MAX_EXTENTS = 1 << 20

# a look-up is on the way of every block that an engine loads: these are what it costs less with
_PRIORITIES = {priority.value: priority for priority in Priority}
_group_tag, _extent = GroupTag._make, Extent._make


class Cells(NamedTuple):
    """How many cells an arena's directory has: slots for heads, and spares."""

    slots: int = 0
    spares: int = 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the whole table."""
        return CELL_BYTES * (self.slots + PROBE + self.spares) if self.slots else 0

    def slot(self, key: bytes) -> int:
        """The first slot of a key's window."""
        return int.from_bytes(key, "little") % self.slots

    def spare(self, number: int) -> int:
        """The cell that is the spare of this number."""
        return self.slots + PROBE + number


class Entry(NamedTuple):
    """What a head and its spares say."""

    at: int
    """The byte at which the head begins."""
    seq: int
    kind: int
    key: bytes
    block: PinnedBlock
    tenant: str
    priority: Priority
    spares: "tuple[int, ...]"


class Listed(NamedTuple):
    """Of an `Entry` of a block, what its readers need."""

    at: int
    seq: int
    block: PinnedBlock


class Directory:
    """Reads the cells in `view`."""

    def __init__(self, view: memoryview, cells: Cells) -> None:
        self.cells = cells
        self._view = view

    def find(self, key: bytes) -> "Listed | None":
        """The block of a key, whole; None if it is not here, or being written just now."""
        if not self.cells.slots:
            return None
        at = self.cells.slot(key) * CELL_BYTES
        cell = bytes(self._view[at : at + CELL_BYTES])
        if cell[_KEY_AT : HEAD.size] != key:  # most are in the first slot of their window
            window = bytes(self._view[at : at + PROBE * CELL_BYTES])
            found = _cell_in(window, key)
            if found < 0:
                return None
            at, cell = at + found, window[found : found + CELL_BYTES]
        return self._listed(at, cell, key)

    def lists(self, key: bytes) -> bool:
        """Whether there is an entry of a key, read or not: a few times quicker than `find`."""
        if not self.cells.slots:
            return False
        at = self.cells.slot(key) * CELL_BYTES
        if bytes(self._view[at + _KEY_AT : at + HEAD.size]) == key:
            return True
        return _cell_in(bytes(self._view[at : at + PROBE * CELL_BYTES]), key) >= 0

    def unchanged(self, entry: "Listed | Entry") -> bool:
        """Whether the entry is still the one that was found, so that its pages are its own."""
        seq: int = SEQ.unpack_from(self._view, entry.at)[0]
        return seq == entry.seq

    def read(self, at: int) -> "Entry | None":
        """The head at byte `at`; None if it is none, torn, being written or makes no sense."""
        return self._entry(at, bytes(self._view[at : at + CELL_BYTES]))

    def _entry(self, at: int, cell: bytes) -> "Entry | None":
        """What the head's cell, read before anything else, says together with its spares."""
        seq, kind, priority, tags, tenant, extents, generation, size, more, key = HEAD.unpack_from(
            cell
        )
        if seq % 2 or kind not in (BLOCK, RESERVATION) or extents > _MAX_EXTENTS:
            return None
        body, spares = self._body(cell, tenant + tags * _TAG.size + extents * _EXTENT.size, more)
        try:
            name = body[:tenant].decode()
            rank = _PRIORITIES[priority]
        except (ValueError, KeyError):
            return None
        block = _block(generation, size, body[tenant:], tags, extents)
        if block is None:
            return None
        entry = Entry(at, seq, kind, key, block, name, rank, spares)
        return entry if self.unchanged(entry) else None

    def _listed(self, at: int, cell: bytes, wanted: bytes) -> "Listed | None":
        """What a reader needs of `_entry`, if that is of the block it wants."""
        seq, kind, _, tags, tenant, extents, generation, size, more, key = HEAD.unpack_from(cell)
        if seq % 2 or kind != BLOCK or key != wanted or extents > _MAX_EXTENTS:
            return None
        if tags == extents == 1 and tenant <= BODY_BYTES - _TAG_AND_EXTENT.size:  # as most are
            tag_size, tag, first, pages = _TAG_AND_EXTENT.unpack_from(cell, HEAD.size + tenant)
            groups, where = (GroupTag(tag_size, tag),), (Extent(first, pages),)
            listed = Listed(at, seq, PinnedBlock(generation, size, groups, where))
        else:
            body, _ = self._body(cell, tenant + tags * _TAG.size + extents * _EXTENT.size, more)
            block = _block(generation, size, body[tenant:], tags, extents)
            if block is None:
                return None
            listed = Listed(at, seq, block)
        return listed if self.unchanged(listed) else None

    def _body(self, cell: bytes, need: int, more: int) -> "tuple[bytes, tuple[int, ...]]":
        """At least `need` bytes of what follows a head, and the spares they are in; fewer bytes
        where the way on leads nowhere.
        """
        body = cell[HEAD.size :]
        if len(body) >= need:
            return body, ()
        spares = []
        while len(body) < need and 0 < more <= self.cells.spares:
            spares.append(more - 1)
            start = self.cells.spare(more - 1) * CELL_BYTES
            cell = bytes(self._view[start : start + CELL_BYTES])
            more = HEAD.unpack_from(cell)[8]
            body += cell[HEAD.size :]
        return body, tuple(spares)


def _block(
    generation: int, size: int, body: bytes, tags: int, extents: int
) -> "PinnedBlock | None":
    """What a body says behind its tenant; None if it ends too early."""
    end = tags * _TAG.size
    need = end + extents * _EXTENT.size
    if len(body) < need:
        return None
    return PinnedBlock(
        generation,
        size,
        tuple(map(_group_tag, _TAG.iter_unpack(body[:end]))),
        tuple(map(_extent, _EXTENT.iter_unpack(body[end:need]))),
    )


def _cell_in(window: bytes, key: bytes) -> int:
    """Where in a window the cell of a key begins; -1 if it is in none."""
    found = window.find(key)
    while found >= 0 and found % CELL_BYTES != _KEY_AT:
        found = window.find(key, found + 1)
    return found - _KEY_AT if found >= 0 else -1


def pack_body(tenant: bytes, tags: "tuple[GroupTag, ...]", extents: "tuple[Extent, ...]") -> bytes:
    """What follows the head; `tenant` has at most 255 bytes."""
    parts = [tenant]
    parts.extend(_TAG.pack(*tag) for tag in tags)
    parts.extend(_EXTENT.pack(*extent) for extent in extents)
    return b"".join(parts)
