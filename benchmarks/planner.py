"""How long one routing decision takes: index, views and the cost planner, by number of workers.

    python benchmarks/planner.py [--workers 8 64 512] [--blocks 1000000] [--decisions 400]

Prints one Markdown table. A decision looks up the prompt's 1,109 blocks in an index of `--blocks`
keys, makes a view of every worker as the router does, prices the plans and enters its transfers;
all workers have reported since the one before. The fleet is as busy as coding agents make it, half
of it prefill and half decode workers in the lines that say P/D.
Each decision is planned `--repeats` times: the least of them is what it takes where nobody else has
the processor's caches (and no garbage is collected), the first is what it took here. Those are
processor milliseconds of the one thread. The whole decision is in processor and in wall-clock time,
as `processor / wall`: where the two differ, others had the processor meanwhile. The last column is
of those whole decisions from which nobody took it: whoever does leaves cold caches behind, which
lengthens processor time too.
"""

import argparse
import gc
import hashlib
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from kimi_runtime.router.cost.planner import Planner
from kimi_runtime.router.discovery import Fleet, Member, Seer
from kimi_runtime.router.follow import Feeds
from kimi_runtime.router.insight import Insight
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.router.view import KvSource, RequestView, WorkerView
from kimi_runtime.spec.router import Cost, WorkerEndpoint
from kimi_runtime.spec.umbp import FeedHello, FeedSnapshotPage
from kimi_runtime.spec.worker import Capabilities, LoadReport, Role, WorkerInfo
from worker_views import turn

SPEC = Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)
BLOCK, PROMPT, SHARED, TOTAL_BLOCKS = 64, 71_000, 20_032, 48_000
GEOMETRY = Geometry("kimi-k2.6", "layout", BLOCK)
UNDER_WAY = 8
"""Requests whose transfers have not ended when the next is decided."""
NOBODY: Any = None
"""No worker is asked anything."""
T = TypeVar("T")


def key(owner: int, number: int) -> bytes:
    """Some block's key: as evenly spread as real ones, or the index takes some for others."""
    return hashlib.blake2b(b"%d %d" % (owner, number), digest_size=16).digest()


