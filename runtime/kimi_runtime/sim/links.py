"""Links that transfers share: each is given its max-min fair rate, anew whenever one comes or goes.

The same rule as the planner's picture of them (`router.flows`), here for what really happens. Only
transfers that share a link with what changed, directly or over others, are looked at. Pure.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kimi_runtime.router.flows import max_min_rates
from kimi_runtime.sim.timeline import Timeline, Timer


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way over `links`."""

    name: str
    links: tuple[str, ...]
    size_bytes: float
    done: Callable[[], None]
    left_bytes: float
    started_s: float
    rate: float = 0.0
    since_s: float = 0.0
    timer: Timer | None = None


@dataclass(slots=True)
class Links:
    """`rates` in bytes per second and `latencies` in seconds, by link."""

    timeline: Timeline
    rates: dict[str, float] = field(default_factory=dict)
    latencies: Mapping[str, float] = field(default_factory=dict)
    moved_bytes: dict[str, float] = field(default_factory=dict)
    _on: dict[str, dict[str, Transfer]] = field(default_factory=dict)
    _number: int = 0

    def start(self, links: Sequence[str], size_bytes: float, done: Callable[[], None]) -> Transfer:
        """Move bytes; `done` is called when all have arrived. KeyError for an unknown link."""
        self._number += 1
        now_s = self.timeline.now_s
        made = Transfer(
            f"t{self._number}", tuple(links), size_bytes, done, size_bytes, now_s, since_s=now_s
        )
        for link in made.links:
            if link not in self.rates:
                raise KeyError(f"no link {link!r} among {len(self.rates)}")
        start_s = sum(self.latencies.get(link, 0.0) for link in made.links)
        made.timer = self.timeline.after(start_s, lambda: self._begin(made))
        return made

    def cancel(self, transfer: Transfer) -> None:
        """Stop it; `done` is not called. Cancelling one that is done changes nothing."""
        if transfer.timer is None:
            return
        transfer.timer.cancel()
        transfer.timer = None
        if self._leave(transfer):
            self._share(transfer.links)

    def set_rate(self, link: str, rate: float) -> None:
        """The link is as fast as this from now on; 0 stops what is on it."""
        self.rates[link] = rate
        self._share((link,))

    def busy(self, link: str) -> bool:
        """Whether anything is on it."""
        return link in self._on

    @property
    def moving(self) -> int:
        """Transfers under way."""
        return len({name for on in self._on.values() for name in on})

    def _begin(self, transfer: Transfer) -> None:
        if not transfer.links or transfer.size_bytes <= 0:
            transfer.timer = None
            transfer.done()
            return
        transfer.since_s = self.timeline.now_s
        for link in transfer.links:
            self._on.setdefault(link, {})[transfer.name] = transfer
        self._share(transfer.links)

    def _end(self, transfer: Transfer) -> None:
        transfer.timer = None
        self._leave(transfer)
        for link in transfer.links:
            self.moved_bytes[link] = self.moved_bytes.get(link, 0.0) + transfer.size_bytes
        self._share(transfer.links)
        transfer.done()

    def _leave(self, transfer: Transfer) -> bool:
        was_on = False
        for link in transfer.links:
            on = self._on.get(link)
            if on is not None and on.pop(transfer.name, None) is not None:
                was_on = True
                if not on:
                    del self._on[link]
        return was_on

    def _share(self, links: Iterable[str]) -> None:
        """Give everybody who may be concerned their rate."""
        if self._on.keys().isdisjoint(links):
            return
        touched = self._component(links)
        if not touched:
            return
        now_s = self.timeline.now_s
        routes = {name: transfer.links for name, transfer in touched.items()}
        for name, rate in sorted(max_min_rates(routes, self.rates).items()):
            transfer = touched[name]
            if rate == transfer.rate and transfer.timer is not None and transfer.timer.act:
                continue
            passed_s = now_s - transfer.since_s
            transfer.left_bytes = max(transfer.left_bytes - transfer.rate * passed_s, 0.0)
            transfer.rate, transfer.since_s = rate, now_s
            if transfer.timer is not None:
                transfer.timer.cancel()
            left_s = transfer.left_bytes / rate if rate > 0 else math.inf
            transfer.timer = self._ending(transfer, now_s + left_s)

    def _ending(self, transfer: Transfer, due_s: float) -> Timer:
        if math.isinf(due_s):
            return Timer(due_s, None)  # it stands still until its link's rate changes
        return self.timeline.at(due_s, lambda: self._end(transfer))

    def _component(self, links: Iterable[str]) -> dict[str, Transfer]:
        found: dict[str, Transfer] = {}
        open_links, seen = list(links), set(links)
        while open_links:
            for name, transfer in self._on.get(open_links.pop(), {}).items():
                if name not in found:
                    found[name] = transfer
                    more = [link for link in transfer.links if link not in seen]
                    seen.update(more)
                    open_links += more
        return found
