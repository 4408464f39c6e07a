"""States are found and restored only with the blocks of their boundary, and leave with them.

Through the real daemon and client, for a model whose every id depends on its whole state and KV.
"""

import asyncio
import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.states import PIECE_BYTES, attached, deepest, piece_count, piece_keys
from kimi_connect.wire import Grant, GroupTag, Outcome
from kimi_runtime.engine.request import KeyChain
from kimi_runtime.spec.published import published
from kimi_runtime.spec.sizes import state_bytes
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.block_pool import LoadResult
from kimi_runtime.umbp.checkpoints import Checkpoints
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.retention import Standing
from pool_daemon import CALL_KEY, keys_of, pool_spec
from pool_peers import knows, peer, until
from stateful_model import BLOCK_BYTES, BLOCK_TOKENS, STATE_BYTES, StatefulEngine, from_nothing
from stateful_model import PIECE_BYTES as PIECE

PIECES = piece_count(STATE_BYTES, PIECE)


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=size)


@contextlib.asynccontextmanager
async def served(folder, **changes):
    async with running(pool_spec(folder, **changes)) as daemon:
        client = await open_pool(daemon.spec.socket, CALL_KEY)
        try:
            yield daemon, StatefulEngine(client)
        finally:
            await client.aclose()
            daemon.clients.pool.check_integrity()


def states_of(daemon) -> dict[bytes, list[bytes]]:
    """The pieces that memory holds, by their boundary."""
    blocks = daemon.clients.pool.blocks()
    held = {block.key for block in blocks}
    ends = [block.key for block in blocks if block.size == BLOCK_BYTES]
    found = {key: [p for p in piece_keys(key, PIECES) if p in held] for key in ends}
    return {key: pieces for key, pieces in found.items() if pieces}


def boundary(tokens: list[int], blocks: int) -> bytes:
    """The key of the last of a prompt's first `blocks` blocks."""
    chain = KeyChain(b"p" * 32, b"r" * 16, BLOCK_TOKENS)
    chain.extend(tokens)
    return chain.keys[blocks - 1]


async def test_the_next_turn_goes_on_where_the_last_one_ended(tmp_path):
    first = prompt(1, 30)
    turn = [*first, *prompt(2, 13)]
    async with served(tmp_path) as (_, engine):
        assert (await engine.serve(first)).computed == 30
        answer = await engine.serve(turn)
        assert answer.computed == len(turn) - 28  # the last whole block of the first turn
        assert answer.id == from_nothing(turn)
        assert answer.outcome is Outcome.HIT


async def test_who_shares_only_a_front_goes_on_from_the_grid(tmp_path):
    first = prompt(1, 45)
    other = [*first[:38], *prompt(2, 10)]
    async with served(tmp_path) as (_, engine):
        await engine.serve(first)
        answer = await engine.serve(other)
        assert answer.computed == len(other) - 32  # blocks reach to 36, states to 32
        assert answer.id == from_nothing(other)


async def test_where_a_hit_was_refused_a_state_is_kept_for_the_next(tmp_path):
    front = prompt(1, 28)
    asks = [[*front, *prompt(seed, 9)] for seed in (2, 3, 4)]
    async with served(tmp_path) as (_, engine):
        computed = [(await engine.serve(ask)).computed for ask in asks]
        assert computed == [37, 37 - 16, 37 - 28]
        for ask in asks:
            assert (await engine.serve(ask)).id == from_nothing(ask)


async def test_blocks_without_a_state_are_no_hit(tmp_path):
    tokens = prompt(1, 14)
    async with served(tmp_path) as (daemon, engine):
        await engine.serve(tokens)
        daemon.clients.pool.forget(piece_keys(boundary(tokens, 3), PIECES)[:1])
        assert daemon.clients.pool.held([boundary(tokens, 3)]) == 1
        answer = await engine.serve(tokens)
        assert (answer.computed, answer.id) == (14, from_nothing(tokens))
        assert (await engine.serve(tokens)).computed == 2  # it was kept again


