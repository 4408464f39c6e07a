"""The daemon's HTTP face, its feed, its files and its start."""

import asyncio
import contextlib
import json
import secrets
import socket
import stat

import aiohttp
import pytest

from kimi_connect.arena import ArenaGone, attach_arena, create_arena
from kimi_connect.wire import HintKind
from kimi_runtime import auth, clock
from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.spec.umbp import FeedBatch, FeedHello, FeedSnapshotPage
from kimi_runtime.umbp.client import open_pool
from kimi_runtime.umbp.daemon import running, serve
from kimi_runtime.umbp.feed import FollowState, decode_line
from kimi_runtime.umbp.funnel import Lost
from kimi_runtime.umbp.index import Index
from pool_daemon import CALL_KEY, blocks_of, keys_of, metrics, pool_spec, targets


@pytest.fixture
async def daemon(tmp_path):
    async with running(pool_spec(tmp_path)) as made:
        yield made


@pytest.fixture
async def http(daemon):
    async with aiohttp.ClientSession(daemon.url) as session:
        yield session


@pytest.fixture
async def pool(daemon):
    client = await open_pool(daemon.spec.socket, CALL_KEY)
    yield client
    await client.aclose()


def signed(path):
    nonce = secrets.token_bytes(16)
    value = auth.sign(CALL_KEY, "GET", path, b"", unix_s=clock.unix_s(), nonce=nonce)
    return {auth.HEADER: value}


@contextlib.asynccontextmanager
async def following(http, path="/feed"):
    """The lines of a feed, one at a time."""
    async with http.get(path, headers=signed(path)) as response:
        assert response.status == 200

        async def line():
            async with asyncio.timeout(20):
                return decode_line(await response.content.readline())

        yield line


async def test_health_and_readiness_need_no_signature(http):
    for path in ("/healthz", "/readyz", "/metrics"):
        async with http.get(path) as response:
            assert response.status == 200
    async with http.get("/readyz") as response:
        ready = await response.json()
        assert ready["free_bytes"] == ready["total_bytes"]
        assert 0.9 < ready["total_bytes"] / (1 << 20) <= 1.0  # its directory takes a part


@pytest.mark.parametrize("headers", [{}, {auth.HEADER: "v1 1 00 ff"}], ids=["none", "bad"])
async def test_the_feed_refuses_who_is_not_authenticated(http, headers):
    async with http.get("/feed", headers=headers) as response:
        assert response.status == 401
        assert (await response.json())["error"]["type"] == "authentication_error"


async def test_a_signature_for_one_target_opens_no_other(http):
    async with http.get("/feed?after=1", headers=signed("/feed")) as response:
        assert response.status == 401


async def test_a_feed_position_that_is_no_number_is_a_400_that_names_it(http):
    path = "/feed?epoch=x"
    async with http.get(path, headers=signed(path)) as response:
        assert response.status == 400
        assert "epoch" in (await response.json())["error"]["message"]


async def post(http, path, body):
    nonce = secrets.token_bytes(16)
    data = json.dumps(body).encode()
    value = auth.sign(CALL_KEY, "POST", path, data, unix_s=clock.unix_s(), nonce=nonce)
    async with http.post(path, data=data, headers={auth.HEADER: value}) as response:
        return response.status, await response.json(), value, data


async def test_a_router_s_hint_decides_which_blocks_go_first(daemon, http, pool):
    one, two = keys_of(3), keys_of(3, 10)
    await pool.store(one, blocks_of(one), deadline_s=5.0)
    await pool.store(two, blocks_of(two), deadline_s=5.0)
    told = {"session": "ab" * 16, "keys": [key.hex() for key in two], "kind": "paused"}
    assert (await post(http, "/hint", told | {"expected": "20s"}))[:2] == (200, {"blocks": 3})
    assert (await post(http, "/hint", {"session": "ab" * 16, "kind": "ended"}))[0] == 200
    assert daemon.tier.evict(3) == two[::-1]
    counted = await metrics(http)
    assert counted["kimistack_umbp_hints_total", "ended"] == 1


async def test_a_worker_s_hint_does_too(daemon, pool):
    one, two = keys_of(3), keys_of(3, 10)
    await pool.store(one, blocks_of(one), deadline_s=5.0)
    await pool.store(two, blocks_of(two), deadline_s=5.0)
    pool.hint(b"s" * 16, HintKind.ACTIVE, two)
    pool.hint(b"s" * 16, HintKind.COMPACTED, two[1:])
    await pool.held(one)  # answered after what was told
    assert daemon.tier.evict(2) == two[:0:-1]


@pytest.mark.parametrize(
    "body",
    [
        {"session": "ab", "kind": "ended"},
        {"session": "ab" * 16, "kind": "asleep"},
        {"session": "ab" * 16, "kind": "forked"},
    ],
)
async def test_a_hint_that_says_nothing_is_a_400(http, body):
    assert (await post(http, "/hint", body))[0] == 400


