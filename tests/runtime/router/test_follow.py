"""What is known of blocks elsewhere, by who could read them."""

import aiohttp

from kimi_connect.states import piece_keys
from kimi_runtime.router.client import PeerClient
from kimi_runtime.router.follow import Feeds
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.umbp.feed import FeedLog

GEOMETRY = Geometry("model", "layout", 64)
KEYS = [bytes([number]) * 16 for number in range(8)]


async def test_a_workers_pool_is_that_of_its_node():
    async with aiohttp.ClientSession() as http:
        workers = [PeerClient(http, name, "http://w", b"k" * 32) for name in ("d1", "d2", "d3")]
        pools = [PeerClient(http, name, "http://p", b"k" * 32) for name in ("node-1", "node-2")]
        feeds = Feeds(workers, pools)
        for owner, held in (("d1", 1), ("node-1", 3), ("node-2", 5)):
            log = FeedLog(owner, epoch=1, tier="dram", block_tokens=64)
            log.add(KEYS[:held])
            for line in (log.hello(), *log.snapshot()):
                assert feeds._index.apply(owner, line)
        geometries = dict.fromkeys(("d1", "d2", "d3", "d4"), GEOMETRY)
        nodes = {"d1": "node-1", "d2": "node-2", "d3": "node-3", "d4": ""}
        own, pooled, found, states = feeds.cached_tokens(geometries, {GEOMETRY: KEYS}, nodes)
        assert {(one.name, one.node, one.tier, one.tokens) for one in found} == {
            ("node-1", "node-1", "dram", 192),
            ("node-2", "node-2", "dram", 320),
        }
        assert states == {}
        assert {one.checkpoints for one in found} == {None}
        assert own == {"d1": 64, "d2": 0, "d3": 0, "d4": 0}
        # no pool runs on the third node; whose node is not known may have any
        assert pooled == {"d1": 192, "d2": 320, "d3": 0, "d4": 320}


async def test_states_are_known_where_all_of_their_pieces_are_behind_blocks_that_are_held():
    async with aiohttp.ClientSession() as http:
        workers = [PeerClient(http, name, "http://w", b"k" * 32) for name in ("d1", "d2")]
        feeds = Feeds(workers, [PeerClient(http, "node-1", "http://p", b"k" * 32)])
        for owner, held, states in (("d1", 2, [0, 1]), ("node-1", 6, [1, 3, 6])):
            log = FeedLog(owner, epoch=1, tier="dram", block_tokens=64)
            log.add(KEYS[:held])
            for number in states:  # the one behind block 3 lacks a piece
                log.add(piece_keys(KEYS[number], 2 if number == 3 else 3))
            for line in (log.hello(), *log.snapshot()):
                assert feeds._index.apply(owner, line)
        geometries = dict.fromkeys(("d1", "d2"), GEOMETRY)
        nodes = dict.fromkeys(("d1", "d2"), "node-1")
        pieces = dict.fromkeys(("d1", "d2"), 3)
        found = feeds.cached_tokens(geometries, {GEOMETRY: KEYS}, nodes, pieces)
        assert found.checkpoints == {"d1": (64, 128), "d2": ()}
        assert [one.checkpoints for one in found.pools] == [(128,)]
        assert found.own == {"d1": 128, "d2": 0}
