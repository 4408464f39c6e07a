"""Feed events that arrive twice or in another order: nothing is believed that may be wrong."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.umbp.feed import FollowState
from router_core import Core, keys_of

PROMPT = keys_of(200)


def test_a_batch_that_arrives_twice_changes_nothing_or_costs_a_connection():
    core = Core("a", "b")
    peer = core["a"]
    peer.log.add(PROMPT)
    line = peer.batch(0)
    assert peer.hear(line)
    if not peer.hear(line):
        peer.connect()
    assert core.feeds.held("a") == len(PROMPT)
    assert core.worker(PROMPT) == "a"


def test_removing_what_was_removed_before_leaves_the_rest_of_the_batch_alone():
    """ai-dynamo/dynamo#14652: one absent block must not keep the others."""
    core = Core("a", "b")
    peer = core["a"]
    peer.log.add(PROMPT)
    peer.connect()
    peer.log.remove(PROMPT[:1])
    first = peer.log.seq
    peer.hear(peer.batch(first - 1))
    peer.log.remove([PROMPT[0], *keys_of(1, 9000), *PROMPT[100:]])
    peer.hear(peer.batch(first))
    assert core.feeds.held("a") == 99


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_any_order_and_any_repetition_ends_where_the_owner_is(seed):
    core, chance = Core("a", "b"), random.Random(seed)
    peer, lines = core["a"], []
    for number in range(8):
        before = peer.log.seq
        peer.log.add(chance.sample(PROMPT, 40))
        if number % 3 == 2:
            peer.log.remove(chance.sample(PROMPT, 30))
        lines.append(peer.batch(before))
    lines += chance.choices(lines, k=4)
    chance.shuffle(lines)
    for line in lines:
        peer.hear(line)
        if core.feeds._index.state("a") is FollowState.EXACT:
            assert core.feeds._index.resume_point("a")[1] <= peer.log.seq
        assert core.decide(PROMPT).plan.decode in ("a", "b")
    peer.connect()
    assert core.feeds.held("a") == len(peer.log)
