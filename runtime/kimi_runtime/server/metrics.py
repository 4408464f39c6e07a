"""Prometheus metrics of a router and of a worker, each app with a registry of its own.

Labels are bounded: routes are templates, statuses are codes, workers come from the router's file.
"""

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kimi_runtime.engine.adapters.base import Adapter
from kimi_runtime.router.job import Journey
from kimi_runtime.router.service import Router
from kimi_runtime.server.answer import Usage
from kimi_runtime.server.asgi import Trace
from kimi_runtime.server.session_metrics import session_metrics
from kimi_runtime.spec.request import KvUsage
from kimi_runtime.spec.signals import RouterSignals
from kimi_runtime.umbp.feed import FollowState

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 10)
_ERRORS_S = (-10, -3, -1, -0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
_REQUEST_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)


class _Collect(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class HttpMetrics:
    """Requests by route and status. `prefix` is `kimistack_router` or `kimistack_worker`."""

    def __init__(self, prefix: str, state: _Collect) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{prefix}_requests", "HTTP requests.", ["path", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            f"{prefix}_request_seconds",
            "Seconds from a request's first byte to its answer's last.",
            ["path"],
            buckets=_REQUEST_S,
            registry=self.registry,
        )
        self._outcomes = Counter(
            f"{prefix}_request_failures",
            "Requests that did not end well, by how; also those that failed after their status.",
            ["outcome"],
            registry=self.registry,
        )
        self.registry.register(state)

    def observe(self, path: str, trace: Trace, seconds: float) -> None:
        """One request ended."""
        self._requests.labels(path, str(trace.status)).inc()
        self._seconds.labels(path).observe(seconds)
        if trace.outcome != "ok":
            self._outcomes.labels(trace.outcome).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class RouterMetrics(HttpMetrics):
    """A router's requests, plans, tokens and times."""

    def __init__(self, router: Router) -> None:
        super().__init__("kimistack_router", _RouterState(router))
        registry = self.registry
        self._ttft = Histogram(
            "kimistack_router_ttft_seconds",
            "Seconds from planning to the first output.",
            ["mode"],
            buckets=_TTFT_S,
            registry=registry,
        )
        self._ratio = Histogram(
            "kimistack_router_ttft_ratio",
            "Real over predicted seconds from a decision to the first output.",
            ["mode"],
            buckets=_RATIOS,
            registry=registry,
        )
        self._error = Histogram(
            "kimistack_router_ttft_error_seconds",
            "Real less predicted seconds from a decision to the first output.",
            ["mode"],
            buckets=_ERRORS_S,
            registry=registry,
        )
        self._itl = Histogram(
            "kimistack_router_itl_seconds",
            "Seconds between two streamed chunks.",
            buckets=_ITL_S,
            registry=registry,
        )
        self._plans = Counter(
            "kimistack_router_plans",
            "Plans carried out.",
            ["mode", "leg", "worker"],
            registry=registry,
        )
        self._retries = Counter(
            "kimistack_router_retries", "Attempts after the first.", registry=registry
        )
        self._prompt_tokens = Counter(
            "kimistack_router_prompt_tokens",
            "Prompt tokens by where a leg's worker got their KV.",
            ["leg", "source"],
            registry=registry,
        )
        self._output_tokens = Counter(
            "kimistack_router_output_tokens", "Ids sampled.", registry=registry
        )
        self._hand_off_bytes = Counter(
            "kimistack_router_hand_off_bytes",
            "KV bytes moved from prefill to decode.",
            registry=registry,
        )
        self._hand_off_failures = Counter(
            "kimistack_router_hand_off_failures",
            "Requests whose KV was not handed over whole and computed again, by reason.",
            ["reason"],
            registry=registry,
        )

    def chunk(self, gap_s: float) -> None:
        """A chunk followed another after `gap_s`."""
        self._itl.observe(gap_s)

    def ended(self, journey: Journey, usage: Usage) -> None:
        """A generation ended, well or not."""
        self._output_tokens.inc(usage.completion_tokens)
        self._retries.inc(journey.retries)
        plan = journey.plan
        if plan is None:
            return
        legs = ("whole",) if plan.prefill is None else ("prefill", "decode")
        for leg, worker in zip(legs, plan.workers, strict=True):
            self._plans.labels(plan.mode, leg, worker).inc()
        if journey.ttft_s is not None:
            self._ttft.labels(plan.mode).observe(journey.ttft_s)
        if journey.served_s is not None and journey.expected_s:
            self._ratio.labels(plan.mode).observe(journey.served_s / journey.expected_s)
            self._error.labels(plan.mode).observe(journey.served_s - journey.expected_s)
        self._count(legs[0], journey.prefill_usage)
        self._count(legs[-1], journey.decode_usage)

    def _count(self, leg: str, usage: KvUsage | None) -> None:
        if usage is None:
            return
        for source in ("hbm", "pool", "hand_off", "computed"):
            tokens = getattr(usage, f"{source}_tokens")
            self._prompt_tokens.labels(leg, source).inc(tokens)
        self._hand_off_bytes.inc(usage.hand_off_bytes)
        if usage.hand_off_failure is not None:
            self._hand_off_failures.labels(usage.hand_off_failure).inc()


