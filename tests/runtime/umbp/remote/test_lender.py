"""What an owner lends, to whom and for how long; and who it takes for its peers."""

import asyncio
import json
from contextlib import aclosing

import pytest

from kimi_runtime import clock
from kimi_runtime.errors import ConfigError, PeerGone
from kimi_runtime.spec.peers import GiveBackRequest, LendRequest
from kimi_runtime.spec.ssd import SsdSpec
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.proto import peers_pb2
from kimi_runtime.umbp.remote.calls import OwnerBusy, OwnerCalls, open_http
from kimi_runtime.umbp.remote.lender import PEER_READER
from kimi_runtime.umbp.remote.messages import lend_answer, lent_message
from pool_daemon import CALL_KEY, blocks_of, keys_of, pool_spec
from pool_peers import SOON_S, knows, peer, peer_spec, until


@pytest.fixture
async def owner(tmp_path):
    async with peer(tmp_path, "a") as (daemon, client):
        keys = keys_of(30)
        await client.store(keys, blocks_of(keys), deadline_s=SOON_S)
        yield daemon


@pytest.fixture
async def calls(owner):
    async with open_http() as http:
        made = OwnerCalls(http, "a", owner.url, [CALL_KEY], owner.grpc_port)
        yield made
        await made.aclose()


def asked(owner, keys, **changes):
    fields = {
        "epoch": owner.clients.arena.epoch,
        "keys": tuple(key.hex() for key in keys),
        "max_bytes": 1 << 20,
        "within_ms": 20_000,
    }
    return LendRequest(**(fields | changes))


async def test_what_is_lent_stays_until_it_is_given_back(owner, calls):
    keys, pool = keys_of(3), owner.clients.pool
    answer = await calls.lend(asked(owner, [*keys, *keys_of(1, 900)]), within_s=SOON_S)
    assert (len(answer.blocks), answer.cut) == (3, False)
    assert len(pool.evict(99)) == 27
    back = GiveBackRequest(epoch=answer.epoch, pin=answer.pin)
    assert await calls.give_back(back, within_s=SOON_S)
    assert not await calls.give_back(back, within_s=SOON_S)
    assert len(pool.evict(99)) == 3


async def test_what_is_not_given_back_ends_with_the_time_its_reader_asked_for(owner, calls):
    answer = await calls.lend(asked(owner, keys_of(3), within_ms=30), within_s=SOON_S)
    lender = owner.clients.remote.lender
    assert len(answer.blocks) == 3
    await until(lambda: lender.ends["lapsed"] == 1)
    assert owner.clients.pool.open_pins == 0


async def test_a_piece_is_as_large_as_its_reader_says_and_says_that_it_was_cut(owner, calls):
    answer = await calls.lend(asked(owner, keys_of(9), max_bytes=3 * 12_288), within_s=SOON_S)
    assert (len(answer.blocks), answer.cut) == (3, True)
    assert not (await calls.lend(asked(owner, keys_of(1), max_bytes=9_999), within_s=1.0)).blocks


async def test_at_most_a_part_of_the_arena_is_lent_at_a_time(owner, calls):
    keys, lender = keys_of(30), owner.clients.remote.lender
    answers = [await calls.lend(asked(owner, keys[n : n + 10]), within_s=9.0) for n in (0, 10, 20)]
    assert [len(answer.blocks) for answer in answers] == [10, 9, 1]
    assert lender.lent_pages - 3 < owner.clients.pool.total_pages / 4 <= lender.lent_pages
    with pytest.raises(OwnerBusy):
        await calls.lend(asked(owner, keys[20:]), within_s=1.0)
    assert lender.refused == 1
    back = GiveBackRequest(epoch=answers[0].epoch, pin=answers[0].pin)
    await calls.give_back(back, within_s=1.0)
    assert (await calls.lend(asked(owner, keys[20:]), within_s=1.0)).blocks


async def test_another_epoch_s_request_gets_nothing(owner, calls):
    epoch = owner.clients.arena.epoch
    answer = await calls.lend(asked(owner, keys_of(3), epoch=epoch - 1), within_s=1.0)
    assert (answer.epoch, answer.blocks) == (epoch, ())
    real = await calls.lend(asked(owner, keys_of(3)), within_s=1.0)
    old = GiveBackRequest(epoch=epoch - 1, pin=real.pin)
    assert not await calls.give_back(old, within_s=1.0)
    assert owner.clients.remote.lender.loans == 1


async def test_a_pin_of_an_engine_can_t_be_given_back_by_a_peer(owner, calls):
    pool = owner.clients.pool
    pin = pool.pin(keys_of(2), reader=7, now_s=clock.now_s())
    back = GiveBackRequest(epoch=owner.clients.arena.epoch, pin=pin.number)
    assert not await calls.give_back(back, within_s=1.0)
    assert pool.pinned_blocks(pin.number) == 2
    assert PEER_READER < 0


