"""Millions of keys of many owners in one table."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kimi_runtime.umbp.key_table import KeyTable, bits_of
from kimi_runtime.umbp.slots import Slots, name_of, names_of


def key(n):
    return n.to_bytes(16, "big")


def run_of(held, keys):
    return next((n for n, k in enumerate(keys) if k not in held), len(keys))


def runs_of(table, keys):
    return {owner: run for run, owners in table.runs(keys) for owner in bits_of(owners)}


class TableAgainstSets(RuleBasedStateMachine):
    """Owners come, change and go while keys move between tables; sets say what is right."""

    numbers = st.integers(0, 120)
    spans = st.builds(lambda start, size: list(range(start, start + size)), numbers, numbers)

    def __init__(self):
        super().__init__()
        self.table = KeyTable(min_bits=1, moved_buckets=1, max_sets=6)
        self.sets = {}
        self.shown = set()
        for _ in range(3):
            self.arrive(True)

    @rule(shown=st.booleans())
    def arrive(self, shown):
        if len(self.sets) < 6:
            owner = self.table.new_owner(shown=shown)
            assert owner not in self.sets
            self.sets[owner] = set()
            self.shown |= {owner} if shown else set()

    @rule(which=st.integers(0, 9), numbers=spans | st.lists(numbers, max_size=5))
    def add(self, which, numbers):
        owner, keys = self.owner(which), [key(n) for n in numbers]
        self.table.add(owner, keys)
        self.sets[owner] |= set(keys)

    @rule(which=st.integers(0, 9), numbers=spans | st.lists(numbers, max_size=5))
    def remove(self, which, numbers):
        owner, keys = self.owner(which), [key(n) for n in numbers]
        self.table.remove(owner, keys)
        self.sets[owner] -= set(keys)

    @rule(which=st.integers(0, 9))
    def leave(self, which):
        if len(self.sets) > 1:
            owner = self.owner(which)
            self.table.retire(owner)
            del self.sets[owner]
            self.shown.discard(owner)

    @rule(which=st.integers(0, 9))
    def show(self, which):
        owner = self.owner(which)
        self.table.show(owner)
        self.shown.add(owner)

    @rule(numbers=spans | st.lists(numbers, max_size=8))
    def ask(self, numbers):
        keys = [key(n) for n in numbers]
        runs = {owner: run_of(self.sets[owner], keys) for owner in self.shown}
        assert runs_of(self.table, keys) == {owner: run for owner, run in runs.items() if run}

    @invariant()
    def counts_are_right(self):
        assert {owner: self.table.count(owner) for owner in self.sets} == {
            owner: len(held) for owner, held in self.sets.items()
        }

    def owner(self, which):
        return sorted(self.sets)[which % len(self.sets)]

    def teardown(self):
        for n in range(245):
            for owner, held in self.sets.items():
                assert self.table.holds(owner, key(n)) == (key(n) in held)


TestTableAgainstSets = TableAgainstSets.TestCase
TestTableAgainstSets.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_long_run_is_found_to_its_end_for_every_owner():
    table, draw = KeyTable(), random.Random(1)
    keys = [draw.randbytes(16) for _ in range(10_000)]
    owners = [table.new_owner(shown=True) for _ in range(100)]
    for number, owner in enumerate(owners):
        table.add(owner, keys[: 100 * number])
    assert runs_of(table, keys) == {owner: 100 * n for n, owner in enumerate(owners) if n}
    assert runs_of(table, keys[:1]) == dict.fromkeys(owners[1:], 1)
    assert runs_of(table, [draw.randbytes(16), *keys]) == {}


def test_owners_that_come_and_go_do_not_use_up_their_numbers_or_memory():
    table, draw = KeyTable(moved_buckets=64, max_sets=64), random.Random(2)
    keep = table.new_owner(shown=True)
    kept = [draw.randbytes(16) for _ in range(500)]
    table.add(keep, kept)
    for _ in range(300):
        owner = table.new_owner(shown=True)
        table.add(owner, kept[:50] + [draw.randbytes(16) for _ in range(200)])
        table.retire(owner)
    assert runs_of(table, kept) == {keep: 500}
    assert table.new_owner(shown=True) < 100
    assert table.nbytes < 400_000


def test_a_key_s_name_is_the_same_one_at_a_time_and_many_at_once():
    keys = [random.Random(n).randbytes(16) for n in range(200)] + [bytes(16)]
    assert names_of(keys).tolist() == [name_of(k) for k in keys]
    slots = Slots(3)
    names = names_of([key(n) for n in range(60)])
    at = slots.insert(names)
    assert slots.find(names).tolist() == at.tolist() == [slots.find_one(n) for n in names.tolist()]
    assert len(set(at.tolist())) == 60
