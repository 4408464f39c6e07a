"""Blocks are conserved, shared by key, and forgotten in LRU order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.umbp.feed import FeedLog


def kv_blocks(total: int) -> KvBlocks:
    return KvBlocks(total, FeedLog("w", epoch=1, tier="hbm", block_tokens=4))


def keys(*names: str) -> list[bytes]:
    return [name.encode().ljust(16) for name in names]


def sealed(blocks: KvBlocks, *names: str) -> list[int]:
    taken = blocks.allocate(len(names))
    assert taken is not None
    return [blocks.seal(block, key) for block, key in zip(taken, keys(*names), strict=True)]


def test_allocating_more_than_is_available_takes_nothing():
    blocks = kv_blocks(3)
    assert blocks.allocate(4) is None
    assert blocks.available == 3


def test_released_keyed_blocks_are_found_again_and_still_available():
    blocks = kv_blocks(3)
    mine = sealed(blocks, "a", "b")
    blocks.release(mine)
    assert blocks.available == 3
    assert blocks.acquire(keys("a", "b", "c")) == mine
    assert blocks.available == 1


def test_the_least_recently_used_chain_is_forgotten_from_its_end():
    blocks = kv_blocks(4)
    old, new = sealed(blocks, "a", "b"), sealed(blocks, "c", "d")
    blocks.release(new)
    blocks.release(old)
    blocks.release(blocks.acquire(keys("c", "d")))
    assert blocks.allocate(1) is not None
    assert (blocks.held(keys("a", "b")), blocks.held(keys("c", "d"))) == (1, 2)


def test_the_same_content_computed_twice_is_kept_once():
    blocks = kv_blocks(2)
    [first], [second] = sealed(blocks, "a"), sealed(blocks, "a")
    assert first == second
    assert blocks.available == 1
    blocks.check_integrity([[first], [second]])


@given(
    held=st.text("abcde", max_size=5),
    asked=st.text("abcde", max_size=5),
    taken=st.integers(0, 5),
    forgotten=st.text("abcde", max_size=2),
)
def test_blocks_are_a_run_if_it_would_be_acquired_again(held, asked, taken, forgotten):
    blocks = kv_blocks(8)
    blocks.release(sealed(blocks, *dict.fromkeys(held)))
    mine = blocks.acquire(keys(*asked[:taken]))
    blocks.forget(keys(*forgotten))
    assert blocks.is_run(mine, keys(*asked)) == (blocks.acquire(keys(*asked)) == mine)


@given(names=st.lists(st.sampled_from("abcdef"), max_size=8), held=st.sets(st.sampled_from("abc")))
def test_blocks_that_are_sealed_together_are_sealed_one_after_the_other(names, held):
    together, singly = kv_blocks(16), kv_blocks(16)
    for blocks in (together, singly):
        sealed(blocks, *sorted(held))
    taken, same = together.allocate(len(names)), singly.allocate(len(names))
    assert taken is not None
    assert taken == same
    found = together.seal_run(taken, keys(*names))
    assert found == [singly.seal(*one) for one in zip(taken, keys(*names), strict=True)]
    assert together.acquire(keys(*"abcdef")) == singly.acquire(keys(*"abcdef"))
    assert together.available == singly.available
    together.check_integrity()


def test_forgotten_keys_are_missed_but_their_users_keep_the_blocks():
    blocks = kv_blocks(2)
    used = sealed(blocks, "a")
    blocks.release(sealed(blocks, "b"))
    blocks.forget(keys("a", "b", "c"))
    assert blocks.held(keys("a")) == blocks.held(keys("b")) == 0
    blocks.check_integrity([used])
    blocks.release(used)
    blocks.check_integrity([])


@given(st.lists(st.integers(0, 5), max_size=40))
@settings(max_examples=50, deadline=None)
def test_keys_are_forgotten_in_the_order_of_their_last_use(uses: list[int]):
    blocks, order = kv_blocks(6), keys(*"abcdef")
    for block in sealed(blocks, *"abcdef"):
        blocks.release([block])
    for use in uses:
        key = keys("abcdef"[use])[0]
        blocks.release(blocks.acquire([key]))
        blocks.check_integrity([])
        order.remove(key)
        order.append(key)
    for gone in range(1, 7):
        assert blocks.allocate(1) is not None
        assert [bool(blocks.held([key])) for key in order] == [False] * gone + [True] * (6 - gone)


def test_releasing_twice_is_our_own_bug():
    blocks = kv_blocks(1)
    taken = blocks.allocate(1)
    assert taken is not None
    blocks.release(taken)
    with pytest.raises(AssertionError, match="released twice"):
        blocks.release(taken)


class BlocksMachine(RuleBasedStateMachine):
    """Any interleaving of holders keeps the books."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = kv_blocks(6)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        taken = self.blocks.allocate(count)
        if taken is not None:
            for block in taken:
                self.content.pop(block, None)
            self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def seal_one(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        for index, block in enumerate(holder):
            if self.blocks.key(block) is None and block not in self.content:
                key = bytes([data.draw(st.integers(0, 7))]) * 16
                holder[index] = self.blocks.seal(block, key)
                assert self.content.setdefault(holder[index], key) == key
                return

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.integers(0, 7), max_size=3))
        wanted = [bytes([name]) * 16 for name in names]
        blocks = self.blocks.acquire(wanted)
        assert [self.content[block] for block in blocks] == wanted[: len(blocks)]
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.holders) - 1))
        self.blocks.release(self.holders.pop(position))

    @rule(name=st.integers(0, 7))
    def forget(self, name: int) -> None:
        self.blocks.forget([bytes([name]) * 16])

    @invariant()
    def books_balance(self) -> None:
        self.blocks.check_integrity(self.holders)


TestBlocksMachine = BlocksMachine.TestCase
TestBlocksMachine.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