class _RouterState:
    """Gauges read from the router when scraped."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        router = self._router
        yield GaugeMetricFamily(
            "kimistack_router_in_flight",
            "Client requests being served.",
            value=router.admission.in_flight,
        )
        yield GaugeMetricFamily(
            "kimistack_router_ready",
            "1 if a generation passed through the whole path with the workers of now.",
            value=router.readiness.obstacle is None,
        )
        legs = GaugeMetricFamily(
            "kimistack_router_worker_in_flight",
            "Requests of this router at a worker, each leg counted.",
            labels=["worker"],
        )
        ready = GaugeMetricFamily(
            "kimistack_router_worker_ready", "1 if the worker is planned onto.", labels=["worker"]
        )
        for member in router.fleet.members:
            legs.add_metric([member.name], router.ledger.in_flight(member.name))
            ready.add_metric([member.name], member.ready)
        yield legs
        yield ready
        if router.explain is not None:
            lines = CounterMetricFamily(
                "kimistack_router_explained",
                "Decisions by whether the explain log has them.",
                labels=["outcome"],
            )
            lines.add_metric(["written"], router.explain.written)
            lines.add_metric(["dropped"], router.explain.dropped)
            yield lines
        yield from _fleet_metrics(router.signals())
        exact = GaugeMetricFamily(
            "kimistack_router_feed_exact",
            "1 if the owner's feed is followed without a gap.",
            labels=["owner"],
        )
        held = GaugeMetricFamily(
            "kimistack_router_feed_blocks", "Blocks the owner is thought to hold.", labels=["owner"]
        )
        for owner, state in router.feeds.states().items():
            exact.add_metric([owner], state is FollowState.EXACT)
        for owner, blocks in router.feeds.keys_held().items():
            held.add_metric([owner], blocks)
        yield exact
        yield held
        sessions = router.sessions
        yield GaugeMetricFamily(
            "kimistack_router_sessions", "Conversations remembered.", value=len(sessions)
        )
        turns = CounterMetricFamily(
            "kimistack_router_turns",
            "Later turns of sessions, by whether the sampled ids stayed the prompt.",
            labels=["history"],
        )
        turns.add_metric(["kept"], sessions.kept)
        turns.add_metric(["reencoded"], sessions.reencoded)
        yield turns
        yield from session_metrics(router)


def _fleet_metrics(signals: RouterSignals) -> Iterable[Metric]:
    """What `GET /signals` says; a gauge without a sample is not known."""
    fleet = signals.fleet
    gauges = {
        "parked_requests": ("Requests held while no worker runs.", signals.parked_requests),
        "parked_tokens": ("Prompt tokens of requests held.", signals.parked_tokens),
        "waiting_requests": (
            "Requests that no worker has begun, also those that the routers hold.",
            fleet.waiting_requests,
        ),
        "queue_seconds": ("Seconds a request of now waits before its prefill.", fleet.queue_s),
        "kv_use": (
            "Used share of the KV memory of workers that decode; while sessions are held for want "
            "of it, what all need of what they may have.",
            fleet.kv_use,
        ),
        "transfer_backlog_seconds": (
            "Seconds a hand-off waits for its first output.",
            fleet.transfer_backlog_s,
        ),
        "prefill_tokens_per_second": (
            "Tokens that one worker prefills in a second.",
            signals.prefill_tokens_per_s,
        ),
    }
    for name, (text, value) in gauges.items():
        family = GaugeMetricFamily(f"kimistack_router_{name}", text, labels=[])
        if value is not None:
            family.add_metric([], value)
        yield family
    silent = GaugeMetricFamily(
        "kimistack_router_worker_silent_seconds",
        "Seconds since the worker's last answer.",
        labels=["worker"],
    )
    for worker in signals.workers:
        if worker.silent_s is not None:
            silent.add_metric([worker.name], worker.silent_s)
    yield silent


class WorkerMetrics(HttpMetrics):
    """A worker's requests and its engine's counters."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__("kimistack_worker", _WorkerState(adapter))
        self._ttft = Histogram(
            "kimistack_worker_first_chunk_seconds",
            "Seconds from a request's arrival to its first chunk.",
            buckets=_TTFT_S,
            registry=self.registry,
        )
        self._itl = Histogram(
            "kimistack_worker_itl_seconds",
            "Seconds between two chunks of a request.",
            buckets=_ITL_S,
            registry=self.registry,
        )

    def chunk(self, gap_s: float, *, first: bool) -> None:
        """A chunk came `gap_s` after the one before it, or after the request's arrival."""
        (self._ttft if first else self._itl).observe(gap_s)


