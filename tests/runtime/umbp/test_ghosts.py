"""What more memory would have kept."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.umbp.ghosts import SHARES, Ghosts


def key(n):
    return n.to_bytes(16, "big")


class Lru:
    """A memory that keeps the blocks used last, and tells `ghosts` what it evicts."""

    def __init__(self, blocks, ghosts=None):
        self.blocks, self.ghosts, self.held, self.hits = blocks, ghosts, OrderedDict(), 0

    def ask(self, k):
        if k in self.held:
            self.hits += 1
        if self.ghosts is not None:
            self.ghosts.asked([k], int(k in self.held), self.held.__contains__)
            self.ghosts.forget(k)
        self.held.pop(k, None)
        self.held[k] = None
        if len(self.held) > self.blocks:
            evicted, _ = self.held.popitem(last=False)
            if self.ghosts is not None:
                self.ghosts.evicted(evicted, 10)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 25), max_size=300))
def test_the_priced_hits_are_those_of_a_larger_lru_memory(asked):
    ghosts = Ghosts(capacity_bytes=80, max_keys=100)
    small = Lru(8, ghosts)
    larger = {share: Lru(int(8 * (1 + share))) for share in SHARES}
    for n in asked:
        small.ask(key(n))
        for lru in larger.values():
            lru.ask(key(n))
    for share, lru in larger.items():
        assert ghosts.hit_blocks + ghosts.more_hits[share] == lru.hits
    assert ghosts.asked_blocks == len(asked)


def test_a_block_behind_a_lost_one_needs_that_one_too():
    ghosts = Ghosts(capacity_bytes=100)
    for n in (1, 2, 3):
        ghosts.evicted(key(n), 20)
    assert [ghosts.distance(key(n)) for n in (3, 2, 1, 4)] == [20, 40, 60, None]
    ghosts.asked([key(9), key(2), key(8), key(3)], 1, {key(8)}.__contains__)
    assert ghosts.more_hits == {0.125: 0, 0.25: 0, 0.5: 3, 1.0: 3}
    ghosts.asked([key(4), key(3)], 0, set().__contains__)
    assert ghosts.more_hits[1.0] == 3  # nothing would have kept what never was


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 50)), max_size=80))
def test_distances_are_those_of_a_plain_list(steps):
    ghosts, plain = Ghosts(capacity_bytes=100, max_keys=6), OrderedDict()
    for evicted, n, size in steps:
        plain.pop(key(n), None)
        if evicted:
            ghosts.evicted(key(n), size)
            plain[key(n)] = size
            if len(plain) > 6:
                plain.popitem(last=False)
        else:
            ghosts.forget(key(n))
        below = 0
        for k, size_of in reversed(plain.items()):
            below += size_of
            assert ghosts.distance(k) == below
        assert len(ghosts) == len(plain)


def test_renumbering_keeps_distances():
    ghosts = Ghosts(capacity_bytes=100, max_keys=3)
    for n in range(10_000):
        ghosts.evicted(key(n), 1 + n % 3)
    assert [ghosts.distance(key(n)) for n in (9999, 9998, 9997)] == [1, 4, 6]
