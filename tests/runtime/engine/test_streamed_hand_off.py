"""Hand-offs that are read while the prompt is computed: same ids, same bytes, nothing is left over.

The prefill engine computes 8 tokens (two blocks) a step; each layer group of a block is a part.
"""

import asyncio
import dataclasses
import random
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hash_engine import BLOCK_TOKENS, Answer, Running, Setup, hash_engine, request
from kimi_runtime import clock
from kimi_runtime.engine.plan import StepPlan
from kimi_runtime.errors import DeadlineExceeded, KimistackError, NotFound, PeerGone, RegionGone
from kimi_runtime.spec.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    HandOff,
    HandOffProgress,
    KvPlan,
    RegionRef,
)
from kimi_runtime.transfer.base import Session, Transport
from kimi_runtime.transfer.chaos import ChaosPlan, ChaosTransport
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.shm import ShmTransport
from kimi_runtime.transfer.tcp import TcpTransport

BLOCK_BYTES = BLOCK_TOKENS * 16
STEP_TOKENS = 8
KEY = b"k" * 32


def prompt(seed: int, size: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=size)


def offering(ids: list[int], **fields: object) -> GenerateRequest:
    return request(ids, kv=KvPlan(offer=True, early=True), **fields)


def taking(ids: list[int], hand_off: HandOff, **fields: object) -> GenerateRequest:
    return request(ids, kv=KvPlan(take=hand_off), **fields)


async def alone(ids: list[int]) -> list[int]:
    async with hash_engine(Setup(step_tokens=128)) as engine:
        return (await engine.generate(request(ids))).ids


class Direct:
    """An owner's progress without a network. `breaks`: connections that end after one line."""

    def __init__(self) -> None:
        self.owner: Running | None = None
        self.breaks = 0
        self.lost = False
        self.change: Callable[[HandOffProgress], HandOffProgress] = lambda line: line
        self.opened: list[int] = []

    async def lines(self, url: str, after: int) -> AsyncGenerator[HandOffProgress, None]:
        self.opened.append(after)
        if self.owner is None or self.lost:
            raise PeerGone("nobody there")
        try:
            async with aclosing(self.owner.engine.progress(url, after)) as lines:
                async for line in lines:
                    yield self.change(line)
                    if self.lost or self.breaks:
                        self.breaks -= not self.lost
                        raise PeerGone("broken off")
        except NotFound as exc:
            raise RegionGone("no such hand-off") from exc


