"""A dashboard for Grafana over the metrics the processes export."""

import json
from typing import Any

from kimi_operator.desired.labels import Owner, metadata_of
from kimi_operator.observed import Manifest

POD_LABEL_DEPLOYMENT = "kimistack_dev_deployment"
"""A pod's label as the Prometheus operator copies it to series."""


def own_series(owner: Owner) -> str:
    """What selects the series of one deployment, without braces."""
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
        "Requests not begun",
        "short",
        (
            # every router knows what waits at workers, and only of itself what it holds
            ("waiting", "max(kimistack_router_waiting_requests{OWN})"),
            ("held while no worker runs", "sum(kimistack_router_parked_requests{OWN})"),
        ),
    ),
    (
        "Time in the queue",
        "s",
        (
            ("before prefill", "max(kimistack_router_queue_seconds{OWN})"),
            ("hand-off backlog", "max(kimistack_router_transfer_backlog_seconds{OWN})"),
        ),
    ),
    (
        "KV memory in use where tokens are decoded",
        "percentunit",
        (("used", "max(kimistack_router_kv_use{OWN})"),),
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
    (
        "Seconds since a worker answered any router",
        "s",
        (("{{worker}}", "min by (worker) (kimistack_router_worker_silent_seconds{OWN})"),),
    ),
)
"""Title, unit, and the legend and query of each series; {OWN} is replaced by the selector."""


def dashboard(owner: Owner) -> Manifest:
    """A ConfigMap with a Grafana dashboard, labelled as Grafana's sidecar looks for it."""
    own = "{" + own_series(owner) + "}"
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