async def test_a_loan_ends_though_its_reader_leaves_while_its_complaint_is_looked_into(
    owner, calls
):
    lender = owner.clients.remote.lender
    answer = await calls.lend(asked(owner, keys_of(3)), within_s=1.0)
    back = GiveBackRequest(epoch=answer.epoch, pin=answer.pin, corrupt=(0, 1, 2))
    giving = asyncio.gather(lender.give_back(back))
    await asyncio.sleep(0)  # the check has begun
    giving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await giving
    await until(lambda: lender.loans == 0)
    assert (lender.lent_pages, owner.clients.pool.open_pins) == (0, 0)


async def test_a_block_that_is_intact_at_home_outlives_a_peer_s_complaint(owner, calls):
    keys = keys_of(3)
    answer = await calls.lend(asked(owner, keys), within_s=1.0)
    block = owner.clients.pool.block(keys[1])
    next(owner.clients.arena.parts(block.extents, block.size))[5] ^= 8
    back = GiveBackRequest(epoch=answer.epoch, pin=answer.pin, corrupt=(0, 1, 77))
    assert await calls.give_back(back, within_s=SOON_S)
    assert [owner.clients.pool.held([key]) for key in keys] == [1, 0, 1]
    assert owner.clients.remote.lender.damaged == 1


async def test_who_does_not_hold_the_call_key_gets_nothing(owner):
    async with open_http() as http:
        strange = [b"another key of thirty-two bytes."]
        stranger = OwnerCalls(http, "a", owner.url, strange, owner.grpc_port)
        with pytest.raises(PeerGone, match="this deployment's call key"):
            await stranger.lend(asked(owner, keys_of(2)), within_s=1.0)
        await stranger.aclose()
    assert owner.clients.remote.lender.lent_blocks == 0


async def test_an_owner_is_asked_nothing_until_its_feed_has_said_where(owner):
    async with open_http() as http:
        made = OwnerCalls(http, "a", owner.url, [CALL_KEY])
        with pytest.raises(OwnerBusy, match="not said yet"):
            await made.lend(asked(owner, keys_of(2)), within_s=1.0)
        async with aclosing(made.feed(None, 0)) as lines:
            await anext(lines)
        assert len((await made.lend(asked(owner, keys_of(2)), within_s=1.0)).blocks) == 2
        await made.aclose()


async def test_a_daemon_without_peers_lends_nothing(tmp_path):
    async with running(pool_spec(tmp_path)) as daemon, open_http() as http:
        assert daemon.clients.remote is None
        calls = OwnerCalls(http, "a", daemon.url, [CALL_KEY], daemon.grpc_port)
        with pytest.raises(OwnerBusy, match="it has no peers"):
            await calls.lend(asked(daemon, keys_of(1)), within_s=1.0)
        await calls.aclose()


async def test_an_answer_of_a_newer_daemon_is_understood(owner, calls):
    answer = await calls.lend(asked(owner, keys_of(1)), within_s=1.0)
    added_later = bytes([99 << 3 & 0x7F | 0x80, 99 >> 4, 1])  # field 99, a varint
    newer = lent_message(answer).SerializeToString() + added_later
    assert lend_answer(peers_pb2.LendAnswer.FromString(newer)) == answer


async def test_the_list_of_peers_is_followed_as_it_changes(tmp_path, caplog):
    listed = tmp_path / "fleet.json"

    def write(*pools):
        new = tmp_path / "new.json"
        new.write_text(json.dumps({"pools": [{"name": n, "url": u} for n, u in pools]}))
        new.replace(listed)

    write()
    async with peer(tmp_path, "a") as (a, at_a):
        keys = keys_of(2)
        await at_a.store(keys, blocks_of(keys), deadline_s=SOON_S)
        async with peer(tmp_path, "b", peers_file=listed) as (b, _):
            owners = b.clients.remote.owners
            write(("a", a.url), ("b", b.url))  # itself is passed over
            await until(lambda: [owner.name for owner in owners] == ["a"])
            await knows(b, "a", 2)
            assert b.clients.remote.fetcher.run(keys) == 2
            listed.write_text("{")  # half written: nothing changes
            await until(lambda: "peers are as before" in caplog.text)
            assert len(owners) == 1
            write()
            await until(lambda: not len(owners))
            assert b.clients.remote.fetcher.run(keys) == 0


def test_peers_that_contradict_each_other_are_refused(tmp_path):
    one = ("a", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match="one name"):
        peer_spec(tmp_path, "b", [one, one])
    with pytest.raises(ValueError, match="no certificate"):
        peer_spec(tmp_path, "b", [("a", "https://127.0.0.1:1")])
    with pytest.raises(ValueError, match="leave one out"):
        peer_spec(tmp_path, "b", [one], peers_file=tmp_path / "f")
    with pytest.raises(ValueError, match="HTTP face"):
        peer_spec(tmp_path, "b", [one], port=8100, network={"port": 8100})


async def test_a_port_for_transfers_that_is_taken_ends_the_start(owner, tmp_path):
    taken = int(owner.url.rpartition(":")[2])
    ssd = SsdSpec(folder=tmp_path / "ssd", capacity="8MiB", segment="1MiB")
    spec = peer_spec(tmp_path, "b", network={"port": taken}, ssd=ssd)
    with pytest.raises(ConfigError, match="cannot listen"):
        async with running(spec):
            pass