async def test_a_state_without_its_blocks_is_no_hit(tmp_path):
    tokens = prompt(1, 30)
    async with served(tmp_path) as (daemon, engine):
        await engine.serve(tokens)
        daemon.clients.pool.forget([boundary(tokens, 5)])
        answer = await engine.serve(tokens)
        assert (answer.computed, answer.id) == (30 - 16, from_nothing(tokens))


@pytest.mark.parametrize("piece", range(PIECES))
async def test_a_corrupt_piece_means_a_shallower_hit_and_the_state_goes(tmp_path, piece):
    tokens = prompt(1, 30)
    async with served(tmp_path) as (daemon, engine):
        await engine.serve(tokens)
        key = piece_keys(boundary(tokens, 7), PIECES)[piece]
        block = daemon.clients.pool.block(key)
        assert block is not None
        next(iter(daemon.clients.arena.parts(block.extents, block.size)))[7] ^= 1
        answer = await engine.serve(tokens)
        assert (answer.computed, answer.id) == (30 - 16, from_nothing(tokens))
        assert answer.outcome is Outcome.CORRUPT
        again = await engine.serve(tokens)
        assert (again.computed, again.id) == (2, from_nothing(tokens))


async def test_a_corrupt_block_means_an_earlier_boundary(tmp_path):
    tokens = prompt(1, 30)
    async with served(tmp_path) as (daemon, engine):
        await engine.serve(tokens)
        block = daemon.clients.pool.block(boundary(tokens, 6))
        assert block is not None
        next(iter(daemon.clients.arena.parts(block.extents, block.size)))[7] ^= 1
        answer = await engine.serve(tokens)
        assert (answer.computed, answer.id) == (30 - 16, from_nothing(tokens))


class SlowStates:
    """A pool whose pieces of one boundary never come."""

    def __init__(self, pool, slow: list[bytes]) -> None:
        self._pool, self._slow = pool, slow

    def __getattr__(self, name):
        return getattr(self._pool, name)

    async def load(self, keys, into, *, deadline_s, tenant):
        if keys and keys[0] in self._slow:
            await asyncio.sleep(deadline_s)
            return LoadResult(0, Outcome.LATE)
        return await self._pool.load(keys, into, deadline_s=deadline_s, tenant=tenant)


async def test_a_late_state_means_a_shallower_hit(tmp_path):
    tokens = prompt(1, 30)
    async with served(tmp_path) as (_, engine):
        await engine.serve(tokens)
        slow = SlowStates(engine.pool, piece_keys(boundary(tokens, 7), PIECES))
        hurried = StatefulEngine(slow, deadline_s=0.4)
        answer = await hurried.serve(tokens)
        assert (answer.computed, answer.id) == (30 - 16, from_nothing(tokens))
        assert answer.outcome is Outcome.LATE


async def test_without_a_daemon_everything_is_computed(tmp_path):
    tokens = prompt(1, 30)
    async with served(tmp_path) as (_, engine):
        await engine.serve(tokens)
    answer = await engine.serve(tokens)
    assert (answer.computed, answer.id) == (30, from_nothing(tokens))


async def test_a_state_is_not_kept_without_its_blocks(tmp_path):
    async with served(tmp_path) as (daemon, engine):
        state = memoryview(bytes(STATE_BYTES))
        kept = await engine.checkpoints.keep(keys_of(3), state, deadline_s=5.0, tenant="default")
        assert not kept
        assert daemon.clients.pool.live_blocks == 0
        with pytest.raises(ValueError, match="a state of"):
            await engine.checkpoints.keep([], state[1:], deadline_s=5.0, tenant="default")


