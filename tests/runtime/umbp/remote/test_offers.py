"""What is offered, in which order, and to whom."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.spec.peers import MAX_LEND_KEYS, OfferedBlock
from kimi_runtime.umbp.remote.offers import BATCH_BYTES, OfferQueue

FATES = ("taken", "held", "no_room", "absent", "failed", "late", "closed", "busy")


def block(n, worth=1.0, size=100):
    return OfferedBlock(key=n.to_bytes(16, "big").hex(), size=size, worth=worth, uses=1, idle_ms=0)


def test_the_best_come_first_and_equals_stay_in_order():
    blocks = [block(1, 1.0), block(2, 3.0), block(3, 1.0), block(4, 3.0), block(5, 0.0)]
    queue = OfferQueue(blocks, ["p"])
    assert [int(b.key, 16) for b in queue.batch("p")] == [2, 4, 1, 3]
    assert queue.gone == 1


def test_a_batch_is_bounded_in_keys_and_bytes_and_has_at_least_one_block():
    many = OfferQueue([block(n) for n in range(2 * MAX_LEND_KEYS)], ["p"])
    assert len(many.batch("p")) == MAX_LEND_KEYS
    large = OfferQueue([block(n, size=BATCH_BYTES) for n in range(3)], ["p"])
    assert len(large.batch("p")) == 1


def test_what_one_refuses_is_offered_to_the_other_and_who_is_full_gets_nothing_more():
    queue = OfferQueue([block(1), block(2)], ["p", "q"])
    batch = queue.batch("p")
    assert queue.batch("q") == []
    assert queue.answered("p", batch, ["no_room", "no_room"])
    assert list(queue.wanted_by()) == ["q"]
    assert [b.key for b in queue.batch("q")] == [b.key for b in batch]


def test_one_that_is_busy_is_asked_again():
    queue = OfferQueue([block(1)], ["p"])
    assert not queue.answered("p", queue.batch("p"), ["busy"])
    assert list(queue.wanted_by()) == ["p"]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_peers_answer_every_block_is_accounted_for_and_it_ends(data):
    count = data.draw(st.integers(0, 40))
    worths = st.floats(0, 3)
    blocks = [block(n, data.draw(worths), data.draw(st.integers(1, 1 << 24))) for n in range(count)]
    queue = OfferQueue(blocks, ["p", "q", "r"])
    rounds = 0
    while wanting := list(queue.wanted_by()):
        name = data.draw(st.sampled_from(wanting))
        batch = queue.batch(name)
        assert batch
        rounds += 1
        assert rounds < 1000
        if data.draw(st.booleans()):
            queue.failed(name, batch)
        else:
            fates = FATES if rounds < 60 else FATES[:-1]
            queue.answered(name, batch, [data.draw(st.sampled_from(fates)) for _ in batch])
        assert len(queue.kept) + queue.gone + queue.left() == count
    assert queue.refused() == queue.left()
