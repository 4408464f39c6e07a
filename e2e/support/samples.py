"""A process's metrics, as its /metrics told them."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families


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