COMMON = [key(0, number) for number in range(SHARED // BLOCK)]
"""The prefix that every session starts with."""


def filled_feeds(workers: int, blocks: int) -> Feeds:
    """Feeds of workers with `blocks` keys together; each of them holds the common prefix."""
    feeds = Feeds([], [])
    own = max(blocks // workers - len(COMMON), 0)
    for number in range(workers):
        name = f"w{number}"
        keys = COMMON + [key(number + 1, n) for n in range(own)]
        feeds._index.apply(
            name, FeedHello(owner=name, epoch=1, seq=1, tier="hbm", block_tokens=BLOCK)
        )
        page = FeedSnapshotPage(
            epoch=1, seq=1, page=0, last=True, keys=tuple(one.hex() for one in keys)
        )
        feeds._index.apply(name, page)
    return feeds


class State:
    """What a router knows of `workers` at some moment, two a node, in its own objects."""

    def __init__(self, workers: int, feeds: Feeds, planner: Planner, *, pairs: bool) -> None:
        self.feeds, self.planner = feeds, planner
        self.insight = Insight(planner, load_interval_s=0.2)
        self.ledger = Ledger("r", stale_after_s=1e9)
        members = [
            Member(WorkerEndpoint(name=f"w{number}", role=_role(number, pairs), url=""), NOBODY)
            for number in range(workers)
        ]
        self.fleet = Fleet(
            members, self.ledger, vocabulary_digest="", load_interval_s=0.2, changed=lambda: None
        )
        for number, member in enumerate(members):
            member.ready, member.info = True, _info(member.name, number, pairs=pairs)

    def report(self, chance: random.Random, seq: int, *, cold: bool, now_s: float) -> None:
        """A load report of every worker."""
        for member in self.fleet.members:
            running = 0 if cold else chance.randint(0, 24)
            report = LoadReport(
                epoch=1,
                seq=seq,
                waiting=0 if cold else chance.randint(0, 4),
                running=running,
                queued_tokens=0 if cold else chance.randint(0, 60_000),
                free_blocks=TOTAL_BLOCKS - running * 1_100,
                total_blocks=TOTAL_BLOCKS,
                draining=False,
                steps=seq,
            )
            assert member.info is not None
            self.ledger.report(member.name, report, now_s=now_s)
            self.insight.reported(member.info, report, now_s=now_s)
            view = self.fleet.prepare(member.name, self._seer(0, now_s), now_s=now_s)
            if view is not None:
                self.planner.columns.see(view)

    def _seer(self, need_tokens: int, now_s: float) -> Seer:
        """Like the router's."""
        held = self.feeds.held
        return partial(self.insight.all_facts, held=held, need_tokens=need_tokens, now_s=now_s)

    def look(
        self, asked: RequestView, keys: Sequence[bytes], *, now_s: float
    ) -> tuple[RequestView, list[WorkerView]]:
        """What `Router` does before each decision."""
        fleet, insight = self.fleet, self.insight
        geometries, nodes, pieces, _ = fleet.roster
        found = self.feeds.cached_tokens(geometries, {GEOMETRY: keys}, nodes, pieces)
        insight.promised((), found.own, now_s=now_s)
        seer = self._seer(PROMPT, now_s)
        views = fleet.views(
            found.own, found.pooled, seer, now_s=now_s, checkpoints=found.checkpoints
        )
        return insight.request(asked, (), found.own, now_s=now_s), views


def _role(number: int, pairs: bool) -> Role:
    return (Role.DECODE, Role.PREFILL)[number % 2] if pairs else Role.BOTH


def _info(name: str, number: int, *, pairs: bool) -> WorkerInfo:
    return WorkerInfo(
        name=name,
        role=_role(number, pairs),
        engine="kimistack",
        epoch=1,
        revision="r",
        node=f"n{number // 2}",
        model="kimi-k2.6",
        model_digest=GEOMETRY.model_digest,
        layout=GEOMETRY.layout,
        vocabulary_digest="",
        block_tokens=BLOCK,
        block_bytes=1,
        max_context_tokens=262_144,
        total_blocks=TOTAL_BLOCKS,
        capabilities=Capabilities(
            roles=(_role(number, pairs),),
            per_request_roles=False,
            fetch_source=True,
            layer_streaming=False,
            mid_decode_move=False,
            grammar=True,
            logprobs=True,
        ),
    )


def request(number: int, owner: str, *, cold: bool) -> RequestView:
    """A turn of a session that its owner and two pools know."""
    pools = (KvSource("pool-3", "n3", "dram", 68_032), KvSource("pool-9", "n9", "ssd", 70_400))
    session = number.to_bytes(4, "big")
    if cold:
        return turn(prompt_tokens=PROMPT, session=session)
    return turn(prompt_tokens=PROMPT, session=session, owners=(owner,), sources=pools)


class Took(NamedTuple):
    """Milliseconds of this thread's processor time, and of the clock on the wall."""

    processor: float
    wall: float
    preempted: int
    """How often somebody else was given this thread's processor."""

    def plus(self, other: "Took") -> "Took":
        """Both together."""
        return Took(
            self.processor + other.processor,
            self.wall + other.wall,
            self.preempted + other.preempted,
        )


def timed(act: Callable[[], T]) -> tuple[T, Took]:
    """What `act` gave, and how long it took."""
    before = _preempted()
    wall_s, started_s = time.perf_counter(), time.thread_time()
    made = act()
    processor_s = time.thread_time() - started_s
    wall_s = time.perf_counter() - wall_s
    return made, Took(1e3 * processor_s, 1e3 * wall_s, _preempted() - before)


def _preempted() -> int:
    """How often this thread has lost its processor to somebody."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def measure(
    feeds: Feeds, workers: int, decisions: int, repeats: int, *, pairs: bool, cold: bool
) -> tuple[list[Took], list[Took], list[Took], float]:
    """Times of planning, least and first, and of whole decisions; plans priced."""
    chance, planner = random.Random(workers), CostPolicy(SPEC).planner
    least, planning, whole, priced = [], [], [], []
    state = State(workers, feeds, planner, pairs=pairs)
    own = feeds._index.keys("w0") - len(COMMON)
    for number in range(decisions):
        now_s = 0.3 * number
        state.report(chance, number, cold=cold, now_s=now_s)
        owner = chance.randrange(workers)
        tail = min(own, (PROMPT - SHARED) // BLOCK)
        known = COMMON + [key(owner + 1, n) for n in range(tail)]
        keys = [key(workers + 1, number * 2_000 + n) for n in range(len(known))] if cold else known
        asking = request(number, f"w{owner}", cold=cold)
        (asked, seen), looked = timed(partial(state.look, asking, keys, now_s=now_s))
        decide = partial(planner.plan, asked, seen, now_s=now_s)
        took = [timed(decide)[1] for _ in range(repeats)]
        least.append(min(took))
        planning.append(took[0])
        whole.append(looked.plus(took[0]))
        decided = decide()
        planner.commit(str(number), decided.plan, now_s=now_s)
        for kind in ("fetch", "hand_off"):
            planner.flows.end(f"{number - UNDER_WAY}.{kind}", now_s=now_s)
        priced.append(len(decided.explanation.candidates))
    return least, planning, whole, statistics.mean(priced)


def line(
    feeds: Feeds, workers: int, decisions: int, repeats: int, *, pairs: bool, cold: bool
) -> tuple[str, float]:
    """One line of the table, and the 99th percentile of whole decisions in processor ms."""
    least, first, whole, priced = measure(
        feeds, workers, decisions, repeats, pairs=pairs, cold=cold
    )
    what = f"{'P/D' if pairs else 'whole'}, {'cold' if cold else 'busy'}"
    cells = [
        f"{percentile([took.processor for took in sample], share):.2f}"
        for sample in (least, first)
        for share in (0.5, 0.99)
    ]
    processor, wall, _ = zip(*whole, strict=True)
    cells += [
        f"{percentile(processor, share):.2f} / {percentile(wall, share):.2f}"
        for share in (0.5, 0.99)
    ]
    calm = [took.processor for took in whole if not took.preempted]
    undisturbed = "none"
    if calm:
        p50, p99 = percentile(calm, 0.5), percentile(calm, 0.99)
        undisturbed = f"{p50:.2f}, {p99:.2f} ({len(calm) / len(whole):.0%})"
    line = f"| {workers} | {what} | {' | '.join(cells)} | {priced:.1f} | {undisturbed} |"
    return line, percentile(processor, 0.99)


def percentile(sample: Sequence[float], share: float) -> float:
    """The sample's value that the share of it is below."""
    return sorted(sample)[int(len(sample) * share)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--decisions", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.blocks:,} blocks in the index, prompt of {PROMPT:,} tokens\n")
    print("| workers | fleet | plan, least: p50 ms | p99 | first: p50 | p99 ", end="")
    print("| with index and views, processor / wall: p50 | p99 | plans priced ", end="")
    print("| not preempted: p50, p99 (share) |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    slowest: dict[int, float] = {}
    for workers in args.workers:
        feeds = filled_feeds(workers, args.blocks)
        gc.collect()
        gc.freeze()  # as a router does once it has started
        for pairs in (False, True):
            for cold in (False, True):
                cells, p99 = line(
                    feeds, workers, args.decisions, args.repeats, pairs=pairs, cold=cold
                )
                print(cells, flush=True)
                slowest[workers] = max(slowest.get(workers, 0.0), p99)
        del feeds
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory {peak:.0f} MiB")
    told = ", ".join(f"{p99:.2f} ms at {workers} workers" for workers, p99 in slowest.items())
    print(f"whole decision, processor p99 of the slowest fleet: {told} (target: 1 ms at 64)")


if __name__ == "__main__":
    main()