@pytest.mark.parametrize("late", range(2))
async def test_a_state_of_which_a_piece_came_too_late_is_not_said_to_be_kept(
    tmp_path, monkeypatch, late
):
    """A put into a stock returns before it is answered."""
    state, how = memoryview(bytes(2 * PIECE)), {"deadline_s": 5.0, "tenant": "default"}
    tokens = prompt(1, 14)
    async with served(tmp_path) as (daemon, engine):
        await engine.serve(tokens)
        checkpoints = Checkpoints(engine.pool, state.nbytes, piece_bytes=PIECE)
        pool, keys = daemon.clients.pool, [boundary(tokens, n) for n in (1, 2)]
        pieces = piece_keys(keys[-1], 2)
        assert await checkpoints.keep(keys, state, **how)  # and asks for a stock
        pool.forget(pieces)
        keep, kept = Pool.keep, []

        def too_late(self, blocks, **given):
            kept.extend(block.key for block in blocks)
            gone = [b._replace(generation=1) if b.key == pieces[late] else b for b in blocks]
            return keep(self, gone, **given)

        monkeypatch.setattr(Pool, "keep", too_late)
        assert not await checkpoints.keep(keys, state, **how)
        assert kept[:2] == pieces
        assert await engine.pool.held(keys) == 2
        monkeypatch.undo()
        pool.forget(pieces)
        assert await checkpoints.keep(keys, state, **how)


async def test_what_eviction_leaves_of_states_is_whole_or_the_first_to_go(tmp_path):
    async with served(tmp_path, dram_bytes="128KiB") as (daemon, engine):
        pool = daemon.clients.pool

        def all_whole_or_forsaken() -> bool:
            whole = {p for ps in states_of(daemon).values() if len(ps) == PIECES for p in ps}
            others = [b for b in pool.blocks() if b.size != BLOCK_BYTES and b.key not in whole]
            return all(pool.retention.standing(b.key, 1) is Standing.FORSAKEN for b in others)

        for seed in range(12):
            tokens = prompt(seed, 34)
            assert (await engine.serve(tokens)).id == from_nothing(tokens)
            await until(all_whole_or_forsaken, within_s=5.0)
        assert daemon.clients.pool.counters.evicted


async def test_states_are_in_the_feed_with_their_blocks(tmp_path):
    tokens = prompt(1, 30)
    async with served(tmp_path) as (daemon, engine):
        await engine.serve(tokens)
        pieces = piece_keys(boundary(tokens, 7), PIECES)
        assert all(key in daemon.clients.feed for key in pieces)
        daemon.clients.pool.forget([boundary(tokens, 7)])
        assert not any(key in daemon.clients.feed for key in pieces)


async def test_a_restarted_daemon_has_its_states(tmp_path):
    tokens = prompt(1, 30)
    async with served(tmp_path) as (_, engine):
        await engine.serve(tokens)
        await engine.pool.aclose()
    async with served(
        tmp_path,
        ssd=SsdSpec(folder=tmp_path / "ssd", capacity="8MiB", segment="1MiB"),
        ssd_after_uses=1,
    ) as (daemon, engine):
        await engine.serve(tokens)
        keys = [boundary(tokens, n) for n in range(1, 8)]
        engine.pool.used([*keys, *piece_keys(keys[-1], PIECES)])
        tier = daemon.clients.second.tier
        await until(lambda: tier.held([*keys, *piece_keys(keys[-1], PIECES)]) == 7 + PIECES)
        await until(lambda: not daemon.clients.second.writer.queued)
        daemon.tier.evict(100)
        assert not daemon.clients.pool.live_blocks
        answer = await engine.serve(tokens)
        assert (answer.computed, answer.id) == (2, from_nothing(tokens))


async def test_a_state_is_fetched_from_the_peer_that_has_it(tmp_path):
    tokens = prompt(1, 30)
    async with peer(tmp_path, "a") as (a, there):
        await StatefulEngine(there).serve(tokens)
        async with peer(tmp_path, "b", [("a", a.url)]) as (b, here):
            await knows(b, "a", a.clients.pool.live_blocks)
            answer = await StatefulEngine(here).serve(tokens)
            assert (answer.computed, answer.id) == (2, from_nothing(tokens))