async def test_tenants_are_told_apart_by_the_put(tmp_path):
    spec = pool_spec(tmp_path, tenants={"small": {"quota": "40KiB"}})
    async with running(spec) as daemon, aiohttp.ClientSession(daemon.url) as http:
        client = await open_pool(spec.socket, CALL_KEY)
        keys = keys_of(5)
        stored = await client.store(keys, blocks_of(keys), deadline_s=5.0, tenant="small")
        assert stored == 3  # of three pages each
        assert await client.store(keys[3:], blocks_of(keys[3:]), deadline_s=5.0, tenant="big") == 2
        counted = await metrics(http)
        pages = {name: counted["kimistack_umbp_tenant_pages", name] for name in ("small", "big")}
        assert pages == {"small": 9, "big": 6}
        assert counted["kimistack_umbp_over_quota_blocks_total",] == 1
        await client.aclose()


async def test_a_new_block_is_published_within_50_ms(daemon, http, pool):
    keys = keys_of(1)
    async with following(http) as line:
        assert isinstance(await line(), FeedHello)
        assert isinstance(await line(), FeedSnapshotPage)
        waits_s = []
        for n in range(5):
            keys = keys_of(3, 10 * n)
            await pool.store(keys, blocks_of(keys), deadline_s=5.0)
            start_s = clock.now_s()
            batch = await line()
            while isinstance(batch, FeedBatch) and not batch.events:
                batch = await line()
            waits_s.append(clock.now_s() - start_s)
            assert [event.key for event in batch.events] == [key.hex() for key in keys[::-1]]
    assert min(waits_s) < 0.05  # the best of five: this machine may be busy


async def test_a_follower_s_index_is_exact_over_reconnects_evictions_and_restarts(
    daemon, http, pool
):
    index, keys = Index(), keys_of(50)

    async def follow_until(state):
        epoch, after = index.resume_point("pool")
        path = "/feed" if epoch is None else f"/feed?epoch={epoch}&after={after}"
        async with following(http, path) as line:
            assert index.apply("pool", await line())
            while not state():
                assert index.apply("pool", await line())
        index.disconnected("pool")

    await pool.store(keys, blocks_of(keys), deadline_s=5.0)
    await follow_until(lambda: index.prefix_runs(keys) == {"pool": 50})
    daemon.tier.evict(10)
    await follow_until(lambda: index.prefix_runs(keys) == {"pool": 40})
    daemon.clients.pool.clear()
    await follow_until(lambda: index.prefix_runs(keys) == {})
    assert index.state("pool") is FollowState.DEGRADED  # disconnected by now


