"""The daemon's Prometheus metrics, read from the pool's own counters at every scrape.

Blocks times the deployment's block tokens are tokens. What is looked up is the sum of the hits by
tier and of what was lost by reason: the funnel of `funnel.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.funnel import Funnel, Lost, Where
from kimi_runtime.umbp.ghosts import Ghosts
from kimi_runtime.umbp.pool import Pool
from kimi_runtime.umbp.promotion import Landing
from kimi_runtime.umbp.remote.metrics import peer_metrics
from kimi_runtime.umbp.second_tier import SecondTier
from kimi_runtime.umbp.ssdlog.health import Access, Refusal
from kimi_runtime.umbp.state import DaemonState, Phase
from kimi_runtime.umbp.tenants import Account
from kimi_runtime.umbp.write_through import CLEARED, EVICTED, QUEUE_FULL

_PREFIX = "kimistack_umbp_"
TENANTS = 20
"""Tenants with a label of their own, so that their number does not grow with them."""


@dataclass(slots=True, eq=False)
class PoolMetrics(Collector):
    """Collects from a daemon's parts, as long as it has any."""

    state: DaemonState
    followers: Callable[[], int]

    def collect(self) -> Iterator[Metric]:
        """Every metric, now."""
        clients, phase = self.state.clients, self.state.phase
        yield _gauge("ready", "1 when the pool can be used.", clients is not None)
        phases = {one.value: float(one is phase) for one in Phase}
        yield _gauge("phase", "1 for how far the daemon has come.", phases, "phase")
        text = "Peers that it got ready without."
        yield _counter("unknown_peers_at_start", text, self.state.unknown_peers)
        yield _gauge("feed_followers", "Streams of the feed.", self.followers())
        text = "HTTP requests and gRPC calls without a valid signature."
        yield _counter("refused_calls", text, self.state.refused_calls)
        reloads = {how: self.state.reloads[how] for how in ("applied", "unchanged", "refused")}
        yield _counter(
            "reloads", "Looks at the daemon's file, by what came of them.", reloads, "how"
        )
        if (tls := self.state.tls) is not None:
            text = "Days until the daemon's own certificate ends; negative once it has."
            yield _gauge("certificate_days_left", text, tls.days_left)
            text = "Days for which that certificate was made out."
            yield _gauge("certificate_days", text, tls.days)
        if clients is not None:
            yield from _gauges(clients)
            yield from _counters(clients)
            if clients.second is not None:
                yield from _ssd_gauges(clients.second)
                yield from _ssd_counters(clients.second)
            if clients.remote is not None:
                yield from peer_metrics(clients.remote)

    def exposition(self) -> bytes:
        """The text a scraper reads."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


def _gauges(clients: Clients) -> Iterator[Metric]:
    pool = clients.pool
    used = pool.total_pages - pool.free_pages - pool.evictable_pages
    pages = {"free": pool.free_pages, "evictable": pool.evictable_pages, "used": used}
    yield _gauge("pages", "Pages of the arena by state.", pages, "state")
    yield _gauge("page_bytes", "Size of a page.", pool.page_bytes)
    yield _gauge("blocks", "Visible blocks.", pool.live_blocks)
    yield _gauge("pins", "Pins of readers.", pool.open_pins)
    reservations = {
        "open": pool.reservations(quarantined=False),
        "quarantined": pool.reservations(quarantined=True),
        "stock": pool.stocks,
    }
    yield _gauge("reservations", "Reservations by state.", reservations, "state")
    yield _gauge("live_bytes", "Bytes of visible blocks.", pool.live_bytes)
    yield _gauge("sessions", "Sessions known by hints.", pool.retention.sessions)
    tenants = {account.name: float(account.used_pages) for account in _largest(pool)}
    yield _gauge("tenant_pages", "Pages of the tenants that use most.", tenants, "tenant")
    yield _gauge("clients", "Connected engines.", len(clients))
    yield _gauge("feed_seq", "Sequence number of the newest change.", clients.feed.seq)


def _counters(clients: Clients) -> Iterator[Metric]:
    c = clients.pool.counters
    yield _counter("reserved_blocks", "Reservations given.", c.reserved)
    yield _counter("refused_blocks", "Reservations refused for want of space.", c.refused)
    ended = {
        "committed": c.put,
        "duplicate": c.duplicate,
        "aborted": c.aborted,
        "expired": c.expired,
        "writer_gone": c.writer_gone,
        "revoked": c.revoked,
    }
    yield _counter("ended_reservations", "Reservations ended, by how.", ended, "how")
    yield _counter("over_quota_blocks", "Of the refused, for a tenant's quota.", c.over_quota)
    yield _counter("put_blocks", "Committed blocks.", c.put)
    yield _counter("put_bytes", "Bytes of committed blocks.", c.put_bytes)
    yield _counter("adopted_blocks", "Blocks taken over from the daemon before.", c.adopted)
    yield _counter("adopted_bytes", "Bytes of blocks taken over.", c.adopted_bytes)
    yield _counter("evicted_blocks", "Blocks evicted for space.", c.evicted)
    yield _counter("evicted_bytes", "Bytes evicted for space.", c.evicted_bytes)
    dropped = {"corrupt": c.corrupt, "cleared": c.cleared}
    yield _counter("dropped_blocks", "Blocks dropped otherwise.", dropped, "reason")
    yield _counter("dropped_bytes", "Bytes of blocks dropped otherwise.", c.dropped_bytes)
    unlisted = clients.pool.journal.unlisted
    yield _counter("unlisted_blocks", "Blocks the arena's directory has no cell for.", unlisted)
    proving = clients.proving
    proved = {"intact": float(proving.intact), "damaged": float(proving.damaged)}
    yield _counter("proved_blocks", "Blocks taken over and checked since.", proved, "how")
    yield from _funnel(clients.pool.funnel)
    yield _counter("refused_clients", "Connections refused.", clients.refused)
    hints = {
        kind.name.lower(): float(count) for kind, count in clients.pool.retention.hints.items()
    }
    yield _counter("hints", "What was told of sessions.", hints, "kind")
    yield from _price(clients.pool.ghosts)


def _funnel(funnel: Funnel) -> Iterator[Metric]:
    """Each block that was looked up is a hit from somewhere, or lost for a reason."""
    yield _counter("looked_up_blocks", "Blocks looked up: hits and lost ones.", funnel.looked_up)
    hits: dict[str, float] = {where.value: funnel.hits[where] for where in Where}
    yield _counter("hit_blocks", "Blocks served, by where they were.", hits, "tier")
    yield _counter("local_hit_blocks", "Of those, taken without asking.", funnel.local_hits)
    lost: dict[str, float] = {why.value: funnel.lost[why] for why in Lost}
    yield _counter("lost_blocks", "Blocks looked up and not served.", lost, "reason")
    yield _gauge("open_blocks", "Blocks whose readers have not said what they got.", funnel.open)


def _price(ghosts: Ghosts) -> Iterator[Metric]:
    """Hits that more memory would have brought, by how much more; of `ghost_asked_blocks`."""
    yield _counter("ghost_asked_blocks", "Blocks of runs that were priced.", ghosts.asked_blocks)
    yield _counter("ghost_hit_blocks", "Of those, hits.", ghosts.hit_blocks)
    more = {f"{share:.1%}": float(count) for share, count in ghosts.more_hits.items()}
    text = "Of those, lost blocks that more memory would have kept."
    yield _counter("ghost_kept_blocks", text, more, "more")


def _largest(pool: Pool) -> list[Account]:
    return sorted(pool.accounts, key=lambda account: -account.used_pages)[:TENANTS]


def _ssd_gauges(second: SecondTier) -> Iterator[Metric]:
    stats = second.tier.stats()
    access = {state.value: float(state is stats.access) for state in Access}
    yield _gauge("ssd_access", "1 for what the SSD log still does.", access, "state")
    yield _gauge("ssd_blocks", "Blocks on SSD.", stats.blocks)
    sizes = {
        "live": stats.live_bytes,
        "disk": stats.disk_bytes,
        "capacity": stats.capacity_bytes,
    }
    yield _gauge("ssd_bytes", "Bytes of live records, of files, and at most.", sizes, "kind")
    yield _gauge("ssd_promoting_blocks", "Blocks being read.", second.promoter.under_way)
    yield _gauge("ssd_write_queue_blocks", "Blocks to be written.", second.writer.queued)


def _ssd_counters(second: SecondTier) -> Iterator[Metric]:
    stats, writer = second.tier.stats(), second.writer
    yield _counter("ssd_recovered_blocks", "Blocks found at the start.", stats.recovered)
    yield _counter("ssd_put_blocks", "Blocks written.", stats.put)
    yield _counter("ssd_put_bytes", "Bytes of blocks written.", stats.put_bytes)
    yield _counter("ssd_get_blocks", "Blocks read and verified.", stats.hits)
    yield _counter("ssd_get_bytes", "Bytes of blocks read and verified.", stats.hit_bytes)
    yield _counter("ssd_written_bytes", "Bytes the disk was given.", stats.written_bytes)
    yield _counter("ssd_moved_bytes", "Bytes compaction copied.", stats.moved_bytes)
    refused: dict[str, float] = {why.value: stats.refused.get(why, 0) for why in Refusal}
    yield _counter("ssd_refused_blocks", "Blocks the log refused.", refused, "reason")
    lost = {
        "evicted": stats.evicted,
        "corrupt": stats.corrupt,
        "unreadable": stats.unreadable,
    }
    yield _counter("ssd_lost_blocks", "Blocks no longer on SSD.", lost, "reason")
    failed = {"read": stats.read_failures, "write": stats.write_failures}
    yield _counter("ssd_failures", "Calls the disk failed.", failed, "call")
    landings = {how.value: second.promoter.landings[how] for how in Landing}
    yield _counter("ssd_promoted_blocks", "Blocks asked of the SSD, by outcome.", landings, "how")
    yield _counter("ssd_busy_requests", "Requests not helped: too many waited.", second.busy)
    yield _counter("ssd_offered_blocks", "Blocks worth writing.", writer.offered)
    yield _counter("ssd_kept_blocks", "Blocks worth writing that are on SSD.", writer.kept)
    dropped = {why: writer.dropped[why] for why in (QUEUE_FULL, EVICTED, CLEARED, *Refusal)}
    yield _counter("ssd_dropped_blocks", "Blocks worth writing, dropped.", dropped, "reason")


_Samples = float | Mapping[str, float]
"""One value, or one per value of the label."""


def _gauge(name: str, text: str, samples: _Samples, label: str = "") -> Metric:
    labels = [label] if label else []
    return _filled(GaugeMetricFamily(_PREFIX + name, text, labels=labels), samples)


def _counter(name: str, text: str, samples: _Samples, label: str = "") -> Metric:
    labels = [label] if label else []
    return _filled(CounterMetricFamily(_PREFIX + name, text, labels=labels), samples)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
    if isinstance(samples, Mapping):
        for value, number in samples.items():
            metric.add_metric([value], number)
    else:
        metric.add_metric([], samples)
    return metric
