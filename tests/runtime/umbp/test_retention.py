"""Which blocks are kept: by sessions, uses, priority and tenant."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.wire import Grant, GroupTag, HintKind, Priority
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.retention import (
    Hint,
    Retention,
    ReuseView,
    SessionView,
    Standing,
    tool_gap_reuse,
)
from kimi_runtime.umbp.tenants import MAX_ACCOUNTS, Accounts, Terms

PAGE = 100
WRITER = b"writer"
TAGS = (GroupTag(1, b"t" * 16),)
ONE, TWO = b"session one.....", b"session two....."


def new_pool(pages=10, **changes):
    return Pool(pages, PAGE, FeedLog("pool", epoch=1, tier="dram"), 30.0, 10.0, **changes)


def key(n):
    return n.to_bytes(16, "big")


def keys(*numbers):
    return [key(n) for n in numbers]


def put(pool, *numbers, now_s=0.0, **asked):
    items = [(key(n), PAGE) for n in numbers]
    grants = pool.reserve(items, writer=WRITER, now_s=now_s, **asked)
    blocks = [(g.generation, TAGS) for g in grants if g.grant is Grant.RESERVED]
    pool.commit(blocks, writer=WRITER, now_s=now_s)
    return len(blocks)


def hint(pool, kind, *numbers, session=ONE, now_s=0.0, **fields):
    told = Hint(tenant="default", session=session, kind=kind, keys=keys(*numbers))
    return pool.hint(dataclasses.replace(told, **fields), now_s)


def kept(pool, *numbers):
    return [n for n in numbers if pool.block(key(n)) is not None]


def test_what_an_ended_session_leaves_goes_before_what_is_colder():
    pool = new_pool()
    put(pool, 1, 2)
    put(pool, 3, 4, now_s=1.0)
    hint(pool, HintKind.ACTIVE, 3, 4)
    hint(pool, HintKind.ENDED)
    assert pool.evict(3, now_s=2.0) == keys(4, 3, 2)


def test_a_block_that_another_session_has_outlives_the_end_of_one():
    pool = new_pool()
    put(pool, 1, 2, 3)
    hint(pool, HintKind.ACTIVE, 1, 2)
    hint(pool, HintKind.ACTIVE, 1, 3, session=TWO)
    hint(pool, HintKind.ENDED)
    assert pool.evict(1) == keys(2)
    assert pool.evict(1) == keys(3)


def test_a_fork_shares_its_parent_s_blocks():
    pool = new_pool()
    put(pool, 1, 2, 9)
    hint(pool, HintKind.ACTIVE, 1, 2)
    hint(pool, HintKind.FORKED, child=TWO)
    hint(pool, HintKind.ENDED)
    assert pool.evict(1) == keys(9)
    hint(pool, HintKind.ENDED, session=TWO)
    assert pool.evict(2) == keys(2, 1)


def test_compaction_gives_up_what_it_names_and_a_new_turn_what_it_no_longer_has():
    pool = new_pool()
    put(pool, 1, 2, 3, 4, 9)
    hint(pool, HintKind.ACTIVE, 1, 2, 3, 4)
    hint(pool, HintKind.COMPACTED, 4)
    assert pool.evict(1) == keys(4)
    hint(pool, HintKind.ACTIVE, 1, 2)
    assert pool.evict(1) == keys(3)


def test_what_compaction_names_twice_is_given_up_once():
    pool = new_pool()
    put(pool, 1, 2)
    hint(pool, HintKind.ACTIVE, 1, 2)
    hint(pool, HintKind.COMPACTED, 2, 2)
    assert pool.evict(1) == keys(2)
    pool.check_integrity()


def test_a_long_pause_makes_room_for_a_short_one():
    pool = new_pool()
    put(pool, 1, 2)
    put(pool, 3, 4)
    hint(pool, HintKind.PAUSED, 3, 4, session=TWO, expected_s=5.0)
    hint(pool, HintKind.PAUSED, 1, 2, expected_s=3600.0)  # told later, so it is the warmer one
    assert pool.evict(2, now_s=2.0) == keys(2, 1)


def test_a_session_silent_far_beyond_its_pause_is_worth_less_than_a_fresh_one():
    pool = new_pool()
    put(pool, 1, 2)
    hint(pool, HintKind.PAUSED, 1, expected_s=1.0)
    put(pool, 2, now_s=3000.0)
    hint(pool, HintKind.PAUSED, 2, session=TWO, now_s=3000.0, expected_s=30.0)
    assert pool.evict(1, now_s=3001.0) == keys(1)


def test_what_a_session_left_is_wanted_again_once_it_is_used():
    pool = new_pool()
    put(pool, 1, 2)
    hint(pool, HintKind.ACTIVE, 1, 2)
    hint(pool, HintKind.ENDED)
    pool.use(keys(1), 1.0)
    put(pool, 3, now_s=1.0)
    assert pool.evict(2, now_s=2.0) == keys(2, 3)


def test_blocks_used_again_outlive_those_used_once():
    pool = new_pool()
    put(pool, 1, 2)
    pool.use(keys(1), 1.0)
    put(pool, 3, 4, now_s=10.0)
    assert pool.evict(3, now_s=11.0) == keys(2, 4, 3)


def test_a_block_s_priority_scales_its_worth():
    pool = new_pool()
    put(pool, 1, priority=Priority.HIGH)
    put(pool, 2, now_s=5.0)
    put(pool, 3, now_s=10.0, priority=Priority.LOW)
    assert pool.evict(3, now_s=11.0) == keys(3, 2, 1)


def test_what_is_cheap_to_have_again_goes_first():
    cheap = {key(2)}
    retention = Retention(seconds_per_byte=lambda k: 1e-10 if k in cheap else 1e-9)
    pool = new_pool(retention=retention)
    put(pool, 1, 2)
    pool.use(keys(1, 2), 1.0)
    assert pool.evict(1, now_s=2.0) == keys(2)


def test_the_probability_is_whoever_s_function():
    def only_even(view):
        return 0.0 if view.uses == 2 else 1.0

    pool = new_pool(retention=Retention(reuse=only_even))
    put(pool, 1, 2)
    pool.use(keys(1, 2, 2), 1.0)
    assert pool.evict(1, now_s=2.0) == keys(1)


def test_a_hint_before_the_put_counts_and_one_for_nothing_leaves_nothing():
    pool = new_pool()
    assert hint(pool, HintKind.ACTIVE, 1) == 0
    put(pool, 1)
    assert pool.retention.standing(key(1), 1) is Standing.IN_SESSION
    hint(pool, HintKind.ACTIVE, 7)
    hint(pool, HintKind.ENDED)
    assert pool.retention.standing(key(7), 1) is Standing.ONCE


def test_the_session_not_heard_of_for_longest_is_forgotten_not_forsaken():
    pool = new_pool(retention=Retention(max_sessions=1))
    put(pool, 1, 2)
    hint(pool, HintKind.ACTIVE, 1)
    hint(pool, HintKind.ACTIVE, 2, session=TWO)
    assert pool.retention.sessions == 1
    assert pool.retention.standing(key(1), 1) is Standing.ONCE
    pool.check_integrity()


@settings(max_examples=50, deadline=None)
@given(
    st.floats(0, 1e9),
    st.integers(1, 10**6),
    st.lists(
        st.builds(SessionView, st.floats(-1, 1e9), st.none() | st.floats(0, 1e7), st.booleans()),
        max_size=3,
    ).map(tuple),
)
def test_the_default_is_a_probability_that_falls_with_time_and_rises_with_use(idle_s, uses, among):
    chance = tool_gap_reuse(ReuseView(idle_s, uses, among))
    assert 0.0 <= chance <= 1.0
    assert tool_gap_reuse(ReuseView(idle_s + 60.0, uses, among)) <= chance + 1e-12
    assert tool_gap_reuse(ReuseView(idle_s, uses + 1, among)) >= chance - 1e-12
    assert tool_gap_reuse(ReuseView(idle_s, uses, ())) <= chance + 1e-12


def test_who_is_within_its_share_loses_nothing_to_who_is_above():
    pool = new_pool(pages=12)
    put(pool, *range(8), tenant="a")
    assert put(pool, *range(20, 24), tenant="b") == 4
    assert put(pool, *range(30, 36), tenant="b", now_s=1.0) == 6
    used = {account.name: account.used_pages for account in pool.accounts}
    assert used == {"a": 6, "b": 6}  # b took a's part above half, then only its own
    assert kept(pool, *range(8)) == [0, 1, 2, 3, 4, 5]
    pool.check_integrity()


def test_weights_set_the_shares():
    pool = new_pool(pages=12, accounts=Accounts(12, {"a": Terms(weight=3.0)}))
    put(pool, *range(12), tenant="a")
    put(pool, *range(20, 32), tenant="b", now_s=1.0)
    assert {account.name: account.used_pages for account in pool.accounts} == {"a": 9, "b": 3}


def test_a_quota_binds_while_there_is_room_and_counts_what_is_only_reserved():
    pool = new_pool(pages=10, accounts=Accounts(10, {"a": Terms(quota_pages=3)}))
    first = pool.reserve(
        [(key(n), PAGE) for n in (1, 2, 3, 4)], writer=WRITER, now_s=0.0, tenant="a"
    )
    assert [granted.grant for granted in first] == [Grant.RESERVED] * 3 + [Grant.FULL]
    assert (pool.counters.over_quota, pool.free_pages) == (1, 7)
    pool.commit([(g.generation, TAGS) for g in first[:3]], writer=WRITER, now_s=0.0)
    assert put(pool, 5, tenant="a", now_s=1.0) == 1
    assert kept(pool, 1, 2, 3, 5) == [1, 2, 5]
    pool.check_integrity()


def test_a_tenant_above_its_share_with_all_pinned_is_refused_rather_than_helped_by_others():
    pool = new_pool(pages=8)
    put(pool, 1, 2, tenant="b")
    put(pool, *range(10, 16), tenant="a")
    pool.pin(keys(*range(10, 16)), reader=1, now_s=0.0)
    assert put(pool, 20, tenant="a") == 0
    assert kept(pool, 1, 2) == [1, 2]
    assert put(pool, 3, tenant="b", now_s=1.0) == 1  # its own makes room
    assert kept(pool, 1, 2, 3) == [1, 3]


def test_a_tenant_long_silent_keeps_nothing_from_the_others():
    pool = new_pool(pages=8)
    put(pool, 1, 2, 3, tenant="gone")
    put(pool, 9, tenant="also")
    assert put(pool, *range(10, 18), tenant="here", now_s=601.0) == 8
    assert {account.name for account in pool.accounts} == {"here"}
    put(pool, 1, tenant="gone", now_s=602.0)
    assert kept(pool, 1) == [1]
    pool.check_integrity()


def test_tenants_beyond_the_accounts_share_one():
    accounts = Accounts(10**6, {"known": Terms(weight=5.0)})
    for n in range(MAX_ACCOUNTS + 20):
        accounts.use(accounts.of(f"tenant {n}"), 1)
    accounts.use(accounts.of("known"), 1)
    assert len(list(accounts)) == MAX_ACCOUNTS + 2
    assert accounts.of("tenant 300").used_pages == 20
    assert accounts.of("known").terms.weight == pytest.approx(5.0)
