"""Who costs the same as whom, so that one of them need not be priced. Pure.

Two workers are twins if everything that a price is made of is equal: what they have and have to do,
what was learned of them, and their own links, which nobody else may be using.
"""

from collections.abc import Sequence

from kimi_runtime.router.cost.hits import Found
from kimi_runtime.router.cost.prices import Context
from kimi_runtime.router.view import WorkerView

Alike = tuple[object, ...]
"""Equal for twins."""


class Twins:
    """Compares workers in one decision."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._prefills: dict[str, Alike] = {}

    def prefill(self, worker: WorkerView, found: Found) -> Alike:
        """Equal for prefill workers that cost the same with any decode worker elsewhere."""
        known = self._prefills.get(worker.name)
        if known is not None:
            return known
        models, routes, name = self._context.models, self._context.routes, worker.name
        where = worker.node if found else ""  # what is read comes over other links
        named = name if any(source.name == name for _, source in found) else ""
        tiers = ("hbm", *(source.tier for _, source in found))
        learned = (*models.queues.factor(name), *(models.hits.ratio(name, tier) for tier in tiers))
        reads = [link for _, source in found for link in routes.to_worker(source, worker)]
        own = [link for link in reads if link.startswith(f"{name}/")]
        links = self._own_links(worker, (*own, *routes.outbound(worker)))
        alike = (where, named, id(found), links, learned, *self._alike(worker))
        self._prefills[name] = alike
        return alike

    def decode(self, worker: WorkerView) -> Alike:
        """Equal for decode workers that cost the same with any prefill worker elsewhere."""
        inbound = self._context.routes.inbound(worker)
        return (self._own_links(worker, inbound), *self._alike(worker))

    def near(self, prefill: WorkerView, found: Found, decode: WorkerView) -> Alike:
        """Equal for pairs on one node each that cost the same."""
        out, into = self._context.routes.between(prefill, decode)
        links = self._own_links(prefill, (out,)), self._own_links(decode, (into,))
        return (links, self.prefill(prefill, found), self.decode(decode))

    def _own_links(self, worker: WorkerView, links: Sequence[str]) -> Alike:
        """Equal for workers whose own links are as fast, as far as anybody knows. Who has something
        on one of them, or owns the session, is like nobody.
        """
        context = self._context
        if worker.name in context.request.owners or any(map(context.flows.busy, links)):
            return (worker.name,)
        rates, now_s = context.models.links, context.now_s
        return tuple([rates.of(link, now_s=now_s) for link in links])

    def _alike(self, one: WorkerView) -> Alike:
        return (
            *(one.kind, one.waiting, one.running, one.queued_tokens, one.cached_tokens),
            *(one.free_blocks, one.total_blocks, one.block_tokens, one.max_context_tokens),
            *(one.max_running, one.releases, one.line, one.utilisation, one.unused_blocks),
            *(one.space_price_s, one.checkpoints, one.certain, one.age_s, one.streams),
            self._context.models.speeds(one.kind).bias(one.name),
        )