class Steps:
    """Lets the prefill engine take one step (or layer group) after the other."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)
        self.at = 0

    def before_step(self, plan: StepPlan) -> None:
        if any(len(row.ids) > 1 or row.start for row in plan.rows):
            assert self.go_on.acquire(timeout=20)
            self.at += 1

    def free(self) -> None:
        self.go_on.release(1000)


class Link(ChaosTransport):
    """Knows what was read through it."""

    def __init__(self, inner: Transport, plan: ChaosPlan) -> None:
        super().__init__(inner, plan)
        self.opened: list[Session] = []

    @property
    def read_bytes(self) -> int:
        return sum(session.counters.read_bytes for session in self.opened)

    async def open(self, remote: RegionRef, *, deadline_s: float) -> Session:
        self.opened.append(await super().open(remote, deadline_s=deadline_s))
        return self.opened[-1]


class Pair:
    """A prefill engine that waits for `steps`, and a decode engine that follows it."""

    def __init__(
        self,
        chaos: ChaosPlan | None = None,
        *,
        links: tuple[Transport, Transport] | None = None,
        folder: Path | None = None,
        prefill: dict[str, object] | None = None,
        **decode: object,
    ) -> None:
        fabric = Fabric()
        own, theirs = links or (LoopbackTransport("p", fabric), LoopbackTransport("d", fabric))
        self.steps, self.progress = Steps(), Direct()
        self.link = Link(theirs, chaos or ChaosPlan())
        files = (None, None) if folder is None else (folder / "p.kv", folder / "d.kv")
        self._prefill_setup = dataclasses.replace(
            Setup(
                name="p",
                transport=own,
                step_tokens=STEP_TOKENS,
                before_step=self.steps.before_step,
                file=files[0],
            ),
            **(prefill or {}),
        )
        self._decode_setup = dataclasses.replace(
            Setup(name="d", transport=self.link, progress=self.progress, file=files[1]), **decode
        )

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Pair", None]:
        try:
            async with (
                hash_engine(self._prefill_setup) as self.prefill,
                hash_engine(self._decode_setup) as self.decode,
            ):
                self.progress.owner = self.prefill
                yield self
        finally:
            self.steps.free()

    async def offered(self, prefilling: AsyncGenerator[GenerateChunk, None]) -> HandOff:
        """The ticket, told after the first step began."""
        chunk = await anext(prefilling)
        assert chunk.finish is None
        assert chunk.hand_off is not None
        assert chunk.hand_off.progress_url is not None
        return chunk.hand_off

    async def settled(self) -> None:
        """Nothing is left, once the step that was running is over."""
        for side in (self.prefill, self.decode):
            await until(lambda load=side.engine.load: not load().in_flight)
            await until(lambda one=side: one.engine.load().free_blocks == one.setup.blocks)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        self.prefill.assert_all_free()
        self.decode.assert_all_free()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not true():
            await asyncio.sleep(0.001)


async def served(
    pair: Pair, ids: list[int], **fields: object
) -> tuple[list[GenerateChunk], Answer]:
    """A whole hand-off with nobody in the way: the prefill's chunks and the decode's answer."""
    pair.steps.free()
    prefilling = pair.prefill.engine.generate(offering(ids))
    async with asyncio.TaskGroup() as tasks:
        first = await anext(prefilling)  # the last as well, if the prompt was there already
        hand_off = first.hand_off
        assert hand_off is not None
        decoding = tasks.create_task(pair.decode.generate(taking(ids, hand_off, **fields)))
        chunks = [first, *[chunk async for chunk in prefilling]]
    await pair.prefill.engine.release(hand_off.ticket)
    return chunks, decoding.result()


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 21, 24, 25, 47])
async def test_decode_computes_the_last_token_alone(size):
    ids = prompt(1, size)
    async with Pair().running() as pair:
        chunks, answer = await served(pair, ids)
        assert chunks[-1].finish is FinishReason.HANDED_OFF
        assert chunks[-1].usage is not None
        assert answer.ids == await alone(ids)
        assert answer.usage.computed_tokens == 1
        assert answer.usage.hand_off_tokens == size - 1
        pair.assert_nothing_left()


@pytest.mark.parametrize("known", [0, 1, 3, 5])
async def test_the_bytes_moved_are_those_that_decode_lacks(known):
    ids = prompt(1, 23)
    async with Pair().running() as pair:
        if known:
            await pair.decode.generate(request(ids[: known * BLOCK_TOKENS], 1))
        _, answer = await served(pair, ids)
        assert answer.ids == await alone(ids)
        assert answer.usage.hbm_tokens == known * BLOCK_TOKENS
        assert answer.usage.hand_off_bytes == (6 - known) * BLOCK_BYTES
        pair.assert_nothing_left()


async def test_blocks_are_read_while_the_prompt_is_computed():
    ids = prompt(1, 47)
    async with Pair().running() as pair, asyncio.TaskGroup() as tasks:
        prefilling = pair.prefill.engine.generate(offering(ids))
        hand_off = await pair.offered(prefilling)
        decoding = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
        for step in range(1, 5):
            pair.steps.go_on.release()
            await until(lambda step=step: pair.link.read_bytes == step * 2 * BLOCK_BYTES)
        pair.steps.free()
        assert [chunk.finish async for chunk in prefilling] == [FinishReason.HANDED_OFF]
        answer = await decoding
        assert answer.ids == await alone(ids)
        assert answer.usage.hand_off_early_bytes >= 8 * BLOCK_BYTES
        assert answer.usage.hand_off_bytes == 12 * BLOCK_BYTES
        await pair.prefill.engine.release(hand_off.ticket)
        pair.assert_nothing_left()


async def test_a_layer_group_is_read_while_the_step_computes_the_next():
    ids = prompt(1, 7)
    entered, go_on = threading.Event(), threading.Event()

    def after_group(group: int) -> None:
        if not group:
            entered.set()
            assert go_on.wait(20)

    pair = Pair(prefill={"after_group": after_group})
    async with pair.running(), asyncio.TaskGroup() as tasks:
        prefilling = pair.prefill.engine.generate(offering(ids))
        hand_off = await pair.offered(prefilling)
        decoding = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
        pair.steps.free()
        await until(lambda: pair.link.read_bytes == 2 * BLOCK_BYTES // 2)  # of both blocks
        assert entered.is_set()
        go_on.set()
        _ = [chunk async for chunk in prefilling]
        assert (await decoding).ids == await alone(ids)
        await pair.prefill.engine.release(hand_off.ticket)
        pair.assert_nothing_left()


async def test_a_prompt_that_is_there_already_is_told_whole():
    ids = prompt(1, 23)
    async with Pair(prefill={"step_tokens": 64}).running() as pair:
        pair.steps.free()
        await served(pair, ids)
        full = ids[:20]
        chunks = [chunk async for chunk in pair.prefill.engine.generate(offering(full))]
        assert [chunk.finish for chunk in chunks] == [FinishReason.HANDED_OFF]
        assert chunks[0].hand_off is not None
        assert chunks[0].hand_off.progress_url is None


async def test_a_preempted_prompt_is_withdrawn_so_that_its_pins_block_nobody():
    ids, other = prompt(1, 47), prompt(2, 20)
    async with Pair(prefill={"blocks": 16}).running() as pair, asyncio.TaskGroup() as tasks:
        urgent = request(other, 24)
        background = offering(ids, priority="background")
        prefilling = pair.prefill.engine.generate(background)
        hand_off = await pair.offered(prefilling)
        decoding = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
        pair.steps.go_on.release()
        await until(lambda: pair.link.read_bytes == 2 * BLOCK_BYTES)
        running = tasks.create_task(pair.prefill.generate(urgent))
        pair.steps.free()
        finishes = [chunk.finish async for chunk in prefilling]
        assert finishes == [FinishReason.CANCELLED]
        assert (await decoding).ids == await alone(ids)
        assert pair.decode.engine.counters().hand_off_failures == {"withdrawn": 1}
        assert pair.prefill.engine.counters().preemptions
        await running
        await pair.prefill.engine.release(hand_off.ticket)
        pair.assert_nothing_left()


@pytest.mark.parametrize("breaks", [1, 3, 50])
async def test_a_connection_that_breaks_goes_on_where_it_was(breaks):
    ids = prompt(1, 47)
    async with Pair().running() as pair:
        pair.progress.breaks = breaks
        _, answer = await served(pair, ids)
        assert answer.ids == await alone(ids)
        assert answer.usage.hand_off_bytes == 12 * BLOCK_BYTES
        assert answer.usage.hand_off_failure is None
        assert pair.progress.opened == sorted(pair.progress.opened)
        pair.assert_nothing_left()


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({"epoch": 99}, "region_gone"),
        ({"first": 1}, "malformed"),
        ({"end": "failed"}, "failed"),
        ({"end": "withdrawn"}, "withdrawn"),
    ],
)
async def test_progress_that_makes_no_sense_ends_the_hand_off_by_its_reason(update, reason):
    ids = prompt(1, 23)
    async with Pair().running() as pair:
        pair.progress.change = lambda line: line.model_copy(update=update)
        _, answer = await served(pair, ids)
        assert answer.ids == await alone(ids)
        assert pair.decode.engine.counters().hand_off_failures == {reason: 1}
        pair.assert_nothing_left()


@pytest.mark.parametrize("changed", [{"offset": 2**40}, {"group": 1}, {"tags": ("00", "00")}])
async def test_a_malformed_part_is_a_failure_and_no_crash(changed):
    ids = prompt(1, 23)

    def change(line: HandOffProgress) -> HandOffProgress:
        parts = tuple(part.model_copy(update=changed) for part in line.parts)
        return line.model_copy(update={"parts": parts})

    async with Pair().running() as pair:
        pair.progress.change = change
        _, answer = await served(pair, ids)
        assert answer.ids == await alone(ids)
        assert pair.decode.engine.counters().hand_off_failures.total() == 1
        pair.assert_nothing_left()


async def test_another_prompts_hand_off_gives_nothing():
    ids = prompt(1, 23)
    async with Pair().running() as pair, asyncio.TaskGroup() as tasks:
        prefilling = pair.prefill.engine.generate(offering(prompt(2, 23)))
        hand_off = await pair.offered(prefilling)
        decoding = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
        pair.steps.free()
        _ = [chunk async for chunk in prefilling]
        answer = await decoding
        assert answer.ids == await alone(ids)
        assert answer.usage.hand_off_tokens == 0
        assert pair.decode.engine.counters().hand_off_failures == {"corrupt": 1}


async def test_a_failed_step_leaves_nothing_of_the_hand_off_in_use():
    ids = prompt(1, 47)
    steps = Steps()

    def before_step(plan: StepPlan) -> None:
        steps.before_step(plan)
        if any(row.start >= 16 for row in plan.rows):
            raise RuntimeError("the third step breaks")

    async with Pair(prefill={"before_step": before_step}).running() as pair:
        pair.steps = steps
        prefilling = pair.prefill.engine.generate(offering(ids))
        async with asyncio.TaskGroup() as tasks:
            hand_off = await pair.offered(prefilling)
            decoding = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
            steps.free()
            with pytest.raises(KimistackError):
                _ = [chunk async for chunk in prefilling]
            answer = await decoding
        assert answer.ids == await alone(ids)
        assert answer.usage.hand_off_tokens == 0
        assert pair.decode.engine.counters().hand_off_failures == {"failed": 1}
        pair.assert_nothing_left()


CHAOS = st.fixed_dictionaries(
    {name: st.sampled_from([0.0, 0.2]) for name in ("duplicate", "rehome", "delay")}
    | {name: st.sampled_from([0.0, 0.1]) for name in ("drop", "stall")}
    | {"corrupt": st.sampled_from([0.0, 0.2])}
)


@settings(max_examples=40, deadline=None)
@given(
    chaos=CHAOS,
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    breaks=st.integers(0, 4),
)
def test_a_bad_link_never_yields_other_ids(chaos, seed, sizes, breaks):
    async def check() -> None:
        plan = ChaosPlan(seed=seed, delay_s=0.001, **chaos)
        async with Pair(plan, deadline_s=0.05).running() as pair:
            pair.steps.free()
            pair.progress.breaks = breaks
            works = [prompt(0, 12)[:size] + prompt(size, max(0, size - 12)) for size in sizes]
            answers = await asyncio.gather(*(served(pair, ids) for ids in works))
            for ids, (_, answer) in zip(works, answers, strict=True):
                assert answer.ids == await alone(ids)
            pair.prefill.assert_all_free()
            pair.decode.engine.check_integrity()

    asyncio.run(check())


class Scene:
    """One streamed hand-off, stopped at a moment: how many steps were computed and read."""

    def __init__(self, pair: Pair, ids: list[int]) -> None:
        self.pair, self.ids = pair, ids
        self.prefilling = pair.prefill.engine.generate(offering(ids))
        self.hand_off: HandOff | None = None

    async def leave_prefill(self) -> None:
        """The router closes the prefill's leg, as it does when the client has gone."""
        self.prefill.cancel()
        await asyncio.wait([self.prefill])

    async def leave_decode(self) -> None:
        """The router closes the decode's leg."""
        self.decode.cancel()
        await asyncio.wait([self.decode])

    async def leave_both(self) -> None:
        """The client has gone."""
        await self.leave_decode()
        await self.leave_prefill()

    async def release(self) -> None:
        """Somebody gives the ticket back."""
        assert self.hand_off is not None
        await self.pair.prefill.engine.release(self.hand_off.ticket)

    async def kill_prefill(self) -> None:
        """Nothing of the prefill's worker is heard, and its memory can't be read any more."""
        self.pair.progress.lost = True
        transport = self.pair._prefill_setup.transport
        assert transport is not None
        await transport.aclose()
        await self.leave_prefill()

    async def drain_prefill(self) -> None:
        """The prefill's worker has to stop."""
        await self.pair.prefill.engine.drain(within_s=0.0)

    async def drain_decode(self) -> None:
        """The decode's worker has to stop."""
        await self.pair.decode.engine.drain(within_s=0.0)

    async def run(self, tasks: asyncio.TaskGroup, steps: int, event: str) -> Answer | None:
        """Come to the moment, let the event happen, go on to the end."""
        self.hand_off = await self.pair.offered(self.prefilling)
        self.prefill = tasks.create_task(self._drained(self.prefilling))
        decoding = self.pair.decode.generate(taking(self.ids, self.hand_off))
        self.decode = tasks.create_task(self._answered(decoding))
        await until(lambda: bool(self.pair.progress.opened))
        for step in range(1, steps + 1):
            self.pair.steps.go_on.release()
            moved = min(step * 2, 6) * BLOCK_BYTES
            await until(lambda moved=moved: self.pair.link.read_bytes == moved)
        await getattr(self, event)()
        self.pair.steps.free()
        await asyncio.wait([self.prefill, self.decode])
        return None if self.decode.cancelled() else self.decode.result()

    async def _drained(self, chunks: AsyncGenerator[GenerateChunk, None]) -> None:
        async with aclosing(chunks):
            async for _ in chunks:
                pass

    async def _answered(self, answer: "asyncio.Future[Answer]") -> Answer:
        return await answer


