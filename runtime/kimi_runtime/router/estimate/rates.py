"""How fast each link really is: seconds at the start of a transfer, seconds per byte. Pure.

A transfer that shared its link with others is counted as if it had moved their bytes too, so that a
busy link does not look like a slow one. What is known fades to the data sheet within a minute: a
link that nobody used says nothing about now.
"""

from collections import OrderedDict

from kimi_runtime.router.estimate.regression import Fit, Regression
from kimi_runtime.spec.hardware import LinkSpec

MAX_LINKS = 65_536
AGE_OUT_S = 60.0
SHEET_SHARE = 0.7
"""Of a data sheet's rate, what a transfer is taken to reach before any was seen."""
RELATIVE_SD = 0.5


class LinkRates:
    """Rates by link name. `of` a link nobody registered is None: it cannot be used."""

    def __init__(self, *, max_links: int = MAX_LINKS) -> None:
        self._max_links = max_links
        self._links: OrderedDict[str, Regression] = OrderedDict()

    def expect(self, link: str, spec: LinkSpec) -> None:
        """The link exists and is of this kind; what was learned of it stays."""
        if link not in self._links:
            seconds_per_byte = 1 / (SHEET_SHARE * spec.rate)
            self._links[link] = Regression(
                (max(spec.latency, 1e-9), seconds_per_byte),
                relative_sd=RELATIVE_SD,
                age_out_s=AGE_OUT_S,
            )
            if len(self._links) > self._max_links:
                self._links.popitem(last=False)

    def of(self, link: str, *, now_s: float) -> Fit | None:
        """Coefficients (seconds at the start, seconds per byte) with their covariance."""
        known = self._links.get(link)
        return None if known is None else known.fit(now_s=now_s)

    def observe(
        self, link: str, size_bytes: int, seconds: float, *, sharing: float, now_s: float
    ) -> bool:
        """A transfer took `seconds`, on average one of `sharing` (>= 1); True if speed changed."""
        known = self._links.get(link)
        if known is None or size_bytes <= 0:
            return False
        return known.observe((1.0, size_bytes * max(sharing, 1.0)), seconds, now_s=now_s)

    def forget(self, link: str) -> None:
        """The link is gone."""
        self._links.pop(link, None)
