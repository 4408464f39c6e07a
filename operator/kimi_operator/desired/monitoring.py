"""What is observed: scraping, alerts and a dashboard, from the metrics the processes export."""

from collections.abc import Mapping
from typing import Any

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import RoleName
from kimi_operator.desired.dashboard import dashboard, own_series
from kimi_operator.desired.labels import COMPONENT_LABEL, Component, Owner, metadata_of
from kimi_operator.desired.left_out import LeftOut
from kimi_operator.desired.names import pool_host, pool_name
from kimi_operator.desired.pool_tls import CA
from kimi_operator.observed import (
    DEPLOYMENT_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    Capabilities,
    Manifest,
)

POD_MONITOR = "monitoring.coreos.com/v1/PodMonitor"
PROMETHEUS_RULE = "monitoring.coreos.com/v1/PrometheusRule"
NOT_INSTALLED = "the Prometheus operator is not installed in this cluster"
POD_LABEL_ROLE = "kimistack_dev_role"
"""A pod's label as the Prometheus operator copies it to series."""

METRIC_NAMES: Mapping[str, Mapping[str, str]] = {
    "kimistack": {
        "QueueDepth": "kimistack_worker_waiting",
        "RunningRequests": "kimistack_worker_running",
    },
    "sglang": {
        "QueueDepth": "sglang:num_queue_reqs",
        "RunningRequests": "sglang:num_running_reqs",
        "KvUsage": "sglang:token_usage",
    },
    "vllm": {
        "QueueDepth": "vllm:num_requests_waiting",
        "RunningRequests": "vllm:num_requests_running",
        "KvUsage": "vllm:kv_cache_usage_perc",
    },
    "atom": {},
}
"""An engine's name of each scaling metric of the API; what is not here it does not report."""


def monitors(
    owner: Owner, spec: DeploymentSpec, capabilities: Capabilities, tls: str | None = None
) -> tuple[list[Manifest], list[LeftOut]]:
    """PodMonitors, PrometheusRule and dashboard, as far as they are wanted and can be written.

    `tls` is the Secret by which the pool's daemons encrypt; None: they do not.
    """
    wanted = spec.observability
    found: list[Manifest] = []
    missing: list[LeftOut] = []
    if wanted.dashboard == "Auto":
        found.append(dashboard(owner))
    for kind, asked, objects in (
        (POD_MONITOR, wanted.pod_monitor, pod_monitors(owner, tls)),
        (PROMETHEUS_RULE, wanted.rules_object, [prometheus_rule(owner, spec, tls)]),
    ):
        if asked != "Auto":
            continue
        if capabilities.serves(kind):
            found += objects
        else:
            missing.append(LeftOut(f"{kind.rpartition('/')[2]} {owner.name}", NOT_INSTALLED))
    return found, missing


def pod_monitors(owner: Owner, tls: str | None = None) -> list[Manifest]:
    """Scrape every pod's port `http`, and `https` where the pool's daemons encrypt by `tls`.

    The latter by an object of its own: one that names a Secret that is missing or lacks the key is
    left out as a whole by the Prometheus operator.
    """
    found = [_pod_monitor(owner, owner.name, "deployment", {"port": "http"})]
    if tls is not None:
        host = pool_host(owner.name, owner.namespace)
        trusted = {"ca": {"secret": {"name": tls, "key": CA}}, "serverName": host}
        endpoint = {"port": "https", "scheme": "https", "tlsConfig": trusted}
        found.append(_pod_monitor(owner, pool_name(owner.name), "umbp", endpoint))
    return found


def _pod_monitor(owner: Owner, name: str, component: Component, endpoint: Manifest) -> Manifest:
    only = {} if component == "deployment" else {COMPONENT_LABEL: component}
    return {
        "apiVersion": POD_MONITOR.rpartition("/")[0],
        "kind": "PodMonitor",
        "metadata": metadata_of(owner, name, component),
        "spec": {
            "selector": {"matchLabels": {DEPLOYMENT_LABEL: owner.name, **only}},
            "namespaceSelector": {"matchNames": [owner.namespace]},
            "podTargetLabels": [DEPLOYMENT_LABEL, ROLE_LABEL, REVISION_LABEL, COMPONENT_LABEL],
            "podMetricsEndpoints": [{**endpoint, "path": "/metrics", "interval": "15s"}],
        },
    }


def prometheus_rule(owner: Owner, spec: DeploymentSpec, tls: str | None = None) -> Manifest:
    """Alerts that call for a person, each with what to look at."""
    rules = [*alerts(owner, spec), *([_certificate_alert(owner, tls)] if tls else [])]
    group = {"name": f"kimistack-{owner.name}", "rules": rules}
    return {
        "apiVersion": PROMETHEUS_RULE.rpartition("/")[0],
        "kind": "PrometheusRule",
        "metadata": metadata_of(owner, owner.name, "deployment"),
        "spec": {"groups": [group]},
    }


