"""Pages a client may write to without asking first: whose they are at every moment."""

import asyncio
import random

import pytest

from kimi_connect import payloads, small_puts, stocking, storing
from kimi_connect.arena import ArenaGone, Shape, create_arena, reopen_arena
from kimi_connect.client import ArenaClient
from kimi_connect.connection import Lost
from kimi_connect.copying import matched
from kimi_connect.keeping import Filled, Keep, Wish, pack_keep, unpack_kept
from kimi_connect.wire import Commitment, Grant, GroupTag, Op, Outcome, Priority
from kimi_runtime.umbp import storing as engine_storing
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.journal import NoJournal
from kimi_runtime.umbp.link import Link, open_link
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.tags import block_tags, leaves
from kimi_runtime.umbp.tenants import Accounts, Terms
from pool_daemon import (
    BLOCK,
    CALL_KEY,
    DaemonProcess,
    blocks_of,
    keys_of,
    pool_spec,
    start_python,
    targets,
)

PAGE, TTL_S = 100, 30.0
A, B = b"writer-a", b"writer-b"
TAGS = (GroupTag(1, b"t" * 16),)
SOON_S = 20.0


class Claims:
    """Which generations their writers hold, as the arena's locks tell it."""

    def __init__(self):
        self.held = set()

    def take(self, generation):
        return generation not in self.held


def new_pool(claims, pages=10, **changes):
    feed = FeedLog("pool", epoch=1, tier="dram")
    return Pool(pages, PAGE, feed, TTL_S, 10.0, take=claims.take, **changes)


def key(n):
    return n.to_bytes(16, "big")


def stock(pool, count, *, writer=A, now_s=0.0, **changes):
    granted = pool.stock(count, PAGE, writer=writer, now_s=now_s, **changes)
    return [one.generation for one in granted]


def keep(pool, numbers, generations, *, writer=A, now_s=0.0):
    blocks = [Filled(key(n), one, TAGS) for n, one in zip(numbers, generations, strict=True)]
    return pool.keep(blocks, writer=writer, now_s=now_s)


def put(pool, *numbers, writer=B):
    grants = pool.reserve([(key(n), PAGE) for n in numbers], writer=writer, now_s=0.0)
    blocks = [(one.generation, TAGS) for one in grants if one.grant is Grant.RESERVED]
    pool.commit(blocks, writer=writer, now_s=0.0)
    return [one.grant for one in grants]


def test_what_was_written_to_a_stock_is_visible_once_it_is_kept():
    pool = new_pool(Claims())
    one, two = stock(pool, 2)
    assert pool.held([key(1)]) == 0
    assert keep(pool, [1], [one]) == [Commitment.COMMITTED]
    assert (pool.held([key(1)]), pool.stocks, pool.block(key(1)).generation) == (1, 1, one)
    assert keep(pool, [1, 2], [0, two]) == [Commitment.DUPLICATE, Commitment.COMMITTED]
    assert keep(pool, [3], [0]) == [Commitment.EXPIRED]
    assert pool.held([key(1), key(2), key(3)]) == 2
    pool.check_integrity()


def test_nobody_keeps_what_is_in_another_s_stock_or_in_no_stock():
    pool = new_pool(Claims())
    (one,) = stock(pool, 1)
    (reserved,) = pool.reserve([(key(5), PAGE)], writer=A, now_s=0.0)
    assert keep(pool, [1], [one], writer=B) == [Commitment.EXPIRED]
    assert keep(pool, [1], [reserved.generation]) == [Commitment.EXPIRED]
    assert keep(pool, [1, 2], [one, one]) == [Commitment.EXPIRED, Commitment.COMMITTED]
    assert pool.held([key(2)]) == 1
    pool.check_integrity()


