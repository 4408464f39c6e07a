"""Bytes on their way over links that they share: who gets how much, and when a new flow would end.

A flow takes one route, a few links; each link's rate is divided max-min fairly among the flows on
it (progressive filling, Bertsekas and Gallager, "Data Networks", 6.5.2): nobody could be faster
without making a slower one slower still. Pure: time is an argument.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kimi_runtime.router.estimate.moments import Estimate
from kimi_runtime.router.estimate.rates import LinkRates

MAX_FLOWS = 16_384
OVERDUE_S = 30.0
"""A flow that should have ended this long ago and that nobody ended is forgotten."""


def max_min_rates(
    routes: Mapping[str, Sequence[str]], capacities: Mapping[str, float]
) -> dict[str, float]:
    """Bytes per second of each flow; `routes` are links by flow, `capacities` rates by link.

    A flow without links is infinitely fast; one over a link without capacity stands still.
    """
    if len(routes) == 1:
        ((alone, links),) = routes.items()
        if len(set(links)) == len(links):  # it has its narrowest link for itself
            narrowest = min((capacities.get(link, 0.0) for link in links), default=math.inf)
            return {alone: max(narrowest, 0.0)}
    rates = {flow: math.inf for flow, links in routes.items() if not links}
    open_flows = {flow: links for flow, links in routes.items() if links}
    left = dict(capacities)
    while open_flows:
        on_link: dict[str, int] = {}
        for links in open_flows.values():
            for link in links:
                on_link[link] = on_link.get(link, 0) + 1
        tightest = min(on_link, key=lambda link: (left.get(link, 0.0) / on_link[link], link))
        share = max(left.get(tightest, 0.0), 0.0) / on_link[tightest]
        for flow in [flow for flow, links in open_flows.items() if tightest in links]:
            rates[flow] = share
            for link in open_flows.pop(flow):
                left[link] = left.get(link, 0.0) - share
    return rates


@dataclass(slots=True)
class Flow:
    """Bytes of one transfer. `left_bytes` is what remained at the last time anything changed."""

    links: tuple[str, ...]
    size_bytes: float
    left_bytes: float
    started_s: float
    rate: float = 0.0
    shared_s: float = 0.0
    """Seconds times flows on its busiest link: divided by its duration, how many shared."""
    ended_s: float | None = None


@dataclass(slots=True)
class Flows:
    """The transfers that are under way, as they were planned. Bounded by `max_flows`."""

    rates: LinkRates
    max_flows: int = MAX_FLOWS
    refused: int = 0
    _flows: dict[str, Flow] = field(default_factory=dict)
    _on_link: dict[str, dict[str, None]] = field(default_factory=dict)
    _now_s: float = -math.inf
    _next_end_s: float = math.inf
    _swept_s: float = -math.inf

    def __len__(self) -> int:
        """How many transfers are known."""
        return len(self._flows)

    def start(self, name: str, links: Sequence[str], size_bytes: float, *, now_s: float) -> bool:
        """A transfer begins; False if there are too many to keep track of, or nothing to move."""
        self.advance(now_s)
        self.end(name, now_s=now_s)
        if len(self._flows) >= self.max_flows or not links or size_bytes <= 0:
            self.refused += len(self._flows) >= self.max_flows
            return False
        self._flows[name] = Flow(tuple(links), size_bytes, size_bytes, now_s)
        for link in links:
            self._on_link.setdefault(link, {})[name] = None
        self._divide()
        return True

    def end(self, name: str, *, now_s: float) -> Flow | None:
        """A transfer ended or was cancelled. Ending twice changes nothing."""
        self.advance(now_s)
        flow = self._flows.pop(name, None)
        if flow is None:
            return None
        self._leave(name, flow)
        self._divide()
        return flow

    def sharing(self, flow: Flow, *, now_s: float) -> float:
        """On average how many flows, itself included, shared the busiest of its links."""
        return max(flow.shared_s / max(now_s - flow.started_s, 1e-9), 1.0)

    def advance(self, now_s: float) -> None:
        """Let time pass; flows that have moved everything make room. Time never runs back."""
        while self._next_end_s <= now_s:
            self._pass(self._next_end_s)
            for name, flow in self._flows.items():
                if flow.ended_s is None and flow.left_bytes <= 1e-6 * flow.size_bytes:
                    flow.left_bytes, flow.ended_s = 0.0, self._now_s
                    self._leave(name, flow)
            self._divide()
        self._pass(now_s)
        if now_s - self._swept_s > OVERDUE_S:
            self._swept_s = now_s
            for name in [n for n, flow in self._flows.items() if self._overdue(flow)]:
                self._leave(name, self._flows.pop(name))
            self._divide()

    def any_busy(self, links: Iterable[str]) -> bool:
        """Whether anything passes over one of the links."""
        return not self._on_link.keys().isdisjoint(links)

    def seconds(
        self, links: Sequence[str], size_bytes: float, *, operations: int = 1
    ) -> Estimate | None:
        """How long a transfer that started now would take; None if no bytes can pass.

        On each link alone, flows that share it equally and end one after the other let s bytes
        through in (s + sum_i min(r_i, s)) / rate, r_i being what the others have left; a route
        takes as long as its slowest link. Each operation pays the links' latencies. As of the last
        `advance`.
        """
        if size_bytes <= 0 or not links:
            return Estimate(0.0)
        start_s, slowest, var = 0.0, 0.0, 0.0
        of, now_s, on_link = self.rates.of, self._now_s, self._on_link
        for link in links:
            rate = of(link, now_s=now_s)
            if rate is None:
                return None
            work = size_bytes + self._behind(link, size_bytes) if link in on_link else size_bytes
            first_s, per_byte_s, relative_var = rate
            start_s += first_s * operations
            passing_s = work * per_byte_s
            if passing_s > slowest:
                slowest, var = passing_s, relative_var * passing_s * passing_s
        return Estimate(start_s + slowest, var)

    def look(self, links: Iterable[str]) -> None:
        """Bring what is known of these links up to now, as asking `seconds` does.

        What is known fades from one look to the next, so that who looks decides what is found: a
        plan that need not be priced must not change what later decisions see.
        """
        for link in links:
            self.rates.of(link, now_s=self._now_s)

    def delay_s(self, links: Sequence[str], size_bytes: float) -> float:
        """Seconds that the flows on these links would lose together to a new one."""
        total, on_link = 0.0, self._on_link
        for link in links:
            rate = self.rates.of(link, now_s=self._now_s) if link in on_link else None
            if rate is not None:
                total += self._behind(link, size_bytes) * rate.per_byte_s
        return total

    def _behind(self, link: str, size_bytes: float) -> float:
        others = self._on_link.get(link)
        if not others:
            return 0.0
        return sum(min(self._flows[name].left_bytes, size_bytes) for name in others)

    def _pass(self, now_s: float) -> None:
        if now_s <= self._now_s:
            return
        if self._flows and self._now_s > -math.inf:
            passed_s = now_s - self._now_s
            for flow in self._flows.values():
                if flow.ended_s is None:
                    flow.left_bytes = max(flow.left_bytes - flow.rate * passed_s, 0.0)
                    flow.shared_s += passed_s * max(
                        len(self._on_link.get(link, ())) for link in flow.links
                    )
        self._now_s = now_s

    def _divide(self) -> None:
        moving = {n: flow.links for n, flow in self._flows.items() if flow.ended_s is None}
        rates = max_min_rates(moving, self._capacities(moving.values())) if moving else {}
        self._next_end_s = math.inf
        for name, rate in rates.items():
            flow = self._flows[name]
            flow.rate = rate
            if rate > 0:
                self._next_end_s = min(self._next_end_s, self._now_s + flow.left_bytes / rate)

    def _capacities(self, routes: Iterable[Sequence[str]]) -> dict[str, float]:
        capacities: dict[str, float] = {}
        for links in routes:
            for link in links:
                if link not in capacities:
                    rate = self.rates.of(link, now_s=self._now_s)
                    capacities[link] = 0.0 if rate is None else 1 / rate.per_byte_s
        return capacities

    def _leave(self, name: str, flow: Flow) -> None:
        for link in flow.links:
            others = self._on_link.get(link)
            if others is not None:
                others.pop(name, None)
                if not others:
                    del self._on_link[link]

    def _overdue(self, flow: Flow) -> bool:
        if flow.ended_s is not None:
            return self._now_s - flow.ended_s > OVERDUE_S
        # a link that carries nothing must not keep its flows for ever
        return flow.rate <= 0 and self._now_s - flow.started_s > OVERDUE_S