EVENTS = [
    "leave_prefill",
    "leave_decode",
    "leave_both",
    "release",
    "kill_prefill",
    "drain_prefill",
    "drain_decode",
]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("event", EVENTS)
async def test_whoever_leaves_at_whatever_step_frees_both_sides(event, steps):
    ids = prompt(1, 23)
    async with Pair().running() as pair, asyncio.TaskGroup() as tasks:
        scene = Scene(pair, ids)
        answer = await scene.run(tasks, steps, event)
        if answer is not None and answer.finish is not FinishReason.CANCELLED:
            assert answer.ids == await alone(ids)
        await scene.release()
        await pair.settled()


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_deadline_at_whatever_step_frees_both_sides(side, steps):
    ids = prompt(1, 23)
    short = {"deadline_ms": 1000}
    async with Pair().running() as pair:
        offer = offering(ids, **(short if side == "prefill" else {}))
        prefilling = pair.prefill.engine.generate(offer)
        hand_off = await pair.offered(prefilling)
        decoding = pair.decode.engine.generate(
            taking(ids, hand_off, **(short if side == "decode" else {}))
        )

        async def all_of(chunks: AsyncGenerator[GenerateChunk, None]) -> list[int]:
            async with aclosing(chunks):
                return [number async for chunk in chunks for number in chunk.ids]

        both = asyncio.gather(all_of(prefilling), all_of(decoding), return_exceptions=True)
        for step in range(1, steps + 1):
            pair.steps.go_on.release()
            await until(lambda step=step: pair.link.read_bytes == step * 2 * BLOCK_BYTES)
        ended = pair.prefill if side == "prefill" else pair.decode
        await until(lambda: ended.engine.counters().finished["late"] == 1)
        pair.steps.free()
        results = await both
        late, other = results if side == "prefill" else results[::-1]
        assert isinstance(late, DeadlineExceeded)
        assert other == (await alone(ids) if side == "prefill" else [])
        await pair.prefill.engine.release(hand_off.ticket)
        await pair.settled()