def test_stocks_are_of_what_is_free_and_leave_as_much_as_they_are():
    pool = new_pool(Claims())
    assert len(stock(pool, 3)) == 3
    put(pool, 1)
    assert len(stock(pool, 9, writer=B)) == 1
    assert (stock(pool, 9), pool.free_pages, pool.stocks) == ([], 5, 4)
    assert (pool.counters.evicted, pool.counters.revoked) == (0, 0)


def test_what_nobody_writes_to_is_taken_back_before_anything_is_evicted_or_refused():
    claims = Claims()
    pool = new_pool(claims)
    put(pool, 1, 2, 3, 4)
    one, *_ = generations = stock(pool, 3)
    claims.held = {one}
    assert put(pool, *range(5, 10)) == [Grant.RESERVED] * 5
    assert (pool.counters.evicted, pool.counters.revoked) == (0, 2)
    assert keep(pool, [20, 21, 22], generations) == [
        Commitment.COMMITTED,
        Commitment.EXPIRED,
        Commitment.EXPIRED,
    ]
    assert pool.free_pages == 0
    assert put(pool, 30) == [Grant.RESERVED]
    assert pool.counters.evicted == 1
    pool.check_integrity()


def test_a_stock_counts_for_its_tenant_s_quota_and_goes_before_a_block_of_the_tenant_does():
    pool = new_pool(Claims(), accounts=Accounts(10, {"small": Terms(quota_pages=3)}))
    assert len(stock(pool, 9, tenant="small")) == 3
    ask = {"writer": B, "now_s": 0.0, "tenant": "small"}
    (granted,) = pool.reserve([(key(1), PAGE)], **ask)
    assert (granted.grant, pool.stocks, pool.counters.over_quota) == (Grant.RESERVED, 0, 0)
    assert len(stock(pool, 9, tenant="small")) == 2
    assert len(stock(pool, 9, tenant="other")) == 2
    (granted,) = pool.reserve([(key(2), PAGE)], **ask)
    assert (granted.grant, pool.stocks) == (Grant.RESERVED, 2)
    pool.check_integrity()


class Notes(NoJournal):
    """A journal with room for so many reservations."""

    def __init__(self, room):
        self.room = room

    def reserved(self, reservation):
        if not self.room:
            return False
        self.room -= 1
        return True

    def ended(self, generation):
        self.room += 1


def test_a_stock_makes_room_for_the_notes_of_a_put():
    pool = new_pool(Claims(), journal=Notes(3))
    assert len(stock(pool, 9)) == 3
    assert put(pool, 1) == [Grant.RESERVED]
    assert (pool.held([key(1)]), pool.stocks) == (1, 0)
    pool.check_integrity()


def test_a_stock_lies_in_one_piece():
    pool = new_pool(Claims(), pages=8)
    put(pool, *range(8))
    for n in range(0, 8, 2):
        pool.forget([key(n)])
    assert (pool.free_pages, pool.stock(1, 2 * PAGE, writer=A, now_s=0.0)) == (4, [])
    assert len(stock(pool, 9)) == 2
    pool.check_integrity()


def test_a_stock_that_is_not_used_goes_without_a_quarantine_and_a_claimed_one_stays():
    claims = Claims()
    pool = new_pool(claims)
    one, two = stock(pool, 2)
    claims.held = {one}
    pool.expire(TTL_S)
    assert (pool.stocks, pool.free_pages, pool.reservations(quarantined=True)) == (1, 9, 0)
    assert keep(pool, [1, 2], [one, two], now_s=2 * TTL_S) == [
        Commitment.COMMITTED,
        Commitment.EXPIRED,
    ]
    pool.check_integrity()


def test_a_lost_writer_s_stock_is_free_at_once_but_for_what_it_may_be_writing_to():
    claims = Claims()
    pool = new_pool(claims)
    one, two = stock(pool, 2)
    claims.held = {one}
    assert pool.quarantine(A) == 1
    assert (pool.free_pages, pool.writers()) == (9, {A})
    assert keep(pool, [1, 2], [one, two]) == [Commitment.EXPIRED] * 2  # which also gives it back
    assert pool.free_pages == 10
    (one,) = stock(pool, 1)
    claims.held = {one}
    assert pool.writer_gone(A) == 1
    assert (pool.free_pages, pool.stocks) == (10, 0)
    pool.check_integrity()