@settings(max_examples=50, deadline=None)
@given(
    boundaries=st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=6),
    counts=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    data=st.data(),
)
def test_what_hangs_on_a_key_is_its_state_and_no_other(boundaries, counts, data):
    states = {k: piece_keys(k, n) for k, n in zip(boundaries, counts, strict=False)}
    held = {*boundaries, *(piece for pieces in states.values() for piece in pieces)}
    assert len(held) == len(boundaries) + sum(map(len, states.values()))
    for key, pieces in states.items():
        assert sorted(attached(key, held.__contains__)) == sorted(pieces)
        for piece in pieces:
            others = [one for one in pieces if one != piece]
            assert sorted(attached(piece, held.__contains__)) == sorted(others)
    if boundaries:
        wanted = data.draw(st.integers(1, 4))
        found = deepest(boundaries, wanted, held.__contains__)
        whole = [n for n, key in enumerate(boundaries, 1) if len(states[key]) >= wanted]
        assert found == max(whole, default=0)


class Held(set):
    """A pool's holdings."""

    def add(self, keys):
        self.update(keys)

    def remove(self, keys):
        self.difference_update(keys)


@settings(max_examples=50, deadline=None)
@given(
    ops=st.lists(
        st.tuples(
            st.sampled_from(["put", "evict", "forget", "clear", "pin", "unpin"]), st.integers(0, 9)
        ),
        max_size=40,
    )
)
def test_whatever_happens_a_state_is_whole_or_gone_and_none_is_without_its_boundary(ops):
    feed = Held()
    pool = Pool(24, 100, feed, 1e9, 1e9)
    keys, now_s, pins = keys_of(10), 0.0, []
    for op, number in ops:
        now_s += 1.0
        key = keys[number]
        if op == "put":
            batch = [key] if number % 2 else [key, *piece_keys(key, 2)]
            items = [(one, 100) for one in batch]
            grants = pool.reserve(items, writer=b"w", now_s=now_s, as_one=number % 3 == 0)
            tags = (GroupTag(100, b"t" * 16),)
            mine = [(g.generation, tags) for g in grants if g.grant is Grant.RESERVED]
            if len(mine) == len(batch):
                pool.commit(mine, writer=b"w", now_s=now_s)
            else:
                pool.abort([generation for generation, _ in mine], writer=b"w")
        elif op == "evict":
            pool.evict(1, now_s)
        elif op == "forget":
            pool.forget([key])
        elif op == "clear":
            pool.clear(pool.number - number)
        elif op == "pin":
            pins.append(pool.pin([key], reader=1, now_s=now_s).number)
        elif pins:
            pool.unpin(pins.pop(), [0] if number % 2 else [], reader=1, now_s=now_s)
        pool.check_integrity()
        held = {block.key for block in pool.blocks()}
        assert held == feed
        for one in keys:
            pieces = [piece for piece in piece_keys(one, 2) if piece in held]
            assert len(pieces) in (0, 2)
            assert one in held or not pieces


@pytest.mark.parametrize("named", [[0], [1], [0, 1]])
def test_no_put_of_a_state_pushes_out_its_boundary_or_what_of_it_was_there(named):
    """However cold they are: with the boundary all of the state goes."""
    pool = Pool(6, 100, Held(), 1e9, 1e9)
    boundary, *others = keys_of(3)
    pieces = piece_keys(boundary, 4)
    tags = (GroupTag(100, b"t" * 16),)
    for key in (boundary, *(pieces[n] for n in named), *others):
        (granted,) = pool.reserve([(key, 100)], writer=b"w", now_s=0.0)
        pool.commit([(granted.generation, tags)], writer=b"w", now_s=0.0)
    lacking = [(piece, 100) for piece in pieces]
    grants = pool.reserve(lacking, writer=b"w", now_s=1.0, as_one=True)
    assert [n for n, one in enumerate(grants) if one.grant is Grant.HELD] == named
    assert [pool.held([pieces[n]]) for n in named] == [1] * len(named)
    assert pool.held([boundary]) == 1
    pool.check_integrity()


def test_k3s_state_is_so_many_pieces():
    size = state_bytes(published("kimi-k3"))
    assert round(size / 2**20, 2) == 428.55
    assert piece_count(size) == 108
    assert piece_count(size) * PIECE_BYTES - size < PIECE_BYTES