async def test_the_lease_begins_with_the_end_of_the_prompt():
    ids = prompt(1, 23)
    async with Pair(prefill={"lease_s": 0.05}).running() as pair:
        prefilling = pair.prefill.engine.generate(offering(ids))
        hand_off = await pair.offered(prefilling)
        await asyncio.sleep(0.1)
        assert not pair.prefill.engine.counters().hand_offs_expired
        pair.steps.free()
        _ = [chunk async for chunk in prefilling]
        await until(lambda: pair.prefill.engine.counters().hand_offs_expired == 1)
        answer = await pair.decode.generate(taking(ids, hand_off))
        assert answer.ids == await alone(ids)
        assert pair.decode.engine.counters().hand_off_failures == {"region_gone": 1}
        pair.assert_nothing_left()


async def test_a_reader_without_room_computes_and_the_prefill_ends():
    ids = prompt(1, 23)
    async with Pair(blocks=16, deadline_s=0.05).running() as pair, asyncio.TaskGroup() as tasks:
        pinned = (
            await pair.decode.generate(request(prompt(2, 56), kv=KvPlan(offer=True)))
        ).hand_off
        prefilling = pair.prefill.engine.generate(offering(ids))
        hand_off = (await pair.offered(prefilling)).model_copy(update={"lease_s": 0.15})
        decoding = tasks.create_task(pair.decode.generate(taking(ids, hand_off)))
        await until(lambda: bool(pair.decode.engine.counters().hand_off_failures))
        assert pair.decode.engine.counters().hand_off_failures == {"no_room": 1}
        await pair.prefill.engine.release(hand_off.ticket)
        pair.steps.free()
        assert [chunk.finish async for chunk in prefilling] == [FinishReason.CANCELLED]
        assert await pair.decode.engine.release(pinned.ticket)
        assert (await decoding).ids == await alone(ids)
        pair.assert_nothing_left()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
