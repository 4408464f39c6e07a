"""Pages that are given to other blocks while a client reads those it found in them.

Whatever way a client reads, it gets its blocks' bytes or is told that it has not got them.
"""

import asyncio
import threading

import pytest

from kimi_connect.client import ArenaClient
from kimi_connect.small_puts import SmallBlock
from kimi_connect.wire import GroupTag, Outcome, Priority
from kimi_runtime.umbp import client as async_client
from kimi_runtime.umbp import loading, tags
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.putting import put
from pool_daemon import CALL_KEY, blocks_of, keys_of, pool_spec, targets

SOON_S = 20.0
COUNT = 6
SMALL, LARGE = 10_000, 300_000
"""Copied on the event loop, all blocks together; in a thread, each in two pieces."""


class Rewriter:
    """A leaf function that has all pages rewritten at its `moment`-th call.

    Every block that may go is evicted, then other blocks take all pages; with `again`, the evicted
    ones come back elsewhere. `lapse` ends all pins before.
    """

    def __init__(self, daemon, size, *, moment=0, lapse=False, again=False):
        self.daemon, self.size, self.lapse, self.again = daemon, size, lapse, again
        self.done = False
        self._calls_left = moment
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()

    def __call__(self, view):
        self._calls_left -= 1
        if self._calls_left == -1:
            self._rewrite_on_the_loop()
        return tags.leaves(view)

    def _rewrite_on_the_loop(self):
        if threading.get_ident() == self._loop_thread:
            self._rewrite()
            return
        rewritten = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (self._rewrite(), rewritten.set()))
        assert rewritten.wait(SOON_S)

    def _rewrite(self):
        pool = self.daemon.clients.pool
        if self.lapse:
            pool.expire(1e12)
        self.daemon.tier.evict(pool.live_blocks)
        self._put(keys_of(pool.free_pages * pool.page_bytes // self.size, start=1000))
        if self.again:
            self._put(keys_of(COUNT))
        self.done = True

    def _put(self, keys):
        made = [
            SmallBlock(key, (GroupTag(self.size, tags.tag(key, 0, block)),), block)
            for key, block in zip(keys, blocks_of(keys, self.size), strict=True)
        ]
        pool, arena = self.daemon.clients.pool, self.daemon.tier.arena
        put(pool, arena, made, tenant="default", priority=Priority.NORMAL, now_s=0.0)


@pytest.fixture(params=[SMALL, LARGE])
def size(request):
    return request.param


@pytest.fixture
async def daemon(tmp_path, size):
    async with running(pool_spec(tmp_path, dram_bytes=(COUNT + 2) * (size + 4096))) as made:
        yield made
        made.clients.pool.check_integrity()


class Blocking:
    """What a blocking client gets."""

    def __init__(self, daemon, size, threads=1):
        self._size = size
        self._client = ArenaClient(
            daemon.spec.socket, CALL_KEY, leaves=lambda view: self.leaves(view), threads=threads
        )
        self.leaves = tags.leaves

    async def store(self, keys):
        blocks = blocks_of(keys, self._size)
        stored = await asyncio.to_thread(self._client.store, keys, blocks, deadline_s=SOON_S)
        assert stored == len(keys)

    def ask_for_all(self):
        """Read nothing by the arena's directory."""
        self._client._daemon.arena = None

    async def load(self, keys):
        into = targets(len(keys), self._size)
        got = await asyncio.to_thread(self._client.load, keys, into, deadline_s=SOON_S)
        return [bytes(view) for view in into[: got[0]]], got[1]

    async def lend(self, keys):
        lent = await asyncio.to_thread(self._client.lend, keys, deadline_s=SOON_S)
        seen = [b"".join(parts) for parts in lent.parts]
        return seen, await asyncio.to_thread(lent.give_back)

    async def close(self):
        await asyncio.to_thread(self._client.close)


class OnTheLoop(Blocking):
    """What the runtime's client gets."""

    def __init__(self, client, size):
        self._client, self._size = client, size

    async def store(self, keys):
        blocks = blocks_of(keys, self._size)
        assert await self._client.store(keys, blocks, deadline_s=SOON_S) == len(keys)

    async def load(self, keys):
        into = targets(len(keys), self._size)
        got = await self._client.load(keys, into, deadline_s=SOON_S)
        return [bytes(view) for view in into[: got.blocks]], got.outcome

    async def lend(self, keys):
        lent = await self._client.lend(keys, deadline_s=SOON_S)
        seen = [b"".join(parts) for parts in lent.parts]
        return seen, await lent.give_back()

    async def close(self):
        await self._client.aclose()


@pytest.fixture(params=["blocking", "two threads", "on the loop"])
async def reader(request, daemon, size, monkeypatch):
    if request.param == "on the loop":
        client = await open_pool(daemon.spec.socket, CALL_KEY, connect_s=SOON_S)
        made = OnTheLoop(client, size)
        made.leaves = tags.leaves
        for module in (loading, async_client):
            monkeypatch.setattr(module, "leaves", lambda view: made.leaves(view))
    else:
        made = Blocking(daemon, size, threads=1 + (request.param == "two threads"))
    await made.store(keys_of(COUNT))
    yield made
    await made.close()


def of_keys(keys, size):
    return [bytes(block) for block in blocks_of(keys, size)]


@pytest.mark.parametrize("moment", [0, 1, COUNT - 1])
async def test_blocks_found_in_the_directory_are_missed_when_their_pages_are_rewritten(
    daemon, reader, size, moment
):
    keys = keys_of(COUNT)
    reader.leaves = rewriter = Rewriter(daemon, size, moment=moment)
    got, outcome = await reader.load(keys)
    # of two threads one may have read its whole share before
    assert got == of_keys(keys[: len(got)], size)
    assert (len(got) < COUNT, outcome) == (True, Outcome.MISS)
    assert rewriter.done


async def test_blocks_that_moved_while_they_were_copied_are_read_where_they_are_now(
    daemon, reader, size
):
    keys = keys_of(COUNT)
    reader.leaves = rewriter = Rewriter(daemon, size, again=True)
    assert await reader.load(keys) == (of_keys(keys, size), Outcome.HIT)
    assert rewriter.done


@pytest.mark.parametrize("moment", [0, 1, COUNT - 1])
async def test_pages_of_pinned_blocks_are_not_rewritten(daemon, reader, size, moment):
    keys = keys_of(COUNT)
    reader.ask_for_all()
    reader.leaves = rewriter = Rewriter(daemon, size, moment=moment)
    assert await reader.load(keys) == (of_keys(keys, size), Outcome.HIT)
    assert rewriter.done


@pytest.mark.parametrize("moment", [0, 1, COUNT - 1])
async def test_nothing_is_got_by_a_pin_that_lapsed_before_the_pages_were_rewritten(
    daemon, reader, size, moment
):
    reader.ask_for_all()
    reader.leaves = rewriter = Rewriter(daemon, size, moment=moment, lapse=True)
    assert await reader.load(keys_of(COUNT)) == ([], Outcome.LATE)
    assert rewriter.done


async def test_pages_of_lent_blocks_are_not_rewritten(daemon, reader, size):
    keys = keys_of(COUNT)
    reader.leaves = rewriter = Rewriter(daemon, size)
    assert await reader.lend(keys) == (of_keys(keys, size), True)
    assert rewriter.done


async def test_what_was_lent_by_a_pin_that_lapsed_is_said_to_be_no_content(daemon, reader, size):
    reader.leaves = rewriter = Rewriter(daemon, size, lapse=True)
    seen, held = await reader.lend(keys_of(COUNT))
    assert len(seen) < COUNT  # others' bytes don't pass for these blocks'
    assert not held
    assert rewriter.done
