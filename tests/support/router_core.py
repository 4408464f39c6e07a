"""A router's deciding parts without its sockets: feeds, fleet, ledger, insight and decisions.

Workers are `Peer`s with a real feed log; tests carry its lines over themselves, and so can lose,
repeat or swap them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kimi_runtime.router.decisions import Decision, Decisions
from kimi_runtime.router.discovery import Fleet, Member
from kimi_runtime.router.follow import Feeds
from kimi_runtime.router.insight import Insight
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.router import Cost, WorkerEndpoint
from kimi_runtime.spec.umbp import FeedBatch
from kimi_runtime.spec.worker import Capabilities, LoadReport, Role, WorkerInfo
from kimi_runtime.umbp.feed import FeedLog

BLOCK, TOTAL = 64, 16_384
SPEC = Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)
NOBODY: Any = None


def keys_of(count: int, start: int = 0) -> list[bytes]:
    """Keys of a prompt's blocks."""
    return [n.to_bytes(16, "big") for n in range(start + 1, start + count + 1)]


def info_of(name: str, *, fetches: bool = False, **fields: Any) -> WorkerInfo:
    """What a worker says it is, changed by `fields`. `fetches`: it reads from whom it is told."""
    usual: dict[str, Any] = {
        "role": Role.BOTH,
        "engine": "kimistack",
        "epoch": 1,
        "revision": "r",
        "model": "m",
        "model_digest": "m",
        "layout": f"fp8/{BLOCK}",
        "vocabulary_digest": "v",
        "block_tokens": BLOCK,
        "block_bytes": BLOCK,
        "max_context_tokens": 262_144,
        "total_blocks": TOTAL,
        "capabilities": Capabilities(
            roles=tuple(Role),
            per_request_roles=True,
            fetch_source=fetches,
            layer_streaming=False,
            mid_decode_move=False,
            grammar=True,
            logprobs=True,
        ),
    }
    return WorkerInfo(name=name, **{**usual, **fields})


class Peer:
    """A worker: its description and its feed."""

    def __init__(self, core: "Core", info: WorkerInfo) -> None:
        self.core, self.info = core, info
        self.member = Member(WorkerEndpoint(name=info.name, role=info.role, url=""), NOBODY)
        self.member.info, self.member.ready = info, True
        self.log = FeedLog(info.name, epoch=info.epoch, tier="hbm", block_tokens=BLOCK)
        self.seq = 0

    def connect(self) -> None:
        """A connection of the feed: hello, and what the follower misses."""
        index, name = self.core.feeds._index, self.info.name
        epoch, after = index.resume_point(name)
        index.disconnected(name)
        assert index.apply(name, self.log.hello())
        if not self.log.resumes(epoch, after):
            for page in self.log.snapshot():
                assert index.apply(name, page)
            return
        batch = self.log.batch_after(after)
        if batch is not None and batch.events:
            assert index.apply(name, batch)

    def batch(self, after: int) -> FeedBatch:
        """The changes after one, as a line."""
        batch = self.log.batch_after(after)
        assert batch is not None
        return batch

    def hear(self, line: Any) -> bool:
        """A line arrives at the router; False: it connects again."""
        return self.core.feeds._index.apply(self.info.name, line)

    def report(self, *, now_s: float = 0.0, **fields: Any) -> None:
        """A load report arrives."""
        self.seq += 1
        usual: dict[str, Any] = {
            "epoch": self.info.epoch,
            "seq": self.seq,
            "waiting": 0,
            "running": 0,
            "queued_tokens": 0,
            "free_blocks": self.info.total_blocks,
            "total_blocks": self.info.total_blocks,
            "draining": False,
            "steps": self.seq,
        }
        report = LoadReport(**{**usual, **fields})
        if self.core.ledger.report(self.info.name, report, now_s=now_s):
            self.core.insight.reported(self.info, report, now_s=now_s)


class Core:
    """What decides, and whom it decides between."""

    def __init__(self, *names: str, spec: Cost = SPEC, **fields: Any) -> None:
        self.policy = CostPolicy(spec)
        self.planner = self.policy.planner
        self.insight = Insight(self.planner, load_interval_s=0.2)
        self.ledger = Ledger("r", stale_after_s=1.0)
        self.feeds = Feeds([], [])
        self.decisions = Decisions(self.policy, self.insight)
        self.peers = {name: Peer(self, info_of(name, **fields)) for name in names}
        self.fleet = Fleet(
            [peer.member for peer in self.peers.values()],
            self.ledger,
            vocabulary_digest="v",
            load_interval_s=0.2,
            changed=lambda: None,
        )
        for peer in self.peers.values():
            peer.report()
            peer.connect()

    def __getitem__(self, name: str) -> Peer:
        return self.peers[name]

    def look(
        self, keys: Sequence[bytes], *, now_s: float = 0.0, **fields: Any
    ) -> tuple[RequestView, list[WorkerView]]:
        """The request and the workers as a decision sees them."""
        fleet = self.fleet
        tokens = max(len(keys) * BLOCK + 100, 200)
        geometries, nodes, _, distinct = fleet.roster
        found = self.feeds.cached_tokens(geometries, dict.fromkeys(distinct, keys), nodes)
        seer = partial(
            self.insight.all_facts, held=self.feeds.held, need_tokens=tokens, now_s=now_s
        )
        views = fleet.views(found.own, found.pooled, seer, now_s=now_s)
        asked = RequestView(prompt_tokens=tokens, max_tokens=512, session=b"session")
        return replace(asked, **fields), views

    def decide(
        self,
        keys: Sequence[bytes] = (),
        *,
        now_s: float = 0.0,
        without: Iterable[str] = (),
        **fields: Any,
    ) -> Decision:
        """A decision of now. `without`: workers that have failed the request."""
        asked, views = self.look(keys, now_s=now_s, **fields)
        left = [view for view in views if view.name not in without]
        return self.decisions.decide("req", asked, left, now_s=now_s)

    def worker(self, keys: Sequence[bytes] = (), **fields: Any) -> str:
        """Who decodes."""
        return self.decide(keys, **fields).plan.decode

    def carry_out(self, name: str, decision: Decision, *, now_s: float = 0.0) -> Any:
        """See `Decisions.course`."""
        return self.decisions.course(name, decision, lambda: now_s)