def test_what_was_in_a_stock_before_a_clear_can_t_come_after_it():
    claims = Claims()
    pool = new_pool(claims)
    one, two = stock(pool, 2)
    claims.held = {one}
    pool.clear()
    assert pool.free_pages == 9
    assert keep(pool, [1, 2], [one, two]) == [Commitment.EXPIRED] * 2
    assert pool.held([key(1)]) == 0
    assert keep(pool, [3], stock(pool, 1)) == [Commitment.COMMITTED]
    pool.check_integrity()


def test_a_stock_is_as_good_as_free_where_room_is_made():
    pool = new_pool(Claims(), high=0.8, low=0.6)
    put(pool, *range(6))
    assert len(stock(pool, 2)) == 2
    assert not pool.crowded
    assert pool.trim(0.0) == 0
    put(pool, 6, 7)
    stock(pool, 1)
    put(pool, 8)
    assert pool.crowded
    pool.trim(0.0)
    assert pool.free_pages + pool.stocks == 4
    pool.check_integrity()


@pytest.fixture
def arena(tmp_path):
    made = create_arena(str(tmp_path / "arena"), page_bytes=4096, pages=8, epoch=1)
    yield made
    made.close()


def mapped(tmp_path):
    return reopen_arena(str(tmp_path / "arena"), Shape(4096, 8))


def test_who_gets_the_lock_has_the_generation(arena, tmp_path):
    writer = mapped(tmp_path)
    assert writer.claim(7, 3)
    assert [arena.take(n) for n in range(6, 11)] == [True, False, False, False, True]
    assert (arena.revoked, writer.revoked) == (2, 2)
    writer.release()
    assert arena.take(8)
    assert (writer.claim(8, 1), writer.revoked) == (True, 3)  # which tells it not to write
    writer.close()
    assert arena.take(8)


def test_one_writer_s_claims_are_none_of_another_s(arena, tmp_path):
    one, two = mapped(tmp_path), mapped(tmp_path)
    assert one.claim(1, 2)
    assert two.claim(3, 2)
    assert not two.claim(2, 1)
    two.release()
    assert [arena.take(n) for n in range(1, 5)] == [False, False, True, True]
    one.close()
    two.close()


