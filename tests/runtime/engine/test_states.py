"""An engine whose model has a state goes on from the pool only with blocks and state together."""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hash_engine import BLOCK_TOKENS, Answer, Running, Setup, hash_engine, request
from kimi_connect.states import piece_count, piece_keys
from kimi_runtime.engine.plan import StepPlan
from kimi_runtime.engine.state_blocks import blocks_of_state
from kimi_runtime.errors import KimistackError, NotFound, RegionGone
from kimi_runtime.spec.request import HandOffProgress, KvPlan
from kimi_runtime.transfer.chaos import ChaosPlan, ChaosTransport
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport
from kimi_runtime.umbp.checkpoints import Checkpoints
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from pool_daemon import CALL_KEY, pool_spec

STATE_BYTES, PIECE = 10_000, 4096


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=size)


async def alone(ids: list[int], outputs: int = 6) -> list[int]:
    async with hash_engine(Setup(stateful=True, step_tokens=128)) as engine:
        return (await engine.generate(request(ids, outputs))).ids


@contextlib.asynccontextmanager
async def engines(folder, **setup):
    """A daemon, and engines one after another that share its pool."""
    async with running(pool_spec(folder)) as daemon:

        @contextlib.asynccontextmanager
        async def engine():
            groups = (8 * BLOCK_TOKENS,) * 2
            pool = await open_pool(daemon.spec.socket, CALL_KEY, group_bytes=groups)
            checkpoints = Checkpoints(pool, STATE_BYTES, piece_bytes=PIECE)
            made = Setup(stateful=True, pool=pool, checkpoints=checkpoints, **setup)
            try:
                async with hash_engine(made) as one:
                    yield one
            finally:
                await pool.aclose()

        yield daemon, engine


async def stored(one: Running) -> None:
    """Wait until what was computed is in the pool."""
    writer = one.engine._parts.writer
    assert writer is not None
    assert await writer.flushed(within_s=10.0)


@pytest.mark.parametrize("size", [5, 8, 9, 21, 30])
async def test_another_engine_goes_on_behind_the_prompts_last_whole_block(tmp_path, size):
    ids = prompt(1, size)
    turn = [*ids, *prompt(2, 7)]
    async with engines(tmp_path) as (_, engine):
        async with engine() as first:
            assert (await first.generate(request(ids, 1))).ids == await alone(ids, 1)
            await stored(first)
        async with engine() as second:
            answer = await second.generate(request(turn))
            assert answer.ids == await alone(turn)
            assert answer.usage.pool_tokens == size - size % BLOCK_TOKENS
            second.assert_all_free()
            assert second.runner.states == {}


async def test_the_next_turn_goes_on_behind_the_answers_last_whole_block(tmp_path):
    ids = prompt(1, 21)
    async with engines(tmp_path) as (_, engine):
        async with engine() as first:
            answer = await first.generate(request(ids, 12))
            await stored(first)
            assert first.engine.counters().states_stored == 2  # of the prompt, and of the turn
        turn = [*ids, *answer.ids, *prompt(2, 3)]
        async with engine() as second:
            again = await second.generate(request(turn))
            assert again.ids == await alone(turn)
            assert again.usage.pool_tokens == 32  # of 33 - 1 that have KV


async def test_an_engine_keeps_its_own_blocks_apart_from_states_it_does_not_have(tmp_path):
    ids = prompt(1, 21)
    async with engines(tmp_path) as (daemon, engine), engine() as one:
        first = await one.generate(request(ids))
        await stored(one)
        daemon.clients.pool.clear()
        again = await one.generate(request(ids))
        assert again.ids == first.ids == await alone(ids)
        assert again.usage.computed_tokens == 21


async def test_where_a_hit_was_refused_a_state_is_kept(tmp_path):
    front = prompt(1, 20)
    asks = [[*front, *prompt(seed, 7)] for seed in (2, 3, 4)]
    async with engines(tmp_path) as (_, engine), engine() as one:
        found = []
        for ids in asks:
            answer = await one.generate(request(ids))
            assert answer.ids == await alone(ids)
            found.append(answer.usage.pool_tokens)
            await stored(one)
        assert found == [0, 0, 20]


@pytest.mark.parametrize("harm", ["missing", "corrupt"])
async def test_a_state_that_is_not_whole_is_computed_again(tmp_path, harm):
    ids = prompt(1, 30)
    async with engines(tmp_path) as (daemon, engine), engine() as one:
        await one.generate(request(ids, 1))
        await stored(one)
        pool = daemon.clients.pool
        (piece, *_) = [b for b in pool.blocks() if b.size == PIECE]
        if harm == "missing":
            pool.forget([piece.key])
        else:
            next(iter(daemon.clients.arena.parts(piece.extents, piece.size)))[0] ^= 1
        answer = await one.generate(request(ids))
        assert answer.ids == await alone(ids)
        assert answer.usage.computed_tokens == 30
        assert one.engine.counters().pool_failures.total() == (harm == "corrupt")


async def test_a_preempted_request_begins_anew(tmp_path):
    works = [prompt(seed, 20) for seed in (1, 2, 3)]
    async with engines(tmp_path, blocks=16, step_tokens=16) as (_, engine), engine() as one:
        answers = await asyncio.gather(*(one.generate(request(ids, 24)) for ids in works))
        for ids, answer in zip(works, answers, strict=True):
            assert answer.ids == await alone(ids, 24)
        assert one.engine.counters().preemptions
        one.assert_all_free()
        assert one.runner.states == {}


