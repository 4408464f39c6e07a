"""Who costs the same as whom, so that one of them need not be priced. Pure.

Two workers are twins if everything that a price is made of is equal: what they have and have to do,
what was learned of them, and their own links, which nobody else may be using.
"""

from collections.abc import Sequence
from operator import attrgetter

from kimi_runtime.router.cost.hits import Found
from kimi_runtime.router.cost.prices import Context
from kimi_runtime.router.view import WorkerView

Alike = int | tuple[int, ...]
"""Equal for twins."""

_LOAD = attrgetter(
    *("kind", "waiting", "running", "queued_tokens", "cached_tokens", "free_blocks"),
    *("total_blocks", "block_tokens", "max_context_tokens", "max_running", "releases", "line"),
    *("utilisation", "unused_blocks", "space_price_s", "checkpoints", "certain", "age_s"),
    *("streams", "queued_depth"),
)
"""Of a view, what a price is made of whatever the leg."""


class Twins:
    """Compares workers in one decision."""

    def __init__(self, context: Context) -> None:
        self._context, self._models, self._routes = context, context.models, context.routes
        self._prefills: dict[str, int] = {}
        self._decodes: dict[str, int] = {}
        self._numbers: dict[object, int] = {}

    def prefill(self, worker: WorkerView, found: Found) -> int:
        """Equal for prefill workers that cost the same with any decode worker elsewhere."""
        name = worker.name
        known = self._prefills.get(name)
        if known is not None:
            return known
        models, routes = self._models, self._routes
        links = routes.outbound(worker)
        where = named = ""
        if found:
            where = worker.node  # what is read comes over other links
            named = name if any(source.name == name for _, source in found) else ""
            reads = [link for _, source in found for link in routes.to_worker(source, worker)]
            links = (*[link for link in reads if link.startswith(f"{name}/")], *links)
        hits = [models.hits.ratio(name, tier) for tier in ("hbm", *[s.tier for _, s in found])]
        learned = (*models.queues.factor(name), *hits)
        alike = (where, named, id(found), self._own_links(worker, links), learned)
        made = self._prefills[name] = self._number((*alike, self._alike(worker)))
        return made

    def decode(self, worker: WorkerView) -> int:
        """Equal for decode workers that cost the same with any prefill worker elsewhere."""
        known = self._decodes.get(worker.name)
        if known is None:
            links = self._own_links(worker, self._routes.inbound(worker))
            known = self._decodes[worker.name] = self._number((links, self._alike(worker)))
        return known

    def near(self, prefill: WorkerView, found: Found, decode: WorkerView) -> tuple[int, ...]:
        """Equal for pairs on one node each that cost the same."""
        near = self._routes.near
        links = self._own_links(prefill, near(prefill)), self._own_links(decode, near(decode))
        return self._number(links), self.prefill(prefill, found), self.decode(decode)

    def _number(self, alike: object) -> int:
        """Equal for what is equal, and sooner compared."""
        return self._numbers.setdefault(alike, len(self._numbers))

    def _own_links(self, worker: WorkerView, links: Sequence[str]) -> object:
        """Equal for workers whose own links are as fast, as far as anybody knows. Who has something
        on one of them, or owns the session, is like nobody.
        """
        context = self._context
        if worker.name in context.request.owners or context.flows.any_busy(links):
            return worker.name
        of, now_s = self._models.links.of, context.now_s
        return tuple([of(link, now_s=now_s) for link in links])

    def _alike(self, one: WorkerView) -> object:
        return _LOAD(one), self._models.speeds(one.kind).bias(one.name)
