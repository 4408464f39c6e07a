"""The pool's account of reservations, blocks, pins and pages."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kimi_connect.keeping import Filled
from kimi_connect.wire import Commitment, Extent, Gap, Grant, GroupTag, HintKind, Priority
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.journal import Kept, KeptBlock, KeptReservation
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.retention import Hint, Retention
from kimi_runtime.umbp.tenants import QUIET_S, Accounts, Terms

PAGE = 100
TTL_S, LEASE_S = 30.0, 10.0
A, B = b"writer-a", b"writer-b"
TAGS = (GroupTag(1, b"t" * 16),)


def new_pool(pages=10, **changes):
    feed = FeedLog("pool", epoch=1, tier="dram")
    return Pool(pages, PAGE, feed, TTL_S, LEASE_S, **changes)


def key(n):
    return n.to_bytes(16, "big")


def put(pool, *numbers, size=PAGE, writer=A, now_s=0.0):
    """Reserve and commit; the states."""
    grants = pool.reserve([(key(n), size) for n in numbers], writer=writer, now_s=now_s)
    blocks = [(g.generation, TAGS) for g in grants if g.grant is Grant.RESERVED]
    return pool.commit(blocks, writer=writer, now_s=now_s)


def grant_of(pool, n, **kwargs):
    return pool.reserve(
        [(key(n), kwargs.pop("size", PAGE))], **{"writer": A, "now_s": 0.0} | kwargs
    )[0]


def test_a_block_is_visible_only_after_its_commit():
    pool = new_pool()
    granted = grant_of(pool, 1)
    assert pool.held([key(1)]) == 0
    assert pool.commit([(granted.generation, TAGS)], writer=A, now_s=1.0) == [Commitment.COMMITTED]
    assert pool.held([key(1), key(2)]) == 1
    assert key(1) in pool.feed
    pool.check_integrity()


def test_the_first_writer_wins_and_the_second_gives_its_pages_back():
    pool = new_pool()
    one, two = grant_of(pool, 1), grant_of(pool, 1, writer=B)
    assert pool.commit([(two.generation, TAGS)], writer=B, now_s=0.0) == [Commitment.COMMITTED]
    assert pool.commit([(one.generation, TAGS)], writer=A, now_s=0.0) == [Commitment.DUPLICATE]
    assert pool.free_pages == 9
    assert grant_of(pool, 1).grant is Grant.HELD
    pool.check_integrity()


@settings(deadline=None)
@given(
    batches=st.lists(
        st.tuples(st.lists(st.integers(1, 12), max_size=6), st.sampled_from(["x", "y"])),
        max_size=8,
    ),
    pages=st.integers(1, 14),
    quota=st.none() | st.integers(1, 8),
)
def test_blocks_without_bytes_are_put_as_if_reserved_and_committed(batches, pages, quota):
    terms = {"x": Terms(quota_pages=quota)}
    ours, theirs = (new_pool(pages, accounts=Accounts(pages, terms)) for _ in range(2))
    for now_s, (numbers, tenant) in enumerate(batches):
        keys = [key(n) for n in numbers]
        grants = theirs.reserve(
            [(key, PAGE) for key in keys], writer=A, now_s=float(now_s), tenant=tenant
        )
        fresh = [(one.generation, ()) for one in grants if one.grant is Grant.RESERVED]
        theirs.commit(fresh, writer=A, now_s=float(now_s))
        full = [n for n, one in enumerate(grants) if one.grant is Grant.FULL]
        held = ours.put(keys, now_s=float(now_s), tenant=tenant)
        assert held == (full[0] if full else len(keys))
        assert ours.counters == theirs.counters
        assert (ours.number, ours.free_pages) == (theirs.number, theirs.free_pages)
        assert [told(block) for block in ours.warmest()] == [told(b) for b in theirs.warmest()]
        assert ours.feed.changes_after(0) == theirs.feed.changes_after(0)
        ours.check_integrity()


def told(block):
    return block.key, block.generation, block.account.name, block.used_s, block.pages


def test_nobody_commits_or_aborts_for_another_writer():
    pool = new_pool()
    granted = grant_of(pool, 1)
    assert pool.commit([(granted.generation, TAGS)], writer=B, now_s=0.0) == [Commitment.EXPIRED]
    assert pool.abort([granted.generation], writer=B) == 0
    assert pool.commit([(granted.generation, TAGS)], writer=A, now_s=0.0) == [Commitment.COMMITTED]


def test_an_expired_reservation_is_quarantined_until_its_writer_gives_it_back():
    pool = new_pool()
    granted = grant_of(pool, 1, size=6 * PAGE)
    pool.expire(TTL_S)
    assert pool.free_pages == 4  # the writer may still store to the six
    assert grant_of(pool, 2, size=6 * PAGE, now_s=TTL_S).grant is Grant.FULL
    assert pool.commit([(granted.generation, TAGS)], writer=A, now_s=TTL_S) == [Commitment.EXPIRED]
    assert (pool.held([key(1)]), pool.free_pages) == (0, 10)
    pool.check_integrity()


def test_a_commit_after_the_time_is_refused_even_before_the_next_tick():
    pool = new_pool()
    granted = grant_of(pool, 1)
    assert pool.commit([(granted.generation, TAGS)], writer=A, now_s=TTL_S) == [Commitment.EXPIRED]


@pytest.mark.parametrize("end", ["abort", "writer_gone", "reclaim"])
def test_quarantine_ends_when_the_writer_can_t_write_any_more(end):
    pool = new_pool()
    granted = grant_of(pool, 1)
    assert pool.quarantine(A) == 1
    assert pool.free_pages == 9
    match end:
        case "abort":
            assert pool.abort([granted.generation], writer=A) == 1
        case "writer_gone":
            assert pool.writer_gone(A) == 1
        case "reclaim":
            assert pool.reclaim(writer=A, writing=[]) == 1
    assert pool.free_pages == 10
    pool.check_integrity()


def test_a_returning_writer_keeps_in_quarantine_what_it_still_writes():
    pool = new_pool()
    one, two = grant_of(pool, 1), grant_of(pool, 2)
    assert pool.reclaim(writer=A, writing=[two.generation]) == 1
    assert pool.reservations(quarantined=True) == 1
    assert pool.commit([(two.generation, TAGS)], writer=A, now_s=0.0) == [Commitment.EXPIRED]
    assert pool.commit([(one.generation, TAGS)], writer=A, now_s=0.0) == [Commitment.EXPIRED]
    assert pool.free_pages == 10


def test_the_least_recently_used_unpinned_block_goes_first():
    pool = new_pool(pages=3)
    put(pool, 1)
    put(pool, 2)
    put(pool, 3)
    pin = pool.pin([key(1)], reader=1, now_s=0.0)
    pool.unpin(pin.number, [], reader=1, now_s=0.0)
    put(pool, 4)
    assert [pool.held([key(n)]) for n in (1, 2, 3, 4)] == [1, 0, 1, 1]
    pool.check_integrity()


def test_a_prefix_is_evicted_from_its_end():
    pool = new_pool(pages=4)
    put(pool, 1, 2, 3, 4)
    assert pool.evict(2) == [key(4), key(3)]
    pin = pool.pin([key(1), key(2)], reader=1, now_s=0.0)
    pool.unpin(pin.number, [], reader=1, now_s=0.0)
    assert pool.evict(9) == [key(2), key(1)]


def test_a_chain_put_in_parts_is_evicted_from_its_end_once_touched():
    pool = new_pool(pages=4)
    put(pool, 1, 2)
    put(pool, 3, 4)
    assert pool.touch([key(n) for n in (1, 2, 3, 4, 5)]) == 4
    assert pool.evict(4) == [key(4), key(3), key(2), key(1)]


def test_probes_do_not_keep_blocks_warm():
    pool = new_pool(pages=2)
    put(pool, 1)
    put(pool, 2)
    for _ in range(10):
        pool.held([key(1)])
    put(pool, 3)
    assert pool.held([key(1)]) == 0


def test_a_pool_full_of_pins_refuses_at_once_and_evicts_nothing():
    pool = new_pool(pages=4)
    put(pool, 1, 2, 3, 4)
    pool.pin([key(1), key(2), key(3)], reader=1, now_s=0.0)
    assert grant_of(pool, 5, size=2 * PAGE).grant is Grant.FULL
    assert pool.held([key(4)]) == 1  # one page would not have been enough
    assert grant_of(pool, 5).grant is Grant.RESERVED
    pool.check_integrity()


def test_a_block_larger_than_the_pool_is_refused_and_evicts_nothing():
    pool = new_pool(pages=4)
    put(pool, 1, 2)
    assert grant_of(pool, 5, size=5 * PAGE).grant is Grant.FULL
    assert pool.live_blocks == 2


def test_what_makes_room_is_worth_less_than_what_comes():
    pool = new_pool(4)
    put(pool, 1, 2)
    put(pool, 3, 4)
    pool.use([key(3), key(4)])
    now = {"used_s": 0.0, "priority": 1, "now_s": 0.0}
    worth = {n: pool.retention.worth(key(n), uses=uses, **now) for n, uses in ((1, 1), (3, 2))}
    assert worth[1] < worth[3]
    between = (worth[1] + worth[3]) / 2
    grants = [grant_of(pool, n, below=between).grant for n in (11, 12, 13)]
    assert grants == [Grant.RESERVED, Grant.RESERVED, Grant.FULL]
    assert pool.held([key(3), key(4)]) == 2
    assert grant_of(pool, 14, below=worth[3]).grant is Grant.FULL
    pool.check_integrity()


def test_a_reservation_without_an_end_is_never_quarantined_and_others_keep_their_share():
    pool = new_pool(4)
    pool.reserve([(key(1), PAGE)], writer=B, now_s=0.0, tenant="b")
    granted = grant_of(pool, 2, ttl_s=float("inf"))
    pool.expire(1e9)
    assert pool.reservations(quarantined=True) == 1
    assert pool.commit([(granted.generation, TAGS)], writer=A, now_s=1e9) == [Commitment.COMMITTED]


def test_a_block_that_moved_is_worth_what_it_was_where_it_came_from():
    pool = new_pool()
    put(pool, 1, 2, now_s=100.0)
    pool.moved(key(1), uses=5, used_s=70.0)
    pool.moved(key(9), uses=5, used_s=70.0)
    assert (pool.block(key(1)).uses, pool.block(key(1)).used_s) == (5, 70.0)
    assert pool.evict(1, 100.0) == [key(2)]
    pool.check_integrity()


def test_the_warmest_come_first_and_a_run_s_head_before_its_end():
    pool = new_pool()
    put(pool, 1, 2, 3)
    put(pool, 4, 5)
    pool.touch([key(n) for n in (1, 2, 3)])
    pool.pin([key(5)], reader=1, now_s=0.0)
    assert [block.key for block in pool.warmest()] == [key(n) for n in (5, 1, 2, 3, 4)]


def test_after_one_refusal_a_batch_gets_nothing_more():
    pool = new_pool(pages=4)
    grants = pool.reserve([(key(1), PAGE), (key(2), 9 * PAGE), (key(3), PAGE)], writer=A, now_s=0.0)
    assert [g.grant for g in grants] == [Grant.RESERVED, Grant.FULL, Grant.FULL]


def test_a_pinned_block_outlives_pressure_and_a_lapsed_pin_protects_nothing():
    pool = new_pool(pages=1)
    put(pool, 1)
    pin = pool.pin([key(1)], reader=1, now_s=0.0)
    assert grant_of(pool, 2, now_s=1.0).grant is Grant.FULL
    pool.expire(LEASE_S)
    assert grant_of(pool, 2, now_s=LEASE_S).grant is Grant.RESERVED
    assert not pool.unpin(pin.number, [], reader=1, now_s=LEASE_S)
    assert pool.counters.lapsed == 1
    pool.check_integrity()


def test_a_renewed_pin_lasts_and_a_lapsed_one_can_t_be_renewed():
    pool = new_pool()
    put(pool, 1)
    pin = pool.pin([key(1)], reader=1, now_s=0.0)
    assert pool.renew(pin.number, reader=1, now_s=9.0)
    pool.expire(18.0)
    assert not pool.renew(pin.number, reader=2, now_s=18.0)
    assert pool.unpin(pin.number, [], reader=1, now_s=18.9)
    assert not pool.renew(pin.number, reader=1, now_s=18.9)


def test_unpin_notices_a_lapsed_lease_without_a_tick():
    pool = new_pool()
    put(pool, 1)
    pin = pool.pin([key(1)], reader=1, now_s=0.0)
    assert not pool.unpin(pin.number, [0], reader=1, now_s=LEASE_S)
    assert pool.held([key(1)]) == 1  # a late reader's finding says nothing about the block


def test_a_corrupt_block_is_dropped_and_counted_even_with_other_readers():
    pool = new_pool()
    put(pool, 1, 2)
    one = pool.pin([key(1), key(2)], reader=1, now_s=0.0)
    two = pool.pin([key(1)], reader=2, now_s=0.0)
    assert pool.unpin(one.number, [0], reader=1, now_s=1.0)
    assert (pool.held([key(1)]), pool.held([key(2)]), pool.free_pages) == (0, 1, 8)
    assert pool.unpin(two.number, [0], reader=2, now_s=1.0)
    assert (pool.free_pages, pool.counters.corrupt) == (9, 1)
    pool.check_integrity()


def test_a_reader_that_leaves_takes_its_pins_along():
    pool = new_pool()
    put(pool, 1)
    pool.pin([key(1)], reader=1, now_s=0.0)
    pool.pin([key(1)], reader=2, now_s=0.0)
    assert pool.reader_gone(1) == 1
    assert pool.open_pins == 1
    pool.check_integrity()


def test_a_miss_tells_whether_the_block_was_evicted():
    pool = new_pool(ghost_keys=1)
    put(pool, 1, 2)
    assert pool.pin([key(1), key(2)], reader=1, now_s=0.0).gap is Gap.NONE
    pool.reader_gone(1)
    pool.evict(2)
    assert pool.pin([key(1)], reader=1, now_s=0.0).gap is Gap.EVICTED
    assert pool.pin([key(2)], reader=1, now_s=0.0).gap is Gap.MISS  # older than the ghosts
    put(pool, 1)
    assert pool.pin([key(1)], reader=1, now_s=0.0).gap is Gap.NONE


def test_clear_forgets_everything_and_what_was_reserved_before_can_t_come_back():
    pool = new_pool()
    put(pool, 1, 2)
    pin = pool.pin([key(1)], reader=1, now_s=0.0)
    granted = grant_of(pool, 3)
    assert pool.clear() == 2
    assert (pool.live_blocks, len(pool.feed)) == (0, 0)
    assert pool.commit([(granted.generation, TAGS)], writer=A, now_s=0.0) == [Commitment.EXPIRED]
    put(pool, 1)
    pool.check_integrity()
    assert pool.unpin(pin.number, [], reader=1, now_s=0.0)
    assert pool.free_pages == 9
    pool.check_integrity()


def test_an_answer_s_page_budget_cuts_a_run_but_never_to_nothing():
    pool = new_pool()
    put(pool, 1, 2, 3, size=2 * PAGE)
    run = [key(1), key(2), key(3)]
    assert [pool.within(run, pages) for pages in (1, 2, 3, 4, 6)] == [1, 1, 1, 2, 3]
    assert pool.within([key(9)], 5) == 0


def test_a_repeated_clear_takes_nothing_that_came_after_it():
    pool = new_pool()
    put(pool, 1, 2)
    up_to = pool.number
    assert pool.clear(up_to) == 2
    put(pool, 1)
    assert pool.clear(up_to) == 0
    assert pool.held([key(1)]) == 1
    put(pool, 2)
    assert (pool.clear(pool.number - 1), pool.held([key(2)])) == (1, 1)
    pool.check_integrity()


LOOKS = st.lists(
    st.tuples(
        st.sampled_from(("held", "touch", "use", "hint", "within", "pin", "renew", "unpin")),
        st.lists(st.integers(0, 11), min_size=1, max_size=12),
    ),
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(looks=LOOKS, sizes=st.lists(st.integers(1, 3 * PAGE), min_size=12, max_size=12))
def test_whatever_is_probed_or_pinned_a_victim_is_found_as_long_as_enough_is_not(looks, sizes):
    pool, pins, now_s = new_pool(20, segments=(12, 8)), [], 0.0
    for n, size in enumerate(sizes):
        put(pool, n, size=size)
    for what, numbers in looks:
        now_s += 0.01
        keys = [key(n) for n in numbers]
        match what:
            case "held":
                pool.held(keys)
            case "touch":
                pool.touch(keys, now_s)
            case "use":
                pool.use(keys, now_s)
            case "hint":
                pool.hint(Hint("default", key(99), HintKind.ACTIVE, keys, None, b""), now_s)
            case "within":
                pool.within(keys, numbers[0])
            case "pin":
                pins.append(pool.pin(keys, reader=1, now_s=now_s))
            case "renew" if pins:
                pool.renew(pins[numbers[0] % len(pins)].number, reader=1, now_s=now_s)
            case "unpin" if pins:
                pool.unpin(pins.pop().number, (), reader=1, now_s=now_s)
    pinned = {block.key for pin in pins for block in pin.blocks}
    room = 20 - sum(pool.block(one).pages for one in pinned)
    fits = [n for n in (1, 2, room // 2, room) if 0 < n <= room]
    for pages in sorted(set(fits)):
        granted = grant_of(pool, 1000 + pages, size=pages * PAGE, now_s=now_s)
        assert granted.grant is Grant.RESERVED
        pool.abort([granted.generation], writer=A)
        assert all(pool.block(one) for one in pinned)
    if room < 20:
        assert grant_of(pool, 2000, size=(room + 1) * PAGE, now_s=now_s).grant is Grant.FULL
    now_s += LEASE_S  # nobody renews any more
    pool.expire(now_s)
    assert grant_of(pool, 3000, size=20 * PAGE, now_s=now_s).grant is Grant.RESERVED
    pool.check_integrity()


def test_a_memory_over_its_high_watermark_is_evicted_down_to_the_low_one():
    pool = new_pool(pages=10, high=0.8, low=0.5)
    put(pool, *range(8))
    assert pool.trim(0.0) == 0
    put(pool, 8)
    assert pool.trim(0.0) == 4
    assert pool.live_blocks == 5
    pin = pool.pin([key(0), key(1)], reader=1, now_s=0.0)
    put(pool, 11, 12, 13, 14)
    pool.trim(0.0)
    assert pool.held([key(0), key(1)]) == 2
    assert pool.unpin(pin.number, [], reader=1, now_s=1.0)
    pool.check_integrity()


def test_an_earlier_pool_s_blocks_are_taken_over_and_its_writers_kept_out():
    pool = new_pool(pages=10)
    blocks = (KeptBlock(key(1), 7, PAGE, (Extent(3, 1),), TAGS, "a", Priority.HIGH),)
    writing = (KeptReservation(9, A, (Extent(0, 2),), "a"),)
    pool.adopt(Kept(20, blocks, writing), now_s=0.0)
    assert (pool.held([key(1)]), pool.free_pages, key(1) in pool.feed) == (1, 7, True)
    assert grant_of(pool, 2).generation == 21
    assert pool.commit([(9, TAGS)], writer=A, now_s=0.0) == [Commitment.EXPIRED]
    assert pool.free_pages == 8
    pool.check_integrity()


def test_pages_held_twice_are_not_taken_over():
    pool = new_pool(pages=10)
    one = KeptBlock(key(1), 1, PAGE, (Extent(3, 2),), TAGS, "a", Priority.NORMAL)
    two = KeptBlock(key(2), 2, PAGE, (Extent(4, 1),), TAGS, "a", Priority.NORMAL)
    with pytest.raises(ValueError, match="overlap"):
        pool.adopt(Kept(2, (one, two)), now_s=0.0)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the accounts, and a pinned block's pages are nobody else's.

    A put that evicts is refused only for its tenant's quota, or where what it may evict is too
    little; and a tenant within its share loses nothing to another's put, but what it has in stock.
    What a writer claimed of its stock in time is nobody else's until the writer says what it did.
    """

    def __init__(self):
        super().__init__()
        terms = {"small": Terms(quota_pages=4), "large": Terms(weight=2.0)}
        accounts = Accounts(12, terms)
        retention = Retention(max_sessions=2, max_members=12)
        self.pool = new_pool(
            *(12,),
            ghost_keys=4,
            segments=(7, 5),
            high=0.9,
            low=0.6,
            accounts=accounts,
            retention=retention,
            take=lambda generation: generation not in self.claimed,
        )
        self.now_s = 0.0
        self.claimed = {}  # generation -> its writer and pages

    generations, pins = Bundle("generations"), Bundle("pins")
    stocks = Bundle("stocks")
    writers = st.sampled_from([A, B])

    tenants = st.sampled_from(["small", "large", "third"])

    @rule(
        target=generations,
        writer=writers,
        items=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 500)), max_size=4),
        evict=st.booleans(),
        tenant=tenants,
        priority=st.sampled_from(Priority),
    )
    def reserve(self, writer, items, evict, tenant, priority):
        """Tenants don't share keys."""
        wanted = [(self.key_of(tenant, n), size) for n, size in items]
        generations = []
        for item in wanted:
            before = self.usage()
            asking = {"writer": writer, "now_s": self.now_s, "evict": evict, "tenant": tenant}
            (granted,) = self.pool.reserve([item], **asking, priority=priority)
            if granted.grant is Grant.RESERVED:
                generations.append(granted.generation)
            self.nobody_lost_what_is_theirs(tenant, before)
            if granted.grant is Grant.FULL and evict:
                self.was_rightly_refused(tenant, item[1])
        return writer, generations

    @rule(
        target=generations,
        writer=writers,
        items=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 500)), max_size=6),
        tenant=tenants,
    )
    def reserve_as_one(self, writer, items, tenant):
        """Nothing that a put names makes room for the rest of it."""
        wanted = [(self.key_of(tenant, n), size) for n, size in items]
        held = [key for key, _ in wanted if self.pool.held([key])]
        asking = {"writer": writer, "now_s": self.now_s, "tenant": tenant, "as_one": True}
        granted = self.pool.reserve(wanted, **asking)
        assert all(self.pool.held([key]) for key in held)
        assert all(
            one.grant is not Grant.RESERVED or key not in held
            for one, (key, _) in zip(granted, wanted, strict=True)
        )
        return writer, [one.generation for one in granted if one.grant is Grant.RESERVED]

    def key_of(self, tenant, n):
        return tenant.encode().ljust(15) + bytes([n])

    def usage(self):
        """Pages of each tenant, without stocks."""
        stocked = [one for one in self.pool._reservations if one.stock]
        used = {account.name: account.used_pages for account in self.pool.accounts}
        for one in stocked:
            used[one.account.name] -= one.pages
        return used

    def nobody_lost_what_is_theirs(self, tenant, before):
        heard = {account.name: account.heard_s for account in self.pool.accounts} | {
            tenant: self.now_s
        }
        weights = {
            name: 2.0 if name == "large" else 1.0
            for name in {*before, tenant}
            if self.now_s - heard.get(name, 0.0) <= QUIET_S
        }
        after = self.usage()
        for name, used in before.items():
            share = 12 * weights.get(name, 0.0) / sum(weights.values())
            if name != tenant and used <= share:
                assert after.get(name, 0) == used

    def was_rightly_refused(self, tenant, size):
        pages = -(-size // PAGE)
        used = next((a.used_pages for a in self.pool.accounts if a.name == tenant), 0)
        assert all(
            one.generation in self.claimed
            for one in self.pool._reservations
            if one.stock and (one.account.name == tenant or pages > self.pool.free_pages)
        )
        own = sum(b.pages for b in self.pool.blocks() if b.account.name == tenant and not b.pins)
        within_quota = tenant != "small" or used - own + pages <= 4
        if within_quota:  # all of its own and all that is free would not have been enough
            assert pages > self.pool.free_pages + own

    @rule(reserved=generations)
    def commit(self, reserved):
        writer, numbers = reserved
        self.pool.commit([(n, TAGS) for n in numbers], writer=writer, now_s=self.now_s)

    @rule(reserved=generations)
    def abort(self, reserved):
        self.pool.abort(reserved[1], writer=reserved[0])

    @rule(
        target=stocks,
        writer=writers,
        count=st.integers(1, 4),
        size=st.integers(1, 300),
        tenant=tenants,
    )
    def stock(self, writer, count, size, tenant):
        before = self.pool.live_blocks
        granted = self.pool.stock(count, size, writer=writer, now_s=self.now_s, tenant=tenant)
        assert self.pool.live_blocks == before
        return writer, tenant, granted

    @rule(stock=stocks, count=st.integers(1, 4))
    def claim(self, stock, count):
        """Of what is still the writer's: else the lock tells it, and it does not write."""
        writer, _, granted = stock
        for one in granted[:count]:
            if self.is_stock(one.generation, writer):
                self.claimed[one.generation] = (writer, one.extents)

    @rule(stock=stocks, numbers=st.lists(st.integers(0, 9), min_size=4, max_size=4))
    def keep(self, stock, numbers):
        writer, tenant, granted = stock
        mine = [one for one in granted if one.generation in self.claimed]
        blocks = [
            Filled(self.key_of(tenant, n), one.generation, TAGS)
            for n, one in zip(numbers, mine, strict=False)
        ]
        self.pool.keep(blocks, writer=writer, now_s=self.now_s)
        for one in mine:
            self.claimed.pop(one.generation, None)
        self.pool.abort([one.generation for one in mine[len(blocks) :]], writer=writer)

    @rule(stock=stocks)
    def give_back(self, stock):
        """Of the stock, what is not claimed."""
        numbers = [one.generation for one in stock[2] if one.generation not in self.claimed]
        self.pool.abort(numbers, writer=stock[0])

    @rule()
    def revoke(self):
        self.pool.revoke()

    def is_stock(self, generation, writer):
        one = self.pool._reservations.owned(generation, writer)
        return one is not None and one.stock and not one.quarantined

    @invariant()
    def claims_hold(self):
        for generation, (writer, extents) in self.claimed.items():
            one = self.pool._reservations.owned(generation, writer)
            assert one is not None
            assert one.extents == extents

    numbers = st.lists(st.integers(0, 9), max_size=4)

    @rule(target=pins, reader=st.integers(1, 2), tenant=tenants, numbers=numbers)
    def pin(self, reader, tenant, numbers):
        keys = [self.key_of(tenant, n) for n in numbers]
        pinned = self.pool.pin(keys, reader=reader, now_s=self.now_s)
        self.pool.ghosts.asked(keys, len(pinned.blocks), lambda k: self.pool.held([k]) == 1)
        self.pool.use(keys[: len(pinned.blocks)], self.now_s)
        return reader, pinned

    @rule(
        tenant=tenants,
        session=st.integers(0, 3),
        kind=st.sampled_from(HintKind),
        numbers=numbers,
        expected_s=st.none() | st.floats(0, 100),
    )
    def hint(self, tenant, session, kind, numbers, expected_s):
        keys = [self.key_of(tenant, n) for n in numbers]
        child = key(session + 1)
        self.pool.hint(Hint(tenant, key(session), kind, keys, expected_s, child), self.now_s)

    @rule(tenant=tenants, numbers=numbers)
    def touch(self, tenant, numbers):
        self.pool.touch([self.key_of(tenant, n) for n in numbers])

    @rule()
    def trim(self):
        self.pool.trim(self.now_s)
        pages = sum(b.pages for b in self.pool.blocks() if not b.pins)
        assert self.pool.free_pages + self.stock_pages() >= 12 * (1 - 0.9) or not pages

    def stock_pages(self):
        return sum(one.pages for one in self.pool._reservations if one.stock)

    @rule(back=st.integers(0, 20))
    def clear_up_to(self, back):
        self.pool.clear(max(0, self.pool.number - back))

    @rule(pinned=pins, corrupt=st.lists(st.integers(0, 4), max_size=2))
    def unpin(self, pinned, corrupt):
        self.pool.unpin(pinned[1].number, corrupt, reader=pinned[0], now_s=self.now_s)

    @rule(pinned=pins)
    def renew(self, pinned):
        self.pool.renew(pinned[1].number, reader=pinned[0], now_s=self.now_s)

    @rule(seconds=st.sampled_from([1.0, LEASE_S, TTL_S]))
    def pass_time(self, seconds):
        self.now_s += seconds
        self.pool.expire(self.now_s)

    @rule(writer=writers, how=st.sampled_from(["quarantine", "writer_gone"]))
    def lose_writer(self, writer, how):
        if how == "writer_gone":
            self.ended(writer)
        getattr(self.pool, how)(writer)

    def ended(self, writer):
        """It writes to nothing any more."""
        self.claimed = {n: claim for n, claim in self.claimed.items() if claim[0] != writer}

    @rule(writer=writers, reserved=generations)
    def come_back(self, writer, reserved):
        self.ended(writer)
        self.pool.reclaim(writer=writer, writing=reserved[1])

    @rule(reader=st.integers(1, 2))
    def lose_reader(self, reader):
        self.pool.reader_gone(reader)

    @rule(count=st.integers(0, 3))
    def evict(self, count):
        self.pool.evict(count)

    @rule()
    def clear(self):
        self.pool.clear()

    @invariant()
    def accounts_hold(self):
        self.pool.check_integrity()

    def teardown(self):
        self.claimed = {}
        for writer in (A, B):
            self.pool.writer_gone(writer)
        for reader in (1, 2):
            self.pool.reader_gone(reader)
        self.pool.clear()
        assert self.pool.free_pages == 12
        self.pool.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_counters_start_at_nothing():
    assert set(dataclasses.astuple(new_pool().counters)) == {0}
