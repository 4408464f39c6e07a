"""One feed over two tiers, and which blocks go from the one to the other."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.umbp.feed import FeedFollower, FeedLog, FollowState
from kimi_runtime.umbp.holdings import TierHoldings
from kimi_runtime.umbp.records import Block
from kimi_runtime.umbp.worth import worth_writing


def key(n):
    return n.to_bytes(16, "big")


def keys(*numbers):
    return [key(n) for n in numbers]


STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 1]),
        st.sampled_from(["add", "remove", "clear"]),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    max_size=30,
)


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_a_follower_knows_at_each_step_exactly_what_any_tier_holds(steps):
    feed = FeedLog("pool", epoch=1, tier="dram")
    tiers, held = TierHoldings.pair(feed), [set(), set()]
    follower = FeedFollower()
    follower.apply(feed.hello())
    for tier, how, numbers in steps:
        if how == "clear":
            tiers[tier].clear()
            held[tier].clear()
        else:
            getattr(tiers[tier], how)(keys(*numbers))
            change = held[tier].update if how == "add" else held[tier].difference_update
            change(keys(*numbers))
        batch = feed.batch_after(follower.seq)
        assert follower.apply(batch)
        assert follower.keys == held[0] | held[1]
        assert [len(t) for t in tiers] == [len(h) for h in held]
        assert all((k in tiers[n]) == (k in held[n]) for n in (0, 1) for k in keys(*range(6)))
    assert follower.state is FollowState.EXACT


def test_a_block_that_moves_between_tiers_changes_nothing_for_followers():
    feed = FeedLog("pool", epoch=1, tier="dram")
    memory, ssd = TierHoldings.pair(feed)
    memory.add(keys(1))
    told = feed.seq
    ssd.add(keys(1))
    memory.remove(keys(1))
    memory.add(keys(1))
    ssd.remove(keys(1))
    assert (feed.seq, key(1) in feed) == (told, True)
    memory.remove(keys(1))
    assert (feed.seq, key(1) in feed) == (told + 1, False)


def worthy(uses, on_ssd=(), after_uses=2):
    """Numbers of the run 0, 1, ... to be written, of blocks used so often; None: not in memory."""
    blocks = {
        key(n): Block(key(n), 1, 10, 1, (), (), uses=count)
        for n, count in enumerate(uses)
        if count is not None
    }
    ssd, _ = TierHoldings.pair(FeedLog("pool", epoch=1, tier="dram"))
    ssd.add(keys(*on_ssd))
    run = keys(*range(len(uses)))
    found = worth_writing(run, blocks.get, ssd, after_uses=after_uses)
    return [int.from_bytes(block.key, "big") for block in found]


def test_what_was_only_put_is_not_worth_it_and_a_second_use_makes_it_so():
    assert worthy([1, 1]) == []
    assert worthy([2, 3]) == [0, 1]
    assert worthy([1, 1], after_uses=1) == [0, 1]


def test_what_is_on_ssd_is_not_written_again():
    assert worthy([5, 5, 5], on_ssd=[0, 2]) == [1]


def test_nothing_is_written_behind_a_block_that_will_not_be_there():
    assert worthy([2, 1, 2]) == [0]
    assert worthy([2, None, 2]) == [0]
    assert worthy([2, None, 2], on_ssd=[1]) == [0, 2]
