"""What a router's metrics say of its workers."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def planned_onto(router: str) -> set[str]:
    """Workers that the router at this address plans onto now."""
    with urllib.request.urlopen(f"{router}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        sample.labels["worker"]
        for family in families
        if family.name == "kimistack_router_worker_ready"
        for sample in family.samples
        if sample.value == 1.0
    }
