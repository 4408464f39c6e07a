"""What a router's metrics say of its workers."""

import urllib.request

from samples import Samples


def planned_onto(router: str) -> set[str]:
    """Workers that the router at this address plans onto now."""
    with urllib.request.urlopen(f"{router}/metrics", timeout=5) as answer:
        samples = Samples(answer.read().decode())
    ready = samples.by("kimistack_router_worker_ready", "worker")
    return {worker for worker, value in ready.items() if value == 1.0}
