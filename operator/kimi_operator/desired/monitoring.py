"""What is observed: scraping, alerts and a dashboard, from the metrics the processes export."""

import json
from collections.abc import Mapping
from typing import Any

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.api.roles import RoleName
from kimi_operator.desired.labels import COMPONENT_LABEL, Owner, metadata_of
from kimi_operator.desired.left_out import LeftOut
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
POD_LABEL_DEPLOYMENT = "kimistack_dev_deployment"
POD_LABEL_ROLE = "kimistack_dev_role"
"""Labels of pods as the Prometheus operator copies them to series."""

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
    owner: Owner, spec: DeploymentSpec, capabilities: Capabilities
) -> tuple[list[Manifest], list[LeftOut]]:
    """PodMonitor, PrometheusRule and dashboard, as far as they are wanted and can be written."""
    wanted = spec.observability
    found: list[Manifest] = []
    missing: list[LeftOut] = []
    if wanted.dashboard == "Auto":
        found.append(dashboard(owner))
    for kind, asked, build in (
        (POD_MONITOR, wanted.pod_monitor, pod_monitor),
        (PROMETHEUS_RULE, wanted.rules_object, prometheus_rule),
    ):
        if asked != "Auto":
            continue
        if capabilities.serves(kind):
            found.append(build(owner, spec))
        else:
            missing.append(LeftOut(f"{kind.rpartition('/')[2]} {owner.name}", NOT_INSTALLED))
    return found, missing


def pod_monitor(owner: Owner, spec: DeploymentSpec) -> Manifest:
    """Scrapes every pod's port `http`."""
    del spec
    return {
        "apiVersion": POD_MONITOR.rpartition("/")[0],
        "kind": "PodMonitor",
        "metadata": metadata_of(owner, owner.name, "deployment"),
        "spec": {
            "selector": {"matchLabels": {DEPLOYMENT_LABEL: owner.name}},
            "namespaceSelector": {"matchNames": [owner.namespace]},
            "podTargetLabels": [DEPLOYMENT_LABEL, ROLE_LABEL, REVISION_LABEL, COMPONENT_LABEL],
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }


def prometheus_rule(owner: Owner, spec: DeploymentSpec) -> Manifest:
    """Alerts that call for a person, each with what to look at."""
    group = {"name": f"kimistack-{owner.name}", "rules": alerts(owner, spec)}
    return {
        "apiVersion": PROMETHEUS_RULE.rpartition("/")[0],
        "kind": "PrometheusRule",
        "metadata": metadata_of(owner, owner.name, "deployment"),
        "spec": {"groups": [group]},
    }


def alerts(owner: Owner, spec: DeploymentSpec) -> list[Manifest]:
    """The rules of the alert group."""
    own = _own(owner)
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


def _own(owner: Owner) -> str:
    return f'namespace="{owner.namespace}",{POD_LABEL_DEPLOYMENT}="{owner.name}"'


_PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Requests per second",
        "reqps",
        (("{{status}}", "sum by (status) (rate(kimistack_router_requests_total{OWN}[5m]))"),),
    ),
    (
        "Time to first token",
        "s",
        tuple(
            (
                f"p{p}",
                f"histogram_quantile(0.{p}, "
                "sum by (le) (rate(kimistack_router_ttft_seconds_bucket{OWN}[5m])))",
            )
            for p in (50, 95)
        ),
    ),
    (
        "Time between chunks",
        "s",
        tuple(
            (
                f"p{p}",
                f"histogram_quantile(0.{p}, "
                "sum by (le) (rate(kimistack_router_itl_seconds_bucket{OWN}[5m])))",
            )
            for p in (50, 95)
        ),
    ),
    (
        "Output tokens per second",
        "short",
        (("tokens", "sum(rate(kimistack_router_output_tokens_total{OWN}[5m]))"),),
    ),
    (
        "Prompt tokens by where their KV came from",
        "short",
        (
            (
                "{{source}}",
                "sum by (source) (rate(kimistack_router_prompt_tokens_total{OWN}[5m]))",
            ),
        ),
    ),
    (
        "Waiting and running by worker",
        "short",
        (
            ("{{pod}} waiting", "kimistack_worker_waiting{OWN}"),
            ("{{pod}} running", "kimistack_worker_running{OWN}"),
        ),
    ),
    (
        "Hand-off bytes per second",
        "Bps",
        (("bytes", "sum(rate(kimistack_router_hand_off_bytes_total{OWN}[5m]))"),),
    ),
    (
        "Pool pages",
        "short",
        (("{{state}}", "sum by (state) (kimistack_umbp_pages{OWN})"),),
    ),
    (
        "Pool blocks asked for and not served",
        "short",
        (("{{reason}}", "sum by (reason) (rate(kimistack_umbp_lost_blocks_total{OWN}[5m]))"),),
    ),
    (
        "Workers planned onto",
        "short",
        (("{{pod}}", "sum by (pod) (kimistack_router_worker_ready{OWN})"),),
    ),
)
"""Title, unit, and the legend and query of each series; {OWN} is replaced by the selector."""


def dashboard(owner: Owner) -> Manifest:
    """A ConfigMap with a Grafana dashboard, labelled as Grafana's sidecar looks for it."""
    own = "{" + _own(owner) + "}"
    panels = [_panel(i, panel, own) for i, panel in enumerate(_PANELS)]
    board = {
        "title": f"Kimistack {owner.namespace}/{owner.name}",
        "uid": f"kimistack-{owner.name}",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }
    text = json.dumps(board, indent=1, sort_keys=True) + "\n"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(
            owner, f"{owner.name}-dashboard", "deployment", labels={"grafana_dashboard": "1"}
        ),
        "data": {f"{owner.name}.json": text},
    }


def _panel(
    index: int, panel: tuple[str, str, tuple[tuple[str, str], ...]], own: str
) -> dict[str, Any]:
    title, unit, series = panel
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": index + 1,
        "title": title,
        "type": "timeseries",
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": source,
                "legendFormat": legend,
                "expr": query.replace("{OWN}", own),
            }
            for position, (legend, query) in enumerate(series)
        ],
    }