CLAIMER = """
import sys
from kimi_connect.arena import Shape, reopen_arena
arena = reopen_arena(sys.argv[1], Shape(4096, 8))
assert arena.claim(5, 1)
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_claim_ends_with_its_process(arena, tmp_path):
    process = start_python(CLAIMER, str(tmp_path / "arena"))
    assert process.stdout.readline() == b"claimed\n"
    assert not arena.take(5)
    process.kill()
    process.communicate()
    assert arena.take(5)


LOOKER = """
import atexit, sys
atexit.register(lambda: print(reopen_arena(path, SHAPE).take(5)))  # behind whatever comes later
from kimi_connect.arena import Shape, reopen_arena
path, SHAPE = sys.argv[1], Shape(4096, 8)
arena = reopen_arena(path, SHAPE)
assert arena.claim(5, 1)
"""


def test_a_claim_lasts_to_the_process_s_end_though_its_threads_may_copy_till_then(arena, tmp_path):
    process = start_python(LOOKER, str(tmp_path / "arena"))
    assert process.communicate()[0] == b"False\n"
    assert arena.take(5)


def test_an_arena_of_another_layout_has_no_stocks(tmp_path):
    with pytest.raises(ArenaGone):
        mapped(tmp_path)


@pytest.fixture
async def daemon(tmp_path, monkeypatch):
    monkeypatch.setattr(small_puts, "SMALL_PUT_BYTES", 0)  # blocks of tests are small
    async with running(pool_spec(tmp_path)) as made:
        yield made
        made.clients.pool.check_integrity()


@pytest.fixture(params=["blocking", "async"])
async def client(daemon, request):
    made = await connected(daemon.spec.socket, request.param)
    yield made
    await ended(made)


async def connected(socket, kind):
    if kind == "async":
        return await open_pool(socket, CALL_KEY)
    return ArenaClient(socket, CALL_KEY, leaves=leaves)


async def ended(client):
    await of(client.close if isinstance(client, ArenaClient) else client.aclose)


async def of(work, *arguments, **named):
    """A call, while the daemon of this process goes on."""
    if asyncio.iscoroutinefunction(work):
        return await work(*arguments, **named)
    return await asyncio.to_thread(work, *arguments, **named)


async def until(condition):
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.005)


async def stocked(client, daemon, start=1000):
    """A put after which the client has a stock."""
    keys = keys_of(4, start)
    assert await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S) == 4
    await until(lambda: daemon.clients.pool.stocks)
    return keys


async def loads(client, keys):
    into = targets(len(keys))
    assert await of(client.load, keys, into, deadline_s=SOON_S) == (len(keys), Outcome.HIT)
    assert into == blocks_of(keys)


async def test_a_put_into_the_stock_waits_for_no_answer_and_is_seen_by_whoever_asks_then(
    daemon, client
):
    await stocked(client, daemon)
    keys, other = keys_of(4), await open_pool(daemon.spec.socket, CALL_KEY)
    store = client.store(keys, blocks_of(keys), deadline_s=SOON_S)  # the daemon's loop stands still
    kept = await store if asyncio.iscoroutine(store) else store
    assert (kept, daemon.clients.pool.held(keys)) == (4, 0)
    assert await other.held(keys) == 4
    into = targets(4)
    assert await other.load(keys, into, deadline_s=SOON_S) == (4, Outcome.HIT)
    assert into == blocks_of(keys)
    await other.aclose()


async def test_small_blocks_go_into_the_stock_too_once_there_is_one(daemon, client, monkeypatch):
    monkeypatch.setattr(small_puts, "SMALL_PUT_BYTES", 128 << 10)
    first, second = keys_of(4), keys_of(4, 100)
    await of(client.store, first, blocks_of(first), deadline_s=SOON_S)
    await until(lambda: daemon.clients.pool.stocks)
    assert await of(client.store, second, blocks_of(second), deadline_s=SOON_S) == 4
    await loads(client, [*first, *second])


async def test_a_put_that_is_done_counts_though_no_stock_could_be_asked_for(
    daemon, client, monkeypatch
):
    async def late(*_, **__):
        raise TimeoutError("the daemon did not answer")

    def lost(*_):
        raise Lost("the daemon has gone")

    monkeypatch.setattr(Link, "keep", late)
    monkeypatch.setattr(storing, "_tell", lost)
    keys = keys_of(4)
    assert await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S) == 4
    await loads(client, keys)


async def bare(daemon, instance):
    given = {"instance": instance, "name": "bare", "writing": frozenset()}
    return await open_link(daemon.spec.socket, CALL_KEY, within_s=SOON_S, **given)


async def test_who_asks_before_a_put_of_the_same_moment_is_read_is_answered_after_it(daemon):
    writer, reader = await bare(daemon, b"w" * 16), await bare(daemon, b"r" * 16)
    (wanted,) = keys_of(1)
    wish = Keep([], "default", Priority.NORMAL, Wish(2, BLOCK))
    answer = await writer.call(Op.KEEP, pack_keep(wish), within_s=SOON_S)
    granted, _ = unpack_kept(answer.payload).granted
    (block,) = blocks_of([wanted])
    for part, piece in matched(list(writer.arena.parts(granted.extents, BLOCK)), block):
        part[:] = piece
    tags = (GroupTag(BLOCK, *block_tags(wanted, (BLOCK,), block)),)
    asking = reader.call(Op.HELD, payloads.pack_keys([wanted]), within_s=SOON_S)
    filled = Keep([Filled(wanted, granted.generation, tags)], "default", Priority.NORMAL, Wish())
    asked = asyncio.ensure_future(asking)
    await asyncio.sleep(0)  # both are on their way before the daemon's turn, the question first
    writer.tell(Op.KEEP, pack_keep(filled))
    assert payloads.unpack_number((await asked).payload) == 1
    writer.close()
    reader.close()


async def test_a_stock_that_was_taken_back_is_not_written_to(daemon, client):
    await stocked(client, daemon)
    assert daemon.clients.pool.revoke()
    others = keys_of(40, 500)
    pool = await open_pool(daemon.spec.socket, CALL_KEY)
    assert await pool.store(others, blocks_of(others), deadline_s=SOON_S) == 40
    keys = keys_of(4)
    assert await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S) == 4
    await loads(client, [*others, *keys])
    assert daemon.clients.pool.counters.expired == 0
    await pool.aclose()


async def test_a_stock_is_given_back_at_the_end(daemon, client):
    await stocked(client, daemon)
    await ended(client)
    await until(lambda: not len(daemon.clients))
    counters = daemon.clients.pool.counters
    assert (daemon.clients.pool.stocks, counters.revoked, counters.aborted) == (0, 0, 16)


async def test_a_lost_connection_leaves_no_stock_and_the_next_put_gets_another(daemon, client):
    await stocked(client, daemon)
    if isinstance(client, ArenaClient):
        client._daemon.drop()
    else:
        client._daemon._link.close()
    await until(lambda: not daemon.clients.pool.stocks)
    assert daemon.clients.pool.reservations(quarantined=True) == 0
    await loads(client, await stocked(client, daemon, 2000))


async def test_more_than_the_stock_is_put_in_parts_and_the_head_is_the_warmest(
    daemon, client, monkeypatch
):
    monkeypatch.setattr(stocking, "PART_BYTES", 2 * BLOCK)
    await stocked(client, daemon)
    keys = keys_of(30)
    assert await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S) == 30
    await loads(client, keys)
    await of(client.store, keys_of(1), blocks_of(keys_of(1)), deadline_s=SOON_S)
    warmest = [block.key for block in daemon.clients.pool.warmest()]
    assert warmest[:2] == keys[:2]


async def test_blocks_of_another_size_or_tenant_get_a_stock_of_their_own(daemon, client):
    await stocked(client, daemon)
    for n, (size, tenant) in enumerate([(5000, "default"), (BLOCK, "other"), (5000, "other")]):
        for round_ in range(3):
            keys = keys_of(2, 100 * n + 10 * round_)
            blocks = blocks_of(keys, size)
            put = {"deadline_s": SOON_S, "tenant": tenant}
            assert await of(client.store, keys, blocks, **put) == 2
            into = targets(2, size)
            assert await of(client.load, keys, into, deadline_s=SOON_S) == (2, Outcome.HIT)
            assert into == blocks
    assert daemon.clients.pool.counters.expired == 0


async def test_stocks_that_come_and_go_under_others_puts_never_hold_another_key_s_bytes(daemon):
    clients = [ArenaClient(daemon.spec.socket, CALL_KEY, leaves=leaves) for _ in range(3)]
    counters = daemon.clients.pool.counters
    outcomes = set()

    def work(number, size):
        put, got = random.Random(number), random.Random(-number)
        for round_ in range(2000):
            if round_ >= 60 and counters.revoked:
                return
            keys = keys_of(put.randint(1, 6), put.randrange(0, 200, 10) + 1000 * size)
            clients[number].store(keys, blocks_of(keys, size), deadline_s=SOON_S)
            keys = keys_of(6, got.randrange(0, 200, 10) + 1000 * size)
            into = targets(6, size)
            count, outcome = clients[number].load(keys, into, deadline_s=SOON_S)
            assert into[:count] == blocks_of(keys[:count], size)
            outcomes.add(outcome)

    await asyncio.gather(*(of(work, n, size) for n, size in enumerate([BLOCK, 3000, 24_000])))
    assert counters.evicted
    assert counters.revoked
    assert (counters.corrupt, outcomes) == (0, {Outcome.HIT, Outcome.MISS})
    for client in clients:
        await ended(client)


async def test_puts_beside_each_other_share_a_stock_and_let_go_of_it_at_the_end(daemon):
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    await stocked(client, daemon)
    chains = [keys_of(3, start) for start in range(0, 100, 10)]
    puts = (client.store(keys, blocks_of(keys), deadline_s=SOON_S) for keys in chains)
    assert await asyncio.gather(*puts) == [3] * 10
    assert await client.held(chains[0]) == 3  # which is answered behind all that was told
    pool = daemon.clients.pool
    pool.revoke()
    assert (pool.stocks, pool.counters.expired) == (0, 0)
    await asyncio.gather(*(loads(client, keys) for keys in chains))
    await client.aclose()


async def test_a_put_waits_for_its_answer_where_the_socket_takes_no_more(daemon):
    """What an event loop keeps to send later would end with the process."""
    client, keys = await open_pool(daemon.spec.socket, CALL_KEY), keys_of(4)
    await stocked(client, daemon)
    for _ in range(40):
        client._daemon.tell_of(Op.TOUCH, keys_of(1000, 5000))
    assert client._daemon._link.transport.get_write_buffer_size()
    assert await client.store(keys, blocks_of(keys), deadline_s=SOON_S) == 4
    assert daemon.clients.pool.held(keys) == 4
    await client.aclose()


async def test_a_put_that_is_cancelled_while_it_copies_leaves_nothing(daemon, monkeypatch):
    monkeypatch.setattr(engine_storing, "INLINE_BYTES", -1)
    client, keys = await open_pool(daemon.spec.socket, CALL_KEY), keys_of(4)
    await stocked(client, daemon)
    stocks = daemon.clients.pool.stocks
    put = asyncio.ensure_future(client.store(keys, blocks_of(keys), deadline_s=SOON_S))
    await asyncio.sleep(0)
    put.cancel()
    await asyncio.wait({put})
    assert put.cancelled()
    assert await client.held(keys) == 0
    pool = daemon.clients.pool
    assert pool.stocks == stocks - 4
    pool.revoke()
    assert (pool.stocks, client._daemon.writing) == (0, set())
    await client.aclose()


async def test_a_cancelled_put_of_what_is_there_lets_go_of_nobody_s_claim(daemon, monkeypatch):
    monkeypatch.setattr(engine_storing, "INLINE_BYTES", -1)
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    there = await stocked(client, daemon)
    put = asyncio.ensure_future(client.store(there, blocks_of(there), deadline_s=SOON_S))
    await asyncio.sleep(0)
    put.cancel()
    await asyncio.wait({put})
    stock = client._daemon._link.stock
    one, two = (stock.take(("default", BLOCK), 1) for _ in range(2))
    stock.let_go()  # of the first: somebody may still write to the second
    daemon.clients.pool.revoke()
    assert daemon.clients.pool.stocks == len(one + two)
    stock.let_go()
    await client.aclose()


async def test_what_is_put_by_asking_does_not_push_out_what_went_into_the_stock(daemon, client):
    pool = daemon.clients.pool
    hot = await stocked(client, daemon)
    for _ in range(3):
        client.used(hot)
    await of(client.held, hot)
    room = pool.total_pages // 3  # of blocks of three pages each
    keys = keys_of(room)
    assert await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S) == room
    assert pool.counters.evicted
    assert pool.held(keys) == room


async def test_a_draining_daemon_takes_stocks_back_and_grants_none(daemon, client):
    await stocked(client, daemon)
    daemon.clients.draining = True
    assert daemon.clients.pool.revoke()
    keys = keys_of(4)
    assert await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S) == 0
    assert daemon.clients.pool.stocks == 0


@pytest.mark.parametrize("kind", ["blocking", "async"])
async def test_a_frozen_daemon_costs_a_put_its_stock_and_no_more_than_its_deadline(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(small_puts, "SMALL_PUT_BYTES", 0)
    process = await of(DaemonProcess, pool_spec(tmp_path))
    client = await connected(tmp_path / "umbp.sock", kind)
    other = await connected(tmp_path / "umbp.sock", "blocking")
    try:
        for n in range(2):
            keys = keys_of(4, 100 * n)
            assert await of(client.store, keys, blocks_of(keys), deadline_s=SOON_S) == 4
        process.freeze()
        kept = 0
        for start in range(1000, 1010):
            (one,) = keys_of(1, start)
            kept += await of(client.store, [one], blocks_of([one]), deadline_s=0.2)
        assert 0 < kept < 10
        process.thaw()
        await loads(other, keys_of(kept, 1000))
    finally:
        process.kill()
        await ended(client)
        await ended(other)


WRITER = """
import sys
from kimi_connect.client import ArenaClient
client = ArenaClient(sys.argv[1], sys.argv[2].encode())
blocks = [memoryview(bytes([n]) * 100_000) for n in range(4)]
assert client.store([bytes([n] * 16) for n in range(4)], blocks, deadline_s=20) == 4
client.held([bytes(16)])
stock = client._daemon._connection.stock
(place,) = stock.take(("default", 100_000), 1)
place.parts[0][:10] = b"half of it"
print(place.generation, flush=True)
sys.stdin.read()
"""


async def test_a_client_killed_while_it_writes_to_its_stock_leaves_no_page_lost(tmp_path):
    async with running(pool_spec(tmp_path, dram_bytes="4MiB", reservation_ttl=0.2)) as daemon:
        pool = daemon.clients.pool
        writer = await of(start_python, WRITER, str(daemon.spec.socket), CALL_KEY.decode())
        try:
            generation = int(await of(writer.stdout.readline))
            await until(lambda: pool.stocks == 1)  # the others have lapsed: nobody claims them
            assert pool.revoke() == 0
            assert pool._reservations.owned(generation, *pool._reservations._pages_of)
        finally:
            writer.kill()
            await of(writer.communicate)
        await until(lambda: pool.stocks == 0)
        used = sum(block.pages for block in pool.blocks())
        await until(lambda: pool.free_pages + used == pool.total_pages)
        pool.check_integrity()


@pytest.mark.parametrize("end", ["the daemon's", "the client's"])
async def test_whoever_ends_with_a_stock_about_leaves_no_page_lost(tmp_path, monkeypatch, end):
    monkeypatch.setattr(small_puts, "SMALL_PUT_BYTES", 0)
    process = await of(DaemonProcess, pool_spec(tmp_path))
    try:
        client = ArenaClient(tmp_path / "umbp.sock", CALL_KEY, leaves=leaves)
        keys = keys_of(8)
        for part in (keys[:4], keys[4:]):
            assert await of(client.store, part, blocks_of(part), deadline_s=SOON_S) == 4
        await of(client.held, keys)
        process.kill()
        if end == "the client's":
            await of(client.close)
        async with running(pool_spec(tmp_path)) as daemon:
            pool = daemon.clients.pool
            assert pool.live_blocks == 8
            if end == "the daemon's":
                assert pool.reservations(quarantined=True)
                more = keys_of(4, 100)
                async with asyncio.timeout(SOON_S):
                    while await of(client.store, more, blocks_of(more), deadline_s=SOON_S) < 4:
                        await asyncio.sleep(0.01)
                await loads(client, [*keys, *more])
            await until(lambda: not pool.reservations(quarantined=True))
            await of(client.close)
            used = sum(block.pages for block in pool.blocks())
            await until(lambda: pool.free_pages + used == pool.total_pages)
            pool.check_integrity()
    finally:
        process.kill()