class _WorkerState:
    """Gauges and counters read from the engine when scraped."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def collect(self) -> Iterable[Metric]:
        counters, info = self._adapter.counters(), self._adapter.info
        gauges = {
            "running": ("Requests in the batch.", counters.running),
            "waiting": ("Requests waiting for room.", counters.waiting),
            "quarantined_blocks": (
                "Blocks a transfer might still write to.",
                counters.quarantined_blocks,
            ),
            "open_hand_offs": (
                "Hand-offs whose blocks are kept for their readers.",
                counters.open_hand_offs,
            ),
            "total_blocks": ("KV blocks of the engine.", info.total_blocks),
            "held_blocks": ("Blocks with a key, told to the feed.", len(self._adapter.feed)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"kimistack_worker_{name}", text, value=value)
        totals = {
            "output_tokens": ("Ids sampled.", counters.output_tokens),
            "steps": ("Engine steps.", counters.steps),
            "step_tokens": ("Tokens computed in steps.", counters.step_tokens),
            "failed_steps": ("Steps that raised.", counters.failed_steps),
            "preemptions": ("Requests moved back to waiting.", counters.preemptions),
            "key_mismatches": (
                "Requests whose keys from the router differ from ours.",
                counters.key_mismatches,
            ),
            "pool_stored_blocks": ("Blocks the pool took.", counters.pool_stored),
            "states_stored": ("State checkpoints the pool took.", counters.states_stored),
            "states_dropped": (
                "State checkpoints that were to be kept and are not.",
                counters.states_dropped,
            ),
            "pool_dropped_blocks": ("Blocks not offered or refused.", counters.pool_dropped),
            "hand_offs_offered": ("Hand-offs offered.", counters.hand_offs_offered),
            "hand_offs_taken": ("Hand-offs taken whole.", counters.hand_offs_taken),
            "hand_offs_released": ("Hand-offs ended by their taker.", counters.hand_offs_released),
            "hand_offs_expired": ("Hand-offs ended by their lease.", counters.hand_offs_expired),
            "hand_off_bytes": ("KV bytes taken from hand-offs.", counters.hand_off_bytes),
            "hand_off_early_bytes": (
                "Of the bytes taken, those read before their owner had the whole prompt.",
                counters.hand_off_early_bytes,
            ),
            "hand_off_blocks": ("KV blocks taken from hand-offs.", counters.hand_off_blocks),
            "release_failures": ("Releases nobody answered.", counters.release_failures),
        }
        for name, (text, total) in totals.items():
            yield CounterMetricFamily(f"kimistack_worker_{name}", text, value=total)
        labelled = {
            "prompt_tokens": ("Prompt tokens by where their KV came from.", "source"),
            "finished": ("Requests by how they ended.", "how"),
            "refused": ("Requests never admitted, by error.", "error"),
            "pool_failures": ("Pool loads that failed, by outcome.", "outcome"),
            "hand_off_failures": ("Hand-offs that failed, by reason.", "reason"),
            "hand_off_transports": ("Hand-offs read from, by transport.", "transport"),
            "transfer_faults": ("Faults injected into transfers on purpose, by kind.", "fault"),
        }
        for name, (text, label) in labelled.items():
            family = CounterMetricFamily(f"kimistack_worker_{name}", text, labels=[label])
            for value, total in getattr(counters, name).items():
                family.add_metric([str(value)], total)
            yield family
