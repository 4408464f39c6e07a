"""A process's metrics, as its /metrics told them."""

import time
from collections import Counter
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from nodes import Manifest, Nodes


class Samples:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, *values: str) -> float:
        """The sum over all samples of that name that have these values among their labels'."""
        wanted = set(values)
        return sum(
            one.value
            for one in self._samples
            if one.name == name and wanted <= set(one.labels.values())
        )

    def by(self, name: str, label: str) -> Counter[str]:
        """The samples of that name, summed by the values of a label."""
        found: Counter[str] = Counter()
        for one in self._samples:
            if one.name == name:
                found[one.labels[label]] += one.value  # type: ignore[assignment]
        return found


def scheme_of(pod: Manifest) -> str:
    """What a pod speaks: http or https."""
    names = [port["name"] for port in pod["spec"]["containers"][0]["ports"]]
    return next(name for name in names if name in ("http", "https"))


def samples_of(nodes: Nodes, pod: Manifest) -> Samples:
    """A pod's metrics, through the API server."""
    spoken, metadata = scheme_of(pod), pod["metadata"]
    ports = pod["spec"]["containers"][0]["ports"]
    port = next(one["containerPort"] for one in ports if one["name"] == spoken)
    name = f"{'https:' if spoken == 'https' else ''}{metadata['name']}:{port}"
    at = f"/api/v1/namespaces/{metadata['namespace']}/pods/{name}/proxy/metrics"
    return Samples(nodes.kubectl("get", "--raw", at))


def until(holds: Callable[[], bool], within_s: float, what: str) -> None:
    """Ask again and again; it fails where that was not so in the time."""
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
