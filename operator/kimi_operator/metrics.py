"""The operator's own metrics. Labels are kinds, reasons and outcomes, never names."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """Counts of one operator process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = Histogram(
            "kimi_operator_pass_seconds",
            "Duration of reconcile passes.",
            ["outcome"],
            registry=self.registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )
        self.applies = Counter(
            "kimi_operator_applies",
            "Server-side applies of children.",
            ["kind", "reason"],
            registry=self.registry,
        )
        self.deletes = Counter(
            "kimi_operator_deletes", "Deletions of children.", ["kind"], registry=self.registry
        )
        self.lost = Counter(
            "kimi_operator_lost_pods",
            "Pods taken away from lost nodes after their worker's lease.",
            registry=self.registry,
        )
        self.status_patches = Counter(
            "kimi_operator_status_patches", "Patches of a status.", registry=self.registry
        )
        self.conflicts = Counter(
            "kimi_operator_conflicts",
            "Writes that found something else written in between.",
            registry=self.registry,
        )
        self.missed = Counter(
            "kimi_operator_missed_events",
            "Deployments of which a listing told what no watch had told.",
            registry=self.registry,
        )
        self.waiting = Gauge(
            "kimi_operator_waiting", "Deployments waiting for a pass.", registry=self.registry
        )
        self.deployments = Gauge(
            "kimi_operator_deployments",
            "Deployments by state.",
            ["state"],
            registry=self.registry,
        )
        self.leading = Gauge(
            "kimi_operator_leading", "1 while this process leads.", registry=self.registry
        )

    def text(self) -> bytes:
        """In the Prometheus text format."""
        return generate_latest(self.registry)
