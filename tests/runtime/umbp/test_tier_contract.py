"""What every tier promises."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ssd_folder
from kimi_connect.arena import create_arena
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.ssdlog.format import block_record_bytes
from kimi_runtime.umbp.ssdlog.log import SsdLog
from kimi_runtime.umbp.tiers.dram import DramTier
from kimi_runtime.umbp.tiers.ssd import SsdTier
from pool_daemon import blocks_of, keys_of

SIZE, CAPACITY = 5000, 8


class DramUnderTest:
    """A DRAM tier for `CAPACITY` blocks of `SIZE`, and a way to damage it."""

    def __init__(self, folder):
        pages = CAPACITY * 2
        self.arena = create_arena(str(folder / "arena"), page_bytes=4096, pages=pages, epoch=1)
        feed = FeedLog("tier", epoch=1, tier="dram")
        self.pool = Pool(pages, 4096, feed, 30.0, 10.0)
        self.tier = DramTier(self.pool, self.arena)

    def damage(self, key):
        pinned = self.pool.pin([key], reader=9, now_s=0.0)
        (block,) = pinned.blocks
        next(self.arena.parts(block.extents, block.size))[7] ^= 1
        self.pool.reader_gone(9)

    def check(self):
        self.pool.check_integrity()

    def dropped(self):
        return self.pool.counters.corrupt

    def close(self):
        self.arena.close()


class SsdUnderTest:
    """An SSD tier for `CAPACITY` blocks of `SIZE`: half of what four segments hold."""

    def __init__(self, folder):
        record = block_record_bytes(1, SIZE, 128)
        segment = 4 * record + 2 * 128
        spec = SsdSpec(
            folder=folder, capacity=5 * segment, segment=segment, align=128, fill=0.5, io_threads=2
        )
        self.tier = SsdTier(SsdLog.open(spec))

    def damage(self, key):
        ssd_folder.damage(self.tier.log, key)

    def check(self):
        self.tier.log.check_integrity()
        assert not self.tier.pending_bytes

    def dropped(self):
        return self.tier.stats().corrupt

    def close(self):
        asyncio.run(self.tier.close())


@pytest.fixture(params=[DramUnderTest, SsdUnderTest], ids=["dram", "ssd"])
def under_test(request, tmp_path):
    made = request.param(tmp_path)
    yield made
    made.check()
    made.close()


def joined(keys):
    return memoryview(b"".join(blocks_of(keys, SIZE)))


async def cancelled(work):
    running = asyncio.gather(work, return_exceptions=True)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def space(blocks):
    return memoryview(bytearray(blocks * SIZE))


async def test_what_is_stored_comes_back(under_test):
    keys = keys_of(5)
    assert await under_test.tier.store(keys, joined(keys)) == 5
    into = space(5)
    assert await under_test.tier.load(keys, into) == 5
    assert into == joined(keys)


async def test_a_miss_is_a_number_and_touches_nothing_after_the_run(under_test):
    keys = keys_of(4)
    await under_test.tier.store([keys[0], keys[2]], joined([keys[0], keys[2]]))
    assert under_test.tier.held(keys) == 1
    into = space(4)
    assert await under_test.tier.load(keys, into) == 1
    assert into == bytes(joined(keys[:1])) + bytes(3 * SIZE)
    assert await under_test.tier.load(keys[1:2], into) == 0


async def test_a_full_tier_keeps_what_fits_and_evicts_nothing(under_test):
    first, more = keys_of(CAPACITY - 2), keys_of(5, start=100)
    assert await under_test.tier.store(first, joined(first)) == len(first)
    assert await under_test.tier.store(more, joined(more)) == 2
    assert under_test.tier.held(first) == len(first)


async def test_a_key_held_already_counts_as_kept_and_is_not_written_again(under_test):
    keys = keys_of(3)
    await under_test.tier.store(keys, joined(keys))
    assert await under_test.tier.store(keys, memoryview(bytes(3 * SIZE))) == 3
    into = space(3)
    await under_test.tier.load(keys, into)
    assert into == joined(keys)


async def test_eviction_forgets_the_coldest_first(under_test):
    keys = keys_of(3)
    for key in keys:
        await under_test.tier.store([key], joined([key]))
    await under_test.tier.load(keys[:1], space(1))
    assert under_test.tier.evict(2) == [keys[1], keys[2]]
    assert under_test.tier.evict(5) == [keys[0]]
    assert under_test.tier.held(keys) == 0


async def test_a_damaged_block_ends_the_run_is_dropped_and_counted(under_test):
    keys = keys_of(3)
    await under_test.tier.store(keys, joined(keys))
    under_test.damage(keys[1])
    assert await under_test.tier.load(keys, space(3)) == 1
    assert under_test.tier.held(keys[1:]) == 0
    assert under_test.tier.held(keys[2:]) == 1
    assert under_test.dropped() == 1


async def test_blocks_that_do_not_fit_the_target_are_not_loaded(under_test):
    keys = keys_of(3)
    await under_test.tier.store(keys, joined(keys))
    into = memoryview(bytearray(2 * SIZE + 100))
    assert await under_test.tier.load(keys, into) == 2
    assert into[2 * SIZE :] == bytes(100)


async def test_bytes_that_are_no_blocks_of_one_size_are_refused(under_test):
    with pytest.raises(ValueError, match="one size"):
        await under_test.tier.store(keys_of(3), memoryview(bytes(10)))
    assert await under_test.tier.store([], memoryview(b"")) == 0


async def test_cancelled_calls_leave_nothing_held(under_test):
    keys = keys_of(CAPACITY)
    data = joined(keys)
    await cancelled(under_test.tier.store(keys, data))
    under_test.check()
    assert await under_test.tier.store(keys, data) == CAPACITY
    await cancelled(under_test.tier.load(keys, space(CAPACITY)))
    under_test.check()
    assert await under_test.tier.store(keys, data) == CAPACITY
    assert under_test.tier.evict(99) == keys[::-1]


def test_loading_costs_time_that_grows_with_the_bytes(under_test):
    cost = under_test.tier.cost
    assert 0 < cost.seconds(1) < cost.seconds(1 << 30)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "load", "evict", "damage"]),
            st.integers(0, 10),
            st.integers(1, 5),
        ),
        max_size=25,
    )
)
def test_whatever_happens_a_loaded_block_is_its_key_s_or_a_miss(steps, under_test):
    async def run():
        for step, start, count in steps:
            keys = keys_of(count, start)
            held = under_test.tier.held(keys)
            match step:
                case "store":
                    kept = await under_test.tier.store(keys, joined(keys))
                    assert under_test.tier.held(keys) >= kept >= held
                case "load":
                    into = space(count)
                    loaded = await under_test.tier.load(keys, into)
                    assert loaded <= held
                    assert into[: loaded * SIZE] == joined(keys[:loaded])
                case "evict":
                    assert len(under_test.tier.evict(count)) <= count
                case "damage" if held:
                    under_test.damage(keys[0])
            under_test.check()

    asyncio.run(run())