async def test_a_failed_step_is_not_computed_twice(tmp_path):
    broken = [True]

    def before_step(plan: StepPlan) -> None:
        if broken:
            raise RuntimeError(broken.pop())

    ids = prompt(1, 21)
    async with engines(tmp_path, before_step=before_step) as (_, engine), engine() as one:
        with pytest.raises(KimistackError):
            await one.generate(request(ids))
        assert (await one.generate(request(ids))).ids == await alone(ids)
        assert one.runner.states == {}


class Direct:
    """An owner's progress without a network."""

    def __init__(self) -> None:
        self.owner: Running | None = None

    async def lines(self, url: str, after: int) -> AsyncGenerator[HandOffProgress, None]:
        assert self.owner is not None
        try:
            async with contextlib.aclosing(self.owner.engine.progress(url, after)) as lines:
                async for line in lines:
                    yield line
        except NotFound as exc:
            raise RegionGone("no such hand-off") from exc


@contextlib.asynccontextmanager
async def pair(chaos: ChaosPlan | None = None, **prefill):
    """A prefill and a decode engine without a pool."""
    fabric, progress = Fabric(), Direct()
    link = ChaosTransport(LoopbackTransport("d", fabric), chaos or ChaosPlan())
    shared = {"stateful": True, "blocks": 400, "step_tokens": 8, "deadline_s": 0.5}
    first = Setup(name="p", transport=LoopbackTransport("p", fabric), **(shared | prefill))
    second = Setup(name="d", transport=link, progress=progress, **shared)
    async with hash_engine(first) as source, hash_engine(second) as target:
        progress.owner = source
        yield source, target


async def handed_over(source: Running, target: Running, ids: list[int]) -> Answer:
    asked = request(ids, kv=KvPlan(offer=True, early=True))
    async with asyncio.TaskGroup() as tasks:
        chunks = source.engine.generate(asked)
        hand_off = (await anext(chunks)).hand_off
        assert hand_off is not None
        taking = tasks.create_task(target.generate(request(ids, kv=KvPlan(take=hand_off))))
        _ = [chunk async for chunk in chunks]
    await source.engine.release(hand_off.ticket)
    return taking.result()


STATE_BLOCKS = blocks_of_state(STATE_BYTES, BLOCK_TOKENS * 16)


@pytest.mark.parametrize("size", [2, 4, 5, 8, 9, 21, 33])
async def test_a_hand_off_brings_blocks_and_state_and_decode_computes_one_token(size):
    ids = prompt(1, size)
    async with pair() as (source, target):
        answer = await handed_over(source, target, ids)
        assert answer.ids == await alone(ids)
        assert answer.usage.computed_tokens == 1
        blocks = -(-(size - 1) // BLOCK_TOKENS) + STATE_BLOCKS
        assert answer.usage.hand_off_bytes == blocks * BLOCK_TOKENS * 16
        source.assert_all_free()
        target.assert_all_free()
        assert source.runner.states == target.runner.states == {}


async def test_blocks_that_decode_has_are_not_moved_but_the_state_is():
    ids = prompt(1, 33)
    async with pair() as (source, target):
        await target.generate(request(ids[:20], 1))
        answer = await handed_over(source, target, ids)
        assert answer.ids == await alone(ids)
        assert answer.usage.hbm_tokens == 20
        assert answer.usage.hand_off_bytes == (3 + STATE_BLOCKS) * BLOCK_TOKENS * 16


async def test_a_prefill_without_room_for_the_state_hands_nothing_over():
    ids = prompt(1, 33)
    async with pair(blocks=STATE_BLOCKS) as (source, target):
        answer = await handed_over(source, target, ids)
        assert answer.ids == await alone(ids)
        assert answer.usage.computed_tokens == 33
        target.assert_all_free()


@pytest.mark.parametrize("fault", ["corrupt", "drop", "rehome", "stall"])
async def test_a_fault_anywhere_means_that_all_is_computed(fault):
    ids = prompt(1, 33)
    async with pair(ChaosPlan(**{fault: 1.0})) as (source, target):
        answer = await handed_over(source, target, ids)
        assert answer.ids == await alone(ids)
        assert answer.usage.computed_tokens == 33
        assert target.engine.counters().hand_off_failures.total() == 1
        target.assert_all_free()


@settings(max_examples=20, deadline=None)
@given(
    fault=st.sampled_from(["corrupt", "rehome", "duplicate", "delay"]),
    seed=st.integers(0, 99),
    size=st.integers(1, 40),
)
def test_a_bad_link_never_yields_other_ids(fault, seed, size):
    async def check() -> None:
        plan = ChaosPlan(seed=seed, delay_s=0.001, **{fault: 0.3})
        async with pair(plan) as (source, target):
            ids = prompt(seed, size)
            assert (await handed_over(source, target, ids)).ids == await alone(ids)
            target.assert_all_free()

    asyncio.run(check())


async def test_a_reader_that_leaves_frees_the_state_on_both_sides():
    ids = prompt(1, 33)
    async with pair() as (source, target):
        chunks = source.engine.generate(request(ids, kv=KvPlan(offer=True, early=True)))
        hand_off = (await anext(chunks)).hand_off
        assert hand_off is not None
        _ = [chunk async for chunk in chunks]
        held = source.setup.blocks - source.engine.load().free_blocks
        assert held == 8 + STATE_BLOCKS
        await source.engine.release(hand_off.ticket)
        source.assert_all_free()
        answer = await target.generate(request(ids, kv=KvPlan(take=hand_off)))
        assert answer.ids == await alone(ids)


def test_the_pieces_of_the_tests_state_are_three():
    assert len(piece_keys(b"k" * 16, piece_count(STATE_BYTES, PIECE))) == 3
