"""What a daemon fetched and lent, for its exporter."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from kimi_runtime import clock
from kimi_runtime.umbp.feed import FollowState
from kimi_runtime.umbp.remote.fetch import Fate
from kimi_runtime.umbp.remote.health import Standing
from kimi_runtime.umbp.remote.owners import Owner
from kimi_runtime.umbp.remote.service import Remote

_PREFIX = "kimistack_umbp_peer_"


def peer_metrics(remote: Remote) -> Iterator[Metric]:
    """By owner what was fetched from it and what was not and why; in all what was lent."""
    owners, now_s = list(remote.owners), clock.now_s()
    asked = CounterMetricFamily(
        _PREFIX + "blocks", "Blocks asked of a peer, by outcome.", labels=["owner", "how"]
    )
    for owner in owners:
        for fate in Fate:
            asked.add_metric([owner.name, fate.value], owner.blocks[fate])
    yield asked

    def exact(owner: Owner) -> float:
        return float(remote.owners.state(owner) is FollowState.EXACT)

    def away(owner: Owner) -> float:
        return float(owner.health.standing(now_s) is not Standing.GOOD)

    yield _counter("bytes", "Bytes fetched from a peer.", owners, lambda o: o.bytes)
    yield _counter("seconds", "Seconds of fetches that brought some.", owners, lambda o: o.seconds)
    text = "Times a peer was put into quarantine."
    yield _counter("quarantines", text, owners, lambda o: o.health.quarantines)
    yield _gauge("quarantined", "1 while a peer is in quarantine or probed.", owners, away)
    yield _gauge("feed_exact", "1 while what a peer holds is known.", owners, exact)
    yield _gauge("known_blocks", "Blocks it holds, as told.", owners, remote.owners.known)
    under_way = remote.fetcher.under_way
    yield GaugeMetricFamily(_PREFIX + "fetching_blocks", "Blocks being fetched.", under_way)
    yield GaugeMetricFamily(_PREFIX + "loans", "Pins of peers.", remote.lender.loans)
    yield from _totals(remote)
    yield from _offers(remote)


def _totals(remote: Remote) -> Iterator[Metric]:
    lender = remote.lender
    totals = {
        "crowded_blocks": ("Blocks not fetched: enough others were.", remote.fetcher.crowded),
        "busy_requests": ("Requests not helped: too many waited.", remote.busy),
        "lent_blocks": ("Blocks lent to peers.", lender.lent_blocks),
        "lent_bytes": ("Bytes lent to peers.", lender.lent_bytes),
        "refused_loans": ("Requests refused: enough was lent.", lender.refused),
        "damaged_blocks": ("Lent blocks that were damaged here: dropped.", lender.damaged),
    }
    for name, (text, value) in totals.items():
        yield CounterMetricFamily(_PREFIX + name, text, value)
    faults = CounterMetricFamily(
        _PREFIX + "transfer_faults",
        "Faults injected into reads from peers on purpose, by kind.",
        labels=["fault"],
    )
    for fault, count in remote.faults.items():
        faults.add_metric([fault], count)
    yield faults
    ends = CounterMetricFamily(_PREFIX + "ended_loans", "Loans by how they ended.", labels=["how"])
    for how in ("given_back", "lapsed"):
        ends.add_metric([how], lender.ends[how])
    yield ends


def _offers(remote: Remote) -> Iterator[Metric]:
    """Blocks that moved because they were offered, and those that did not and why."""
    taken = CounterMetricFamily(
        _PREFIX + "taken_blocks",
        "Blocks that peers offered, by why and what became of them.",
        labels=["purpose", "how"],
    )
    for (purpose, how), blocks in sorted(remote.taker.fates.items()):
        taken.add_metric([purpose, how], blocks)
    yield taken
    size = CounterMetricFamily(
        _PREFIX + "taken_bytes", "Bytes taken from peers that offered them.", labels=["purpose"]
    )
    for purpose, count in sorted(remote.taker.bytes.items()):
        size.add_metric([purpose], count)
    yield size
    copies = CounterMetricFamily(
        _PREFIX + "copies", "Hot blocks offered to peers, by what became of them.", labels=["how"]
    )
    for how, blocks in sorted(remote.replicator.fates.items()):
        copies.add_metric([how], blocks)
    yield copies


def _counter(
    name: str, text: str, owners: list[Owner], value: Callable[[Owner], float]
) -> CounterMetricFamily:
    metric = CounterMetricFamily(_PREFIX + name, text, labels=["owner"])
    for owner in owners:
        metric.add_metric([owner.name], value(owner))
    return metric


def _gauge(
    name: str, text: str, owners: list[Owner], value: Callable[[Owner], float]
) -> GaugeMetricFamily:
    metric = GaugeMetricFamily(_PREFIX + name, text, labels=["owner"])
    for owner in owners:
        metric.add_metric([owner.name], value(owner))
    return metric