async def test_it_works_over_every_transport(kind, tmp_path):
    def link(name: str) -> Transport:
        return ShmTransport(name) if kind == "shm" else TcpTransport(name, NetworkSettings((KEY,)))

    ids = prompt(1, 47)
    links = link("p"), link("d")
    async with Pair(links=links, folder=tmp_path).running() as pair:
        _, answer = await served(pair, ids)
        assert answer.ids == await alone(ids)
        assert answer.usage.hand_off_bytes == 12 * BLOCK_BYTES
        pair.assert_nothing_left()
    for one in links:
        await one.aclose()


async def test_an_unknown_ticket_is_not_followed():
    async with Pair().running() as pair:
        pair.steps.free()
        with pytest.raises(NotFound):
            _ = [line async for line in pair.prefill.engine.progress("p.1", 0)]
        began_s = clock.now_s()
        ids = prompt(1, 23)
        hand_off = (await pair.prefill.generate(request(ids, kv=KvPlan(offer=True)))).hand_off
        stale = hand_off.model_copy(update={"progress_url": "p.1", "blocks": ()})
        answer = await pair.decode.generate(taking(ids, stale))
        assert answer.ids == await alone(ids)
        assert pair.decode.engine.counters().hand_off_failures == {"region_gone": 1}
        assert clock.now_s() - began_s < 20