async def test_memory_above_the_high_watermark_is_evicted_from_beside_requests(tmp_path):
    spec = pool_spec(tmp_path, evict_above=0.8, evict_to=0.5, pin_lease=0.2)
    async with running(spec) as daemon:
        client = await open_pool(spec.socket, CALL_KEY)
        total = daemon.clients.pool.total_pages
        keys = keys_of(total // 3)
        stored = await client.store(keys, blocks_of(keys), deadline_s=5.0)
        assert stored == len(keys)
        async with asyncio.timeout(10):
            while daemon.clients.pool.free_pages + 3 * daemon.clients.pool.stocks < total / 2:
                await asyncio.sleep(0.01)
        assert await client.held(keys) == total // 2 // 3
        await client.aclose()


async def test_no_generation_of_a_new_arena_was_one_of_the_arena_before(tmp_path):
    """A client that wrote to that one may give its pages back only now."""
    async with running(pool_spec(tmp_path)) as daemon:
        client = await open_pool(daemon.spec.socket, CALL_KEY)
        assert await client.store(keys_of(3), blocks_of(keys_of(3)), deadline_s=5.0) == 3
        await client.aclose()
        before = daemon.clients.pool.number
    async with running(pool_spec(tmp_path, dram_bytes="2MiB")) as daemon:
        assert daemon.clients.pool.live_blocks == 0
        assert daemon.clients.pool.number > before


async def test_a_quiet_feed_sends_heartbeats(http):
    async with following(http) as line:
        await line()
        await line()
        heartbeat = await line()
    assert isinstance(heartbeat, FeedBatch)
    assert heartbeat.events == ()


async def test_metrics_tell_every_lost_block_s_reason_and_balance(daemon, http, pool):
    keys = keys_of(4)
    await pool.store(keys, blocks_of(keys), deadline_s=5.0)
    daemon.tier.evict(1)
    await pool.load(keys, targets(4), deadline_s=5.0)
    await pool.load(keys_of(2, 99), targets(2), deadline_s=5.0)
    seen = await metrics(http)
    lost = {key[1]: value for key, value in seen.items() if "lost_blocks_total" in key[0]}
    assert lost == dict.fromkeys(Lost, 0) | {Lost.NOT_COMPUTED: 2, Lost.EVICTED: 1}
    put = seen["kimistack_umbp_ended_reservations_total", "committed"]
    gone = seen[("kimistack_umbp_evicted_blocks_total",)]
    assert put == seen[("kimistack_umbp_blocks",)] + gone == 4
    assert seen["kimistack_umbp_hit_blocks_total", "memory"] == 3
    assert seen[("kimistack_umbp_looked_up_blocks_total",)] == 6
    assert seen[("kimistack_umbp_clients",)] == 1


async def test_what_a_client_lost_without_the_daemon_is_reported_when_it_is_back(tmp_path, daemon):
    client = await open_pool(tmp_path / "later.sock", CALL_KEY)
    await client.load(keys_of(3), targets(3), deadline_s=1.0)
    (tmp_path / "later.sock").symlink_to(daemon.spec.socket)
    async with asyncio.timeout(20):
        lost = daemon.clients.pool.funnel.lost
        while not lost[Lost.UNAVAILABLE]:
            await client.load(keys_of(1), targets(1), deadline_s=1.0)
            await asyncio.sleep(0.01)
    assert lost.total() == sum(client.blocks.values())
    await client.aclose()


async def test_files_are_private_and_gone_after_a_stop(tmp_path):
    spec = pool_spec(tmp_path)
    async with running(spec):
        assert stat.S_IMODE(spec.arena.stat().st_mode) == 0o600
        assert stat.S_IMODE(spec.socket.stat().st_mode) == 0o600
    assert not spec.arena.exists()
    assert not spec.socket.exists()


async def test_a_new_arena_never_trusts_an_old_mapping(tmp_path):
    path = str(tmp_path / "arena")
    old = create_arena(path, page_bytes=4096, pages=4, epoch=7)
    mapped = attach_arena(path, page_bytes=4096, pages=4, epoch=7)
    assert mapped.live
    new = create_arena(path, page_bytes=4096, pages=4, epoch=8)
    assert (old.live, mapped.live, new.live) == (False, False, True)
    with pytest.raises(ArenaGone, match="epoch 7"):
        attach_arena(path, page_bytes=4096, pages=4, epoch=7)
    with pytest.raises(ArenaGone):
        attach_arena(path, page_bytes=4096, pages=99, epoch=8)
    for arena in (old, mapped, new):
        arena.close()


async def test_every_start_has_a_later_epoch(tmp_path):
    spec, epochs = pool_spec(tmp_path), []
    for _ in range(3):
        async with running(spec) as daemon:
            epochs.append(daemon.tier.arena.epoch)
    assert epochs == sorted(set(epochs))


async def test_a_second_daemon_on_the_same_arena_is_refused(daemon):
    with pytest.raises(ConfigError, match="another daemon"):
        await serve(daemon.spec)


async def test_a_port_in_use_is_a_config_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="can't be listened on"):
            await serve(pool_spec(tmp_path, port=taken.getsockname()[1]))
    assert not (tmp_path / "arena").exists()


async def test_what_listens_on_the_socket_is_not_replaced_but_what_is_dead_is(tmp_path):
    spec = pool_spec(tmp_path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(spec.socket))
        other.listen()
        with pytest.raises(ConfigError, match="another process listens"):
            await serve(spec)
    async with running(spec):
        pass
    spec.socket.write_text("a file")
    with pytest.raises(ConfigError, match="no socket"):
        await serve(spec)
    assert spec.socket.read_text() == "a file"


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"page_bytes": 5000}, ConfigError, "power of two"),
        ({"page_bytes": 256}, ConfigError, "at least"),
        ({"dram_bytes": 100}, ConfigError, "no page"),
        ({"dram_bytes": "4096TiB"}, CapacityError, "lower dram_bytes"),
        ({"socket": "/tmp/" + "x" * 110}, ConfigError, "shorter"),
        ({"call_key": "/nowhere/key"}, ConfigError, "can't be|cannot be read"),
    ],
    ids=["page size", "small page", "no page", "too large", "long socket", "no key"],
)
async def test_a_spec_that_can_t_work_says_what_to_change(tmp_path, changes, error, says):
    with pytest.raises(error, match=says):
        await serve(pool_spec(tmp_path, **changes))
    assert not (tmp_path / "arena").exists()


async def test_serve_runs_until_it_is_cancelled(tmp_path):
    spec = pool_spec(tmp_path)
    serving = asyncio.gather(serve(spec))
    async with asyncio.timeout(20):
        while not spec.socket.exists():
            await asyncio.sleep(0.01)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert not spec.socket.exists()


async def test_followers_do_not_delay_a_stop(tmp_path):
    spec = pool_spec(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(running(spec))
        async with aiohttp.ClientSession(daemon.url) as http, following(http) as line:
            await line()
            start_s = clock.now_s()
            await stack.aclose()
            assert clock.now_s() - start_s < 1.5
