"""How fast each link really is: seconds at the start of a transfer, seconds per byte. Pure.

A transfer that shared its link with others is counted as if it had moved their bytes too, so that a
busy link does not look like a slow one. What is known fades to the data sheet within a minute: a
link that nobody used says nothing about now. No link is taken to be faster than its data sheet.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from kimi_runtime.router.estimate.regression import Fit, Regression
from kimi_runtime.spec.hardware import LinkSpec

MAX_LINKS = 65_536
AGE_OUT_S = 60.0
SHEET_SHARE = 0.7
"""Of a data sheet's rate, what a transfer is taken to reach before any was seen."""
RELATIVE_SD = 0.5
FARTHEST = 64.0
"""A link that lost its lanes or its peer may be slower by this; a GPU never is."""


class LinkRate(NamedTuple):
    """A link now; `relative_var` is of the seconds a transfer takes."""

    start_s: float
    per_byte_s: float
    relative_var: float


@dataclass(slots=True)
class _Known:
    sheet_per_byte_s: float
    learned: Regression
    fit: Fit | None = None
    rate: LinkRate | None = None


class LinkRates:
    """Rates by link name. `of` a link nobody registered is None: it cannot be used."""

    def __init__(self, *, max_links: int = MAX_LINKS) -> None:
        self._max_links = max_links
        self._links: OrderedDict[str, _Known] = OrderedDict()
        self.least_per_byte_s = 0.0
        """Of the fastest link there ever was, by data sheet."""

    def expect(self, link: str, spec: LinkSpec) -> None:
        """The link exists and is of this kind; what was learned of it stays."""
        if link in self._links:
            return
        sheet_s = 1 / spec.rate
        learned = Regression(
            (max(spec.latency, 1e-9), sheet_s / SHEET_SHARE),
            relative_sd=RELATIVE_SD,
            age_out_s=AGE_OUT_S,
            farthest=FARTHEST,
        )
        self._links[link] = _Known(sheet_s, learned)
        self.least_per_byte_s = min(self.least_per_byte_s or sheet_s, sheet_s)
        if len(self._links) > self._max_links:
            self._links.popitem(last=False)

    def of(self, link: str, *, now_s: float) -> LinkRate | None:
        """The link's rate now."""
        known = self._links.get(link)
        if known is None:
            return None
        if known.rate is not None and not known.learned.observations:
            return known.rate
        fit = known.learned.fit(now_s=now_s)
        if fit is not known.fit:
            start_s, per_byte_s = fit.coefficients
            per_byte_s = max(per_byte_s, known.sheet_per_byte_s)
            var = fit.noise_var + fit.covariance[1][1] / per_byte_s**2
            known.fit, known.rate = fit, LinkRate(start_s, per_byte_s, var)
        return known.rate

    def observe(
        self, link: str, size_bytes: int, seconds: float, *, sharing: float, now_s: float
    ) -> bool:
        """A transfer took `seconds`, on average one of `sharing` (>= 1); True if speed changed."""
        known = self._links.get(link)
        if known is None or size_bytes <= 0:
            return False
        return known.learned.observe((1.0, size_bytes * max(sharing, 1.0)), seconds, now_s=now_s)

    def forget(self, link: str) -> None:
        """The link is gone."""
        self._links.pop(link, None)