def alerts(owner: Owner, spec: DeploymentSpec) -> list[Manifest]:
    """The rules of the alert group."""
    own = own_series(owner)
    errors = f'kimistack_router_requests_total{{{own},status=~"5.."}}'
    every = f"kimistack_router_requests_total{{{own}}}"
    found = [
        _alert(
            "NotServing",
            f"max(kimistack_router_ready{{{own}}}) < 1 or absent(kimistack_router_ready{{{own}}})",
            "5m",
            "critical",
            "No router passes a generation: see the Ready condition of the KimiDeployment.",
        ),
        _alert(
            "RequestsFail",
            f"sum(rate({errors}[5m])) > 0.05 * sum(rate({every}[5m]))",
            "10m",
            "critical",
            "More than 5% of requests end with a server error: see the routers' logs by request.",
        ),
        _alert(
            "RequestsHeld",
            f"sum(kimistack_router_parked_requests{{{own}}}) > 0",
            "10m",
            "warning",
            "Requests wait and no worker runs: see kubectl kimi status for what keeps one away.",
        ),
        _alert(
            "WorkerSilent",
            f"min by (worker) (kimistack_router_worker_silent_seconds{{{own}}}) > 30",
            "2m",
            "warning",
            "A worker of the list answers no router: see its pod, and kubectl kimi status.",
        ),
    ]
    if spec.engine == "kimistack":
        found += _worker_alerts(own)
    if spec.kv_pool.enabled and spec.engine == "kimistack":
        found.append(
            _alert(
                "PoolCorrupt",
                f'sum(increase(kimistack_umbp_dropped_blocks_total{{{own},reason="corrupt"}}[1h]))'
                " > 0",
                "0m",
                "critical",
                "Blocks of the KV pool did not match their tags (none was served): check memory.",
            )
        )
    for name, role in spec.roles():
        found += _latency_alerts(own, name, role.scaling.targets)
    return found


def _certificate_alert(owner: Owner, tls: str) -> Manifest:
    """Sooner than cert-manager renews would be noise: it does so in the last third of the time."""
    own = own_series(owner)
    left, whole = (f"kimistack_umbp_certificate_days{end}{{{own}}}" for end in ("_left", ""))
    return _alert(
        "CertificateEnds",
        f"min({left} < clamp_max({whole} / 4, 7))",
        "1h",
        "warning",
        f"The pool's certificate ends in a week or a quarter of its life: renew Secret {tls}.",
    )


def _worker_alerts(own: str) -> list[Manifest]:
    return [
        _alert(
            "StepsFail",
            f"sum(increase(kimistack_worker_failed_steps_total{{{own}}}[15m])) > 0",
            "0m",
            "warning",
            "An engine's step raised: see the worker's log.",
        ),
        _alert(
            "HandOffsFail",
            f"sum(rate(kimistack_worker_hand_off_failures_total{{{own}}}[10m])) > "
            f"0.05 * sum(rate(kimistack_worker_hand_offs_offered_total{{{own}}}[10m]))",
            "10m",
            "warning",
            "KV of more than 5% of hand-offs did not arrive and was computed again: check the "
            "network between prefill and decode.",
        ),
        _alert(
            "RoutersDisagree",
            f"sum(increase(kimistack_worker_key_mismatches_total{{{own}}}[15m])) > 0",
            "0m",
            "warning",
            "Routers and workers derive different block keys: they run different versions.",
        ),
        _alert(
            "FeedsDegraded",
            f"min(kimistack_router_feed_exact{{{own}}}) < 1",
            "15m",
            "warning",
            "A router does not follow a feed: it plans without what that owner holds.",
        ),
    ]


def _latency_alerts(own: str, name: RoleName, targets: Any) -> list[Manifest]:
    found = []
    for signal, limit_s in (("ttft", targets and targets.ttft), ("itl", targets and targets.itl)):
        if limit_s:
            series = f"kimistack_router_{signal}_seconds_bucket{{{own}}}"
            found.append(
                _alert(
                    f"{signal.capitalize()}Late",
                    f"histogram_quantile(0.95, sum by (le) (rate({series}[10m]))) > {limit_s:g}",
                    "15m",
                    "warning",
                    f"The 95th percentile misses spec.{name}.scaling.targets.{signal}.",
                )
            )
    return found


def _alert(name: str, expression: str, lasting: str, severity: str, text: str) -> Manifest:
    return {
        "alert": f"Kimistack{name}",
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": text},
    }
