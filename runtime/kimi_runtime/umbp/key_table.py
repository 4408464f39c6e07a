"""Which owners hold which keys, for millions of keys in some tens of bytes each. Pure.

A key's number stands for a set of owners, and sets are kept once each: keys of one prompt are held
by the same owners, so there are few. An owner is a bit. That an owner holds nothing any more is one
bit retired: its bit is not seen from then on, and taken out of the sets bit by bit by later calls,
as are the moves to a larger table. No call therefore takes long, except the rare collection of sets
that no key has any more.

Keys are known by 64 bits of them: the chance that one of 10 million names another key is 5e-13, and
the index is advisory.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from kimi_runtime.umbp.slots import BUCKET, Array, Slots, name_of, names_of

MAX_LOAD, START_LOAD = 0.7, 0.45
"""Of a table when it is left for another, and at most of one that is begun."""

MIN_BITS = 7
MOVED_BUCKETS = 512
"""Buckets moved, or swept, by a call that changes something, at least."""

MAX_SETS = 65_536
"""Sets of owners that are kept before those without a key are collected."""

_AHEAD = 8192
"""Keys looked up at a time, after the first: a cold prompt ends there, others seldom early."""

_FEW = 48
"""Keys up to which one after the other is sooner done than all together in arrays."""


class KeyTable:
    """Numbers of owners are given by `new_owner`; keys are 16 bytes each."""

    def __init__(
        self,
        *,
        min_bits: int = MIN_BITS,
        moved_buckets: int = MOVED_BUCKETS,
        max_sets: int = MAX_SETS,
    ) -> None:
        self._min_bits, self._moved_buckets, self._max_sets = min_bits, moved_buckets, max_sets
        self._slots = Slots(min_bits)
        self._old: Slots | None = None
        self._moved = 0
        self._masks = [0]
        self._set_of = {0: 0}
        self._collect_at = max_sets
        self._counts: dict[int, int] = {}
        self.generation = 0
        """Of the owners' numbers: another one once a number may mean somebody else."""
        self._shown = 0
        self._free_bits: list[int] = []
        self._bits = 0
        self._retired = 0
        self._sweeping = 0
        self._swept = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tables and, about, of the sets."""
        sets = sum(200 + mask.bit_length() // 8 for mask in self._masks)
        return self._slots.nbytes + (0 if self._old is None else self._old.nbytes) + sets

    def new_owner(self, *, shown: bool) -> int:
        """A number for an owner that holds nothing; `runs` speaks of it once it is shown."""
        if self._free_bits:
            owner = self._free_bits.pop()
        else:
            owner, self._bits = self._bits, self._bits + 1
        self._counts[owner] = 0
        self.generation += 1
        if shown:
            self.show(owner)
        return owner

    def show(self, owner: int) -> None:
        """From now on `runs` speaks of this owner."""
        self._shown |= 1 << owner

    def retire(self, owner: int) -> None:
        """An owner holds nothing any more, and its number means nobody."""
        del self._counts[owner]
        self._shown &= ~(1 << owner)
        self._retired |= 1 << owner

    def count(self, owner: int) -> int:
        """How many keys an owner holds."""
        return self._counts[owner]

    def holds(self, owner: int, key: bytes) -> bool:
        """Whether an owner holds a key."""
        return bool(self._masks[self._number_of(key)] >> owner & 1)

    def add(self, owner: int, keys: Sequence[bytes]) -> None:
        """An owner holds these; those it held already change nothing."""
        if len(keys) <= _FEW:
            self._change_few(owner, keys, held=True)
            return
        names = _different(names_of(keys))
        self._grow(len(names))
        slots = self._bring(names)
        missing = slots < 0
        slots[missing] = self._slots.insert(names[missing])
        self._change(owner, slots, held=True)
        self._tidy(len(names))

    def remove(self, owner: int, keys: Sequence[bytes]) -> None:
        """An owner holds these no more; those it did not hold are passed over."""
        if len(keys) <= _FEW:
            self._change_few(owner, keys, held=False)
            return
        names = _different(names_of(keys))
        self._grow(len(names))
        slots = self._bring(names)
        self._change(owner, slots[slots >= 0], held=False)
        self._tidy(len(names))

    def runs(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Lengths of leading runs of `keys`, ascending, each with the shown owners that have it.

        Owners are a set of bits by their numbers; who does not hold the first key is left out.
        """
        if not keys:
            return []
        runs: list[tuple[int, int]] = []
        alive, at = self._shown & self._masks[self._number_of(keys[0])], 1
        while at < len(keys) and alive:
            numbers = self._numbers(keys[at : at + _AHEAD])
            changes = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
            for position in (0, *changes.tolist()):
                still = alive & self._masks[numbers[position]]
                if still != alive:
                    runs.append((at + position, alive ^ still))
                    alive = still
            at += len(numbers)
        if alive:
            runs.append((len(keys), alive))
        return runs

    def holders(self, keys: Sequence[bytes]) -> list[int]:
        """The shown owners of each key, as a set of bits by their numbers."""
        if not keys:
            return []
        return [self._masks[number] & self._shown for number in self._numbers(keys).tolist()]

    def _numbers(self, keys: Sequence[bytes]) -> Array:
        if len(keys) == 1:
            return np.array([self._number_of(keys[0])])
        names = names_of(keys)
        slots = self._slots.find(names)
        if slots.min() >= 0:
            return self._slots.numbers.take(slots)
        numbers = np.where(slots >= 0, self._slots.numbers[slots], 0)
        if self._old is not None:
            lost = np.flatnonzero(slots < 0)
            older = self._old.find(names[lost])
            numbers[lost] = np.where(older >= 0, self._old.numbers[older], 0)
        return numbers

    def _number_of(self, key: bytes) -> int:
        name = name_of(key)
        slot = self._slots.find_one(name)
        if slot >= 0:
            return self._slots.number(slot)
        if self._old is not None and (slot := self._old.find_one(name)) >= 0:
            return self._old.number(slot)
        return 0

    def _change_few(self, owner: int, keys: Sequence[bytes], *, held: bool) -> None:
        """`add` or `remove`, without arrays."""
        if not keys:
            return
        names = dict.fromkeys(map(name_of, keys))
        self._grow(len(names))
        slots, bit, changed = self._slots, 1 << owner, 0
        becomes: dict[int, tuple[int, bool]] = {}
        """Of the numbers that were met: the new one, and whether its set is another."""
        for name in names:
            slot = slots.place(name)
            if slot >= 0:
                number = slots.number(slot)
            else:
                old = self._take_old(name)
                if old is None and not held:
                    continue
                slot, number = slots.insert_one(name, slot), old or 0
            known = becomes.get(number)
            if known is None:
                before = self._masks[number] & ~self._retired
                after = before | bit if held else before & ~bit
                known = becomes[number] = self._set(after), after != before
            slots.set_number(slot, known[0])
            changed += known[1]
        self._counts[owner] += changed if held else -changed
        self._tidy(len(names))

    def _take_old(self, name: int) -> int | None:
        """The number that a name has in the old table, which has it no more; None if it has none.

        The name stays there without one.
        """
        if self._old is None or (slot := self._old.find_one(name)) < 0:
            return None
        number = self._old.number(slot)
        self._old.set_number(slot, 0)
        return number

    def _bring(self, names: Array) -> Array:
        """Slots of names in the table in use; what the old one has of them is moved first."""
        slots = self._slots.find(names)
        if self._old is not None:
            lost = np.flatnonzero(slots < 0)
            older = self._old.find(names[lost])
            lost, older = lost[older >= 0], older[older >= 0]
            slots[lost] = self._slots.insert(names[lost])
            self._slots.numbers[slots[lost]] = self._old.numbers[older]
            self._old.numbers[older] = 0
        return slots

    def _change(self, owner: int, slots: Array, *, held: bool) -> None:
        bit, table = 1 << owner, self._slots.numbers
        if not len(slots):
            return
        known = table[slots]
        if (known == known[0]).all():  # keys of one prompt
            mask = self._masks[known[0]] & ~self._retired
            after_all = mask | bit if held else mask & ~bit
            table[slots] = self._set(after_all)
            if after_all != mask:
                self._counts[owner] += len(slots) if held else -len(slots)
            return
        numbers, inverse = np.unique(known, return_inverse=True)
        before = [self._masks[number] & ~self._retired for number in numbers.tolist()]
        after = [mask | bit if held else mask & ~bit for mask in before]
        changed = np.array([a != b for a, b in zip(after, before, strict=True)], bool)
        sets = np.array([self._set(mask) for mask in after], np.uint32)
        table[slots] = sets[inverse]
        self._counts[owner] += int(changed[inverse].sum()) * (1 if held else -1)

    def _set(self, mask: int) -> int:
        number = self._set_of.get(mask)
        if number is None:
            number = self._set_of[mask] = len(self._masks)
            self._masks.append(mask)
        return number

    def _grow(self, coming: int) -> None:
        """Begin to move to another table if so many more names would fill this one too much."""
        if self._slots.used + coming <= MAX_LOAD * self._slots.size:
            return
        while self._old is not None:
            self._move(self._moved_buckets)
        live = int(np.count_nonzero(self._slots.numbers)) + coming
        bits = self._min_bits
        while live > START_LOAD * (BUCKET << bits):
            bits += 1
        bits = max(bits, self._slots.bits - 1)
        self._old, self._slots, self._moved = self._slots, Slots(bits), 0
        self._swept = 0

    def _tidy(self, changed: int) -> None:
        """A part of the work that is left over."""
        buckets = max(self._moved_buckets, changed)
        if self._old is not None:
            self._move(buckets)
        elif self._retired:
            self._sweep(buckets)
        if len(self._masks) > self._collect_at:
            self._collect()

    def _move(self, buckets: int) -> None:
        old = self._old
        assert old is not None
        first, last = self._moved * BUCKET, (self._moved + buckets) * BUCKET
        numbers = old.numbers[first:last]
        live = np.flatnonzero(numbers)
        slots = self._slots.insert(old.names.reshape(-1)[first:last][live])
        self._slots.numbers[slots] = numbers[live]
        numbers[live] = 0
        self._moved += buckets
        if self._moved >= old.buckets:
            self._old = None

    def _sweep(self, buckets: int) -> None:
        """Take retired owners out of the sets of some keys; after a whole round they are free."""
        if not self._swept:
            self._sweeping = self._retired
        part = self._slots.numbers[self._swept * BUCKET : (self._swept + buckets) * BUCKET]
        numbers, inverse = np.unique(part, return_inverse=True)
        masks = [self._masks[number] & ~self._sweeping for number in numbers.tolist()]
        part[:] = np.array([self._set(mask) for mask in masks], np.uint32)[inverse]
        self._swept += buckets
        if self._swept >= self._slots.buckets:
            self._free_bits += bits_of(self._sweeping)
            self._retired &= ~self._sweeping
            self._swept = 0

    def _collect(self) -> None:
        """Forget the sets that no key has."""
        tables = [self._slots] if self._old is None else [self._slots, self._old]
        used = np.zeros(len(self._masks), bool)
        used[0] = True
        for table in tables:
            used[table.numbers] = True
        kept = np.flatnonzero(used)
        renumbered = np.zeros(len(self._masks), np.uint32)
        renumbered[kept] = np.arange(len(kept), dtype=np.uint32)
        for table in tables:
            table.numbers[:] = renumbered[table.numbers]
        self._masks = [self._masks[number] for number in kept.tolist()]
        self._set_of = {mask: number for number, mask in enumerate(self._masks)}
        self._collect_at = max(self._max_sets, 2 * len(self._masks))


def _different(names: Array) -> Array:
    """Each of the names once, in order."""
    names.sort()
    again = names[1:] == names[:-1]
    return names[np.concatenate(([True], ~again))] if again.any() else names


def bits_of(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
