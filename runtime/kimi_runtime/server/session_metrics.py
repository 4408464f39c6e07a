"""Prometheus metrics of sessions: who waits for KV memory, and what pools are told."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kimi_runtime.router.service import Router

GATE_OUTCOMES = ("at_once", "waited", "refused", "late", "left", "shed")
HINT_OUTCOMES = ("told", "merged", "dropped", "failed")


def session_metrics(router: Router) -> Iterable[Metric]:
    """Read from the router when scraped."""
    gate, hints = router.gate, router.hints
    capacity = gate.capacity_tokens
    gauges = {
        "sessions_waiting": ("Requests that wait for KV memory.", gate.waiting),
        "session_tokens": ("KV tokens that admitted sessions are counted with.", gate.used_tokens),
        "hints_pending": ("Hints that pools are not told yet.", hints.pending),
    }
    for name, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"kimistack_router_{name}", text, value=value)
    room = GaugeMetricFamily(
        "kimistack_router_session_capacity_tokens",
        "KV tokens that sessions of this router may use; without a sample it is not known.",
        labels=[],
    )
    if capacity is not None:
        room.add_metric([], capacity)
    yield room
    counters = {
        "session_turns": ("Turns by what session admission did.", gate.outcomes, GATE_OUTCOMES),
        "hints": ("Hints to pools by what became of them.", hints.outcomes, HINT_OUTCOMES),
    }
    for name, (text, counts, outcomes) in counters.items():
        family = CounterMetricFamily(f"kimistack_router_{name}", text, labels=["outcome"])
        for outcome in outcomes:
            family.add_metric([outcome], counts[outcome])
        yield family
    yield CounterMetricFamily(
        "kimistack_router_session_wait_seconds",
        "Seconds that turns waited for KV memory, together.",
        value=gate.waited_s,
    )
