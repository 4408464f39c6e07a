"""How long one routing decision takes: index, views and the cost planner, by number of workers.

    python benchmarks/planner.py [--workers 8 64 512] [--blocks 1000000] [--decisions 400]

Prints one Markdown table. A decision looks up the prompt's 1,109 blocks in an index of `--blocks`
keys, makes a view of every worker, prices the plans and enters its transfers; the fleet is as busy
as coding agents make it, half of it prefill and half decode workers in the lines that say P/D.
Processor seconds of the one thread. Each decision is planned `--repeats` times: the least of them
is what it takes where nobody else has the processor's caches (and no garbage is collected), the
first is what it took here.
"""

import argparse
import dataclasses
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.view import KvSource, RequestView, WorkerView
from kimi_runtime.spec.router import Cost
from kimi_runtime.spec.umbp import FeedHello, FeedSnapshotPage
from kimi_runtime.spec.worker import Role
from kimi_runtime.umbp.index import Index
from worker_views import turn, worker

SPEC = Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)
BLOCK, PROMPT, SHARED, TOTAL_BLOCKS = 64, 71_000, 20_032, 48_000


def key(owner: int, number: int) -> bytes:
    """Some block's key."""
    return owner.to_bytes(8, "big") + number.to_bytes(8, "big")


COMMON = [key(0, number) for number in range(SHARED // BLOCK)]
"""The prefix that every session starts with."""


def filled_index(workers: int, blocks: int) -> Index:
    """`blocks` keys over the workers; each of them holds the common prefix."""
    index = Index()
    own = max(blocks // workers - len(COMMON), 0)
    for number in range(workers):
        name = f"w{number}"
        keys = COMMON + [key(number + 1, n) for n in range(own)]
        index.apply(name, FeedHello(owner=name, epoch=1, seq=1, tier="hbm", block_tokens=BLOCK))
        page = FeedSnapshotPage(
            epoch=1, seq=1, page=0, last=True, keys=tuple(one.hex() for one in keys)
        )
        index.apply(name, page)
    return index


def fleet(workers: int, chance: random.Random, *, pairs: bool, cold: bool) -> list[WorkerView]:
    """Workers at some moment, two a node."""
    made = []
    for number in range(workers):
        running = 0 if cold else chance.randint(0, 24)
        role = Role.BOTH if not pairs else (Role.DECODE, Role.PREFILL)[number % 2]
        view = worker(
            f"w{number}",
            role=role,
            node=f"n{number // 2}",
            waiting=0 if cold else chance.randint(0, 4),
            running=running,
            queued_tokens=0 if cold else chance.randint(0, 60_000),
            free_blocks=TOTAL_BLOCKS - running * 1_100,
            total_blocks=TOTAL_BLOCKS,
            fetches=True,
        )
        made.append(view)
    return made


def request(number: int, owner: str, *, cold: bool) -> RequestView:
    """A turn of a session that its owner and two pools know."""
    pools = (KvSource("pool-3", "n3", "dram", 68_032), KvSource("pool-9", "n9", "ssd", 70_400))
    session = number.to_bytes(4, "big")
    if cold:
        return turn(prompt_tokens=PROMPT, session=session)
    return turn(prompt_tokens=PROMPT, session=session, owners=(owner,), sources=pools)


def timed(act: Callable[[], object]) -> float:
    """Milliseconds of this thread."""
    started_s = time.thread_time()
    act()
    return 1e3 * (time.thread_time() - started_s)


def measure(
    index: Index, workers: int, decisions: int, repeats: int, *, pairs: bool, cold: bool
) -> tuple[list[float], list[float], list[float], float]:
    """Milliseconds of planning, least and first, of the whole decision; plans priced."""
    chance, planner = random.Random(workers), CostPolicy(SPEC).planner
    least, planning, whole, priced = [], [], [], []
    views = fleet(workers, chance, pairs=pairs, cold=cold)
    own = index.keys("w0") - len(COMMON)
    for number in range(decisions):
        if number % 20 == 0:
            views = fleet(workers, chance, pairs=pairs, cold=cold)
        owner = chance.randrange(workers)
        tail = min(own, (PROMPT - SHARED) // BLOCK)
        keys = COMMON + [key(owner + 1, n) for n in range(0 if cold else tail)]
        asked, now_s = request(number, f"w{owner}", cold=cold), 0.3 * number
        seen: list[WorkerView] = []

        def look(
            keys: list[bytes] = keys,
            views: list[WorkerView] = views,
            seen: list[WorkerView] = seen,
        ) -> None:
            runs = {} if cold else index.prefix_runs(keys)
            seen.extend(
                dataclasses.replace(view, cached_tokens=BLOCK * runs.get(view.name, 0))
                for view in views
            )

        def decide(
            asked: RequestView = asked, now_s: float = now_s, seen: list[WorkerView] = seen
        ) -> None:
            planner.plan(asked, seen, now_s=now_s)

        looked = timed(look)
        took = [timed(decide) for _ in range(repeats)]
        least.append(min(took))
        planning.append(took[0])
        whole.append(looked + took[0])
        decided = planner.plan(asked, seen, now_s=now_s)
        planner.commit(str(number), decided.plan, now_s=now_s)
        priced.append(len(decided.explanation.candidates))
    return least, planning, whole, statistics.mean(priced)


def line(
    index: Index, workers: int, decisions: int, repeats: int, *, pairs: bool, cold: bool
) -> str:
    """One line of the table."""
    *samples, priced = measure(index, workers, decisions, repeats, pairs=pairs, cold=cold)
    what = f"{'P/D' if pairs else 'whole'}, {'cold' if cold else 'busy'}"
    figures = []
    for sample in samples:
        sample.sort()
        figures += [statistics.median(sample), sample[int(len(sample) * 0.99)]]
    cells = " | ".join(f"{figure:.2f}" for figure in figures)
    return f"| {workers} | {what} | {cells} | {priced:.1f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--decisions", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{args.blocks:,} blocks in the index, prompt of {PROMPT:,} tokens\n")
    print("| workers | fleet | plan, least: p50 ms | p99 | first: p50 | p99 ", end="")
    print("| with index and views: p50 | p99 | plans priced |")
    print("|---|---|---|---|---|---|---|---|---|")
    for workers in args.workers:
        index = filled_index(workers, args.blocks)
        for pairs in (False, True):
            for cold in (False, True):
                cells = line(index, workers, args.decisions, args.repeats, pairs=pairs, cold=cold)
                print(cells, flush=True)
        del index
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
