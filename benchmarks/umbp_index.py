"""The router's index of who holds which block: memory a key, events and look-ups a second.

    PYTHONPATH=runtime python benchmarks/umbp_index.py [--keys 10000000] [--owners 100]

Every owner holds keys of its own, in chains of 2000 blocks, as prompts are. Followers of a feed
apply lines as they come, so their parsing is measured too.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence

from kimi_runtime.spec.umbp import FeedBatch, FeedEvent
from kimi_runtime.umbp.feed import FeedLog, decode_line, encode_line
from kimi_runtime.umbp.index import Index
from kimi_runtime.umbp.key_table import KeyTable

CHAIN = 2000
LOOKUPS = 3000
ASKED = 512


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each call, sorted."""
    times = []
    for call in calls:
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return sorted(times)


def quantiles(times: Sequence[float]) -> str:
    """Median and 99th percentile."""
    return f"{times[len(times) // 2] * 1e6:.0f} µs, p99 {times[len(times) * 99 // 100] * 1e6:.0f}"


def measure(count: int, owners: int) -> tuple[list[tuple[str, str]], str]:
    """The table's rows, and the summary."""
    draw = random.Random(0)
    table = KeyTable()

    def chain() -> list[bytes]:
        data = draw.randbytes(16 * CHAIN)
        return [data[at : at + 16] for at in range(0, len(data), 16)]

    chains, spent_s = [], 0.0
    for _ in range(owners):
        owner = table.new_owner(shown=True)
        for number in range(count // owners // CHAIN):
            keys = chain()
            start_s = time.perf_counter()
            table.add(owner, keys)
            spent_s += time.perf_counter() - start_s
            if not number:
                chains.append(keys)
    held = count // owners // CHAIN * CHAIN * owners
    adds = held / spent_s
    warm = timed([lambda n=n: table.runs(chains[n % owners][:ASKED]) for n in range(LOOKUPS)])
    strange = chain()
    cold = timed([lambda n=n: table.runs(strange[n % CHAIN :]) for n in range(LOOKUPS)])
    single = timed([lambda n=n: table.add(0, strange[n : n + 1]) for n in range(CHAIN)])
    lookups, per_key = ASKED * LOOKUPS / sum(warm), table.nbytes / held
    events = feed_events(owners)
    rows = [
        ("keys, owners", f"{held:,}, {owners}"),
        ("bytes a key", f"{per_key:.1f}"),
        ("keys added a second, 2000 at a time", f"{adds:,.0f}"),
        ("one key added", quantiles(single)),
        (f"run of {ASKED} blocks that one owner holds", quantiles(warm)),
        ("  blocks looked up a second", f"{lookups:,.0f}"),
        ("run of which nobody holds the first", quantiles(cold)),
        ("feed events applied a second, checked, parsed", f"{events:,.0f}"),
    ]
    summary = (
        f"index: {per_key:.1f} B/key at {held / 1e6:.0f} M keys, {lookups / 1e6:.2f} M blocks/s, "
        f"{events / 1e3:.0f} k feed events/s"
    )
    return rows, summary


def feed_events(owners: int) -> float:
    """Events a second that one follower's process takes from lines of a feed."""
    draw, index, lines = random.Random(1), Index(), []
    for number in range(min(owners, 10)):
        log = FeedLog(f"owner {number}", epoch=1, tier="dram")
        index.apply(log.owner, log.hello())
        for start in range(0, 10_000, 1000):
            events = [FeedEvent(op="add", key=draw.randbytes(16).hex()) for _ in range(1000)]
            batch = FeedBatch(epoch=1, first_seq=start + 1, events=tuple(events))
            lines.append((log.owner, encode_line(batch, summed=True)))
    start_s = time.perf_counter()
    for owner, line in lines:
        index.apply(owner, decode_line(line))
    return 1000 * len(lines) / (time.perf_counter() - start_s)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--owners", type=int, default=100)
    options = parser.parse_args()
    rows, summary = measure(options.keys, options.owners)
    for name, value in rows:
        print(f"{name:<44}{value:>28}")
    print(summary)


if __name__ == "__main__":
    main()
