"""A dashboard for Grafana over the metrics the processes export."""

import json
from typing import Any, NamedTuple

from kimi_operator.desired.labels import Owner, metadata_of
from kimi_operator.observed import Manifest

POD_LABEL_DEPLOYMENT = "kimistack_dev_deployment"
"""A pod's label as the Prometheus operator copies it to series."""


def own_series(owner: Owner) -> str:
    """What selects the series of one deployment, without braces."""
    return f'namespace="{owner.namespace}",{POD_LABEL_DEPLOYMENT}="{owner.name}"'


class Panel(NamedTuple):
    """A graph: legend and query of each series, where {OWN} is replaced by the selector."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]


def _share(metric: str, label: str) -> str:
    """The part that each value of `label` has of all blocks looked up in the pool."""
    part = f"sum by ({label}) (rate(kimistack_umbp_{metric}{{OWN}}[5m]))"
    return f"{part} / scalar(sum(rate(kimistack_umbp_looked_up_blocks_total{{OWN}}[5m])))"


_SERVING: tuple[Panel, ...] = (
    Panel(
        "Requests per second",
        "reqps",
        (("{{status}}", "sum by (status) (rate(kimistack_router_requests_total{OWN}[5m]))"),),
    ),
    Panel(
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
    Panel(
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
    Panel(
        "Output tokens per second",
        "short",
        (("tokens", "sum(rate(kimistack_router_output_tokens_total{OWN}[5m]))"),),
    ),
    Panel(
        "Prompt tokens by where their KV came from",
        "short",
        (
            (
                "{{source}}",
                "sum by (source) (rate(kimistack_router_prompt_tokens_total{OWN}[5m]))",
            ),
        ),
    ),
    Panel(
        "Waiting and running by worker",
        "short",
        (
            ("{{pod}} waiting", "kimistack_worker_waiting{OWN}"),
            ("{{pod}} running", "kimistack_worker_running{OWN}"),
        ),
    ),
    Panel(
        "Requests not begun",
        "short",
        (
            # every router knows what waits at workers, and only of itself what it holds
            ("waiting", "max(kimistack_router_waiting_requests{OWN})"),
            ("held while no worker runs", "sum(kimistack_router_parked_requests{OWN})"),
        ),
    ),
    Panel(
        "Time in the queue",
        "s",
        (
            ("before prefill", "max(kimistack_router_queue_seconds{OWN})"),
            ("hand-off backlog", "max(kimistack_router_transfer_backlog_seconds{OWN})"),
        ),
    ),
    Panel(
        "KV memory in use where tokens are decoded",
        "percentunit",
        (("used", "max(kimistack_router_kv_use{OWN})"),),
    ),
    Panel(
        "Hand-off bytes per second",
        "Bps",
        (("bytes", "sum(rate(kimistack_router_hand_off_bytes_total{OWN}[5m]))"),),
    ),
    Panel(
        "Workers planned onto",
        "short",
        (("{{pod}}", "sum by (pod) (kimistack_router_worker_ready{OWN})"),),
    ),
    Panel(
        "Seconds since a worker answered any router",
        "s",
        (("{{worker}}", "min by (worker) (kimistack_router_worker_silent_seconds{OWN})"),),
    ),
)

_POOL: tuple[Panel, ...] = (
    Panel(
        "Looked-up blocks by where they were found",
        "percentunit",
        (("{{tier}}", _share("hit_blocks_total", "tier")),),
    ),
    Panel(
        "Looked-up blocks by why they were lost",
        "percentunit",
        (("{{reason}}", _share("lost_blocks_total", "reason")),),
    ),
    Panel(
        "Blocks per second",
        "short",
        (
            ("looked up", "sum(rate(kimistack_umbp_looked_up_blocks_total{OWN}[5m]))"),
            ("put", "sum(rate(kimistack_umbp_put_blocks_total{OWN}[5m]))"),
            ("evicted", "sum(rate(kimistack_umbp_evicted_blocks_total{OWN}[5m]))"),
        ),
    ),
    Panel(
        "More memory would have found, of those priced",
        "percentunit",
        (
            (
                "{{more}} more",
                "sum by (more) (rate(kimistack_umbp_ghost_kept_blocks_total{OWN}[5m])) "
                "/ scalar(sum(rate(kimistack_umbp_ghost_asked_blocks_total{OWN}[5m])))",
            ),
        ),
    ),
    Panel(
        "Pages",
        "short",
        (("{{state}}", "sum by (state) (kimistack_umbp_pages{OWN})"),),
    ),
    Panel(
        "Bytes on SSD",
        "bytes",
        (("{{kind}}", "sum by (kind) (kimistack_umbp_ssd_bytes{OWN})"),),
    ),
    Panel(
        "Fetched from peers, bytes per second",
        "Bps",
        (("{{owner}}", "sum by (owner) (rate(kimistack_umbp_peer_bytes_total{OWN}[5m]))"),),
    ),
    Panel(
        "Peers set aside or not followed, by who sees it",
        "short",
        (
            ("{{pod}} set aside", "sum by (pod) (kimistack_umbp_peer_quarantined{OWN})"),
            ("{{pod}} not followed", "count by (pod) (kimistack_umbp_peer_feed_exact{OWN} == 0)"),
        ),
    ),
    Panel(
        "Daemons by how far they have come",
        "short",
        (("{{phase}}", "sum by (phase) (kimistack_umbp_phase{OWN})"),),
    ),
    Panel(
        "Damaged blocks per hour",
        "short",
        (
            (
                "dropped",
                'sum(increase(kimistack_umbp_dropped_blocks_total{OWN,reason="corrupt"}[1h]))',
            ),
            ("read", 'sum(increase(kimistack_umbp_lost_blocks_total{OWN,reason="corrupt"}[1h]))'),
        ),
    ),
    Panel(
        "Days until the pool's certificate ends",
        "d",
        (("{{pod}}", "min by (pod) (kimistack_umbp_certificate_days_left{OWN})"),),
    ),
)

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Serving", _SERVING),
    ("KV pool: where lookups end", _POOL),
)
"""Each row's title and its panels, two side by side."""


def dashboard(owner: Owner) -> Manifest:
    """A ConfigMap with a Grafana dashboard, labelled as Grafana's sidecar looks for it."""
    panels = _laid_out(own_series(owner))
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


def _laid_out(own: str) -> list[dict[str, Any]]:
    """Every row's head and panels, each with its place."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS:
        head = {"type": "row", "title": title, "collapsed": False, "panels": []}
        placed.append(head | {"gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        y += 1
        for index, panel in enumerate(panels):
            place = {"h": 8, "w": 12, "x": 12 * (index % 2), "y": y + 8 * (index // 2)}
            placed.append(_graph(panel, own) | {"gridPos": place})
        y += 8 * -(-len(panels) // 2)
    return [panel | {"id": number} for number, panel in enumerate(placed, 1)]


def _graph(panel: Panel, own: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "title": panel.title,
        "type": "timeseries",
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": source,
                "legendFormat": legend,
                "expr": query.replace("{OWN", "{" + own),
            }
            for position, (legend, query) in enumerate(panel.series)
        ],
    }
