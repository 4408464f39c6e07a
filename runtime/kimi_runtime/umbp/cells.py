"""The daemon's side of the arena's directory: the pool's account, kept where it outlives us.

`kimi_connect.directory` has the layout and reads it; this writes it, as the pool's `Journal`, and
recovers the account a daemon before left, after whatever crash: an entry torn by it is no entry.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kimi_connect.arena import Arena
from kimi_connect.directory import (
    BLOCK,
    BODY_BYTES,
    CELL_BYTES,
    HEAD,
    MORE,
    PROBE,
    RESERVATION,
    SEQ,
    Entry,
    pack_body,
)
from kimi_connect.wire import KEY_BYTES, Extent, GroupTag
from kimi_runtime.umbp.journal import Kept, KeptBlock, KeptReservation
from kimi_runtime.umbp.records import Block, Reservation

NUMBERS_AHEAD = 4096
"""Generations noted as given out before they are, so that not each one is a store."""

_TENANT_BYTES = 255


class _Place(NamedTuple):
    """The cells of one entry: its head's number, and its spares'."""

    cell: int
    spares: tuple[int, ...]


class _Fields(NamedTuple):
    """A head without its sequence number and the way on."""

    kind: int
    priority: int
    tenant: bytes
    tags: tuple[GroupTag, ...]
    extents: tuple[Extent, ...]
    generation: int
    size: int
    key: bytes


class CellJournal:
    """Writes the directory of `arena`; `own_writer` is the daemon's own name as a writer."""

    def __init__(self, arena: Arena, *, own_writer: bytes) -> None:
        self.unlisted = 0
        """Blocks there was no cell for: served by the daemon alone, and lost when it ends."""
        self._arena, self._view, self._cells = arena, arena.table, arena.shape.cells
        self._own = _writer(own_writer)
        self._mark = arena.number
        self._blocks: dict[int, _Place] = {}
        self._reservations: dict[int, _Place] = {}
        self._used_slots: set[int] = set()
        self._free_spares = list(range(self._cells.spares))[::-1]

    def recover(self) -> Kept:
        """What the daemon before left; cells of no intact entry are emptied. Call it first."""
        blocks: dict[bytes, Entry] = {}
        reservations: dict[int, Entry] = {}
        for cell, entry in self._entries():
            if entry.kind == BLOCK and self._makes_sense(cell, entry):
                blocks[entry.key] = entry
            elif entry.kind == RESERVATION and entry.key != self._own:
                reservations[entry.block.generation] = entry
        for entry in blocks.values():  # the crash came between the two
            reservations.pop(entry.block.generation, None)
        self._keep([*blocks.values(), *reservations.values()])
        return Kept(
            number=self._mark,
            blocks=tuple(
                KeptBlock(key, *_geometry(entry), entry.block.tags, entry.tenant, entry.priority)
                for key, entry in blocks.items()
            ),
            reservations=tuple(
                KeptReservation(generation, entry.key, entry.block.extents, entry.tenant)
                for generation, entry in reservations.items()
            ),
        )

    def forget(self) -> None:
        """Empty every cell: what is here can't be trusted together."""
        self._keep([])

    def reserved(self, reservation: Reservation) -> bool:
        """Note who may write where; False without cells for it.

        What the daemon itself writes to needs no note: nobody does once it has ended.
        """
        generation = reservation.generation
        if generation >= self._mark:
            self._mark = generation + NUMBERS_AHEAD
            self._arena.number = self._mark
        writer = _writer(reservation.writer)
        if writer == self._own:
            return True
        fields = _Fields(
            kind=RESERVATION,
            priority=reservation.priority,
            tenant=_tenant(reservation.account.name),
            tags=(),
            extents=reservation.extents,
            generation=generation,
            size=0,
            key=writer,
        )
        body = _body(fields)
        if len(self._free_spares) < 1 + _more(body):
            return False
        cell = self._cells.spare(self._free_spares.pop())
        self._reservations[generation] = self._write(cell, fields, body)
        return True

    def ended(self, generation: int) -> None:
        """Empty a reservation's cells."""
        place = self._reservations.pop(generation, None)
        if place is not None:
            self._empty(place.cell)
            self._free_spares += [place.cell - self._cells.spare(0), *place.spares]

    def published(self, block: Block) -> None:
        """List a block, if there is a slot and spares for it."""
        fields = _Fields(
            kind=BLOCK,
            priority=block.priority,
            tenant=_tenant(block.account.name),
            tags=block.tags,
            extents=block.extents,
            generation=block.generation,
            size=block.size,
            key=block.key,
        )
        body = _body(fields)
        first = self._cells.slot(block.key)
        free = (s for s in range(first, first + PROBE) if s not in self._used_slots)
        slot = next(free, None)
        if slot is None or len(self._free_spares) < _more(body):
            self.unlisted += 1
            return
        self._used_slots.add(slot)
        self._blocks[block.generation] = self._write(slot, fields, body)

    def removed(self, block: Block) -> None:
        """Empty a block's cells: from now on no reader begins with it, and none ends with it."""
        place = self._blocks.pop(block.generation, None)
        if place is None:
            return
        self._empty(place.cell)
        self._used_slots.discard(place.cell)
        self._free_spares += place.spares

    def _write(self, cell: int, fields: _Fields, body: bytes) -> _Place:
        """Write the spares, which nothing leads to yet, then the head."""
        spares = tuple(self._free_spares.pop() for _ in range(_more(body)))
        ways = [*(number + 1 for number in spares), 0]
        for number, part, way in zip(spares, _parts(body), ways[1:], strict=True):
            head = HEAD.pack(0, MORE, 0, 0, 0, 0, 0, 0, way, bytes(KEY_BYTES))
            self._store(self._cells.spare(number) * CELL_BYTES, head + part)
        at = cell * CELL_BYTES
        seq = self._seq(at)
        whole = HEAD.pack(
            *(seq, fields.kind, fields.priority, len(fields.tags), len(fields.tenant)),
            *(len(fields.extents), fields.generation, fields.size, ways[0], fields.key),
        )
        self._store(at, SEQ.pack(seq + 1))
        self._store(at + SEQ.size, whole[SEQ.size :] + body[:BODY_BYTES])
        self._store(at, SEQ.pack(seq + 2))
        return _Place(cell, spares)

    def _empty(self, cell: int) -> None:
        at = cell * CELL_BYTES
        seq = self._seq(at)
        self._store(at, SEQ.pack(seq + 1))
        self._store(at + SEQ.size, bytes(HEAD.size - SEQ.size))
        self._store(at, SEQ.pack(seq + 2))

    def _seq(self, at: int) -> int:
        """The even number a cell begins its next change with."""
        seq: int = SEQ.unpack_from(self._view, at)[0]
        return (seq + seq % 2) % 2**63

    def _store(self, at: int, data: bytes) -> None:
        self._view[at : at + len(data)] = data

    def _entries(self) -> Iterator[tuple[int, Entry]]:
        for cell in self._filled():
            entry = self._arena.directory.read(cell * CELL_BYTES)
            if entry is not None:
                yield cell, entry

    def _filled(self) -> list[int]:
        """Cells that are not plainly empty; an arena has millions."""
        table = np.frombuffer(self._view, np.uint8).reshape(-1, CELL_BYTES)
        odd, kind = table[:, 0] % 2, table[:, SEQ.size]
        filled: list[int] = np.flatnonzero(odd | kind).tolist()
        return filled

    def _makes_sense(self, cell: int, entry: Entry) -> bool:
        block, page_bytes = entry.block, self._arena.page_bytes
        pages = sum(extent.pages for extent in block.extents)
        inside = all(first + count <= self._arena.pages for first, count in block.extents)
        first = self._cells.slot(entry.key)
        found = first <= cell < first + PROBE
        return found and inside and block.size > 0 and pages == -(-block.size // page_bytes)

    def _keep(self, entries: list[Entry]) -> None:
        """Go on from these entries, and empty every other cell."""
        self._blocks, self._reservations, self._used_slots = {}, {}, set()
        cells: set[int] = set()
        for entry in entries:
            place = _Place(entry.at // CELL_BYTES, entry.spares)
            cells |= {place.cell, *(self._cells.spare(number) for number in place.spares)}
            if entry.kind == BLOCK:
                self._blocks[entry.block.generation] = place
                self._used_slots.add(place.cell)
            else:
                self._reservations[entry.block.generation] = place
        first = self._cells.spare(0)
        self._free_spares = [n for n in range(self._cells.spares) if first + n not in cells][::-1]
        for cell in self._filled():
            if cell not in cells:
                self._empty(cell)


def _geometry(entry: Entry) -> tuple[int, int, tuple[Extent, ...]]:
    return entry.block.generation, entry.block.size, entry.block.extents


def _body(fields: _Fields) -> bytes:
    return pack_body(fields.tenant, fields.tags, fields.extents)


def _more(body: bytes) -> int:
    """Spare cells for what of a body does not fit into a head."""
    return max(0, -(-len(body) // BODY_BYTES) - 1)


def _parts(body: bytes) -> list[bytes]:
    """What of a body goes into spare cells, cell by cell."""
    return [body[at : at + BODY_BYTES] for at in range(BODY_BYTES, len(body), BODY_BYTES)]


def _tenant(name: str) -> bytes:
    """A tenant's name as it is kept; one too long is kept as that of the shared account."""
    data = name.encode()
    return data if len(data) <= _TENANT_BYTES else b""


def _writer(instance: bytes) -> bytes:
    return instance[:KEY_BYTES].ljust(KEY_BYTES, b"\0")
