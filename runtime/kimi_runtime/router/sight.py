"""A worker as decisions see it; its last view is kept while nothing of it changes. Pure."""

from functools import lru_cache

from kimi_runtime.router.insight import Facts
from kimi_runtime.router.ledger import Load
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.router.view import WorkerView
from kimi_runtime.spec.worker import WorkerInfo


class Sight:
    """Of one worker process, which is what `info` says of it.

    `reads_pools` and `streams` are those of `WorkerView`.
    """

    __slots__ = (
        *("_abilities", "_facts", "_first", "_last", "_load", "_sizes"),
        *("geometry", "info", "view"),
    )

    def __init__(self, name: str, info: WorkerInfo, *, reads_pools: bool, streams: int) -> None:
        self.info, self.geometry = info, geometry_of(info)
        able = info.capabilities
        self._first = name, info.role, able.roles, info.revision, info.layout
        self._sizes = info.total_blocks, info.block_tokens, info.max_context_tokens
        self._abilities = able.grammar, able.logprobs, able.transports
        self._last = able.fetch_source, reads_pools, streams
        self.view: WorkerView | None = None
        """The last one that was made, from these:"""
        self._load: Load | None = None
        self._facts: Facts | None = None

    def of(
        self,
        load: Load,
        facts: Facts,
        cached: int,
        pooled: int,
        checkpoints: tuple[int, ...] | None,
        ready: bool,
        draining: bool,
    ) -> WorkerView:
        """The worker as a decision sees it; the last view, where nothing of it has changed."""
        view = self.view
        if (
            view is not None
            and facts is self._facts
            and load is self._load
            and view.cached_tokens == cached
            and view.pool_tokens == pooled
            and view.ready == ready
            and view.draining == draining
            and view.checkpoints == checkpoints
        ):
            return view
        self._load, self._facts, info = load, facts, self.info
        kind, age_s, utilisation, unused, price_s, releases, line = facts
        waiting, running, queued, free, _, certain, _, _, _, depth = load
        # by position: names take twice as long, for every worker of every decision
        self.view = view = WorkerView(
            *self._first,
            ready,
            draining,
            certain,
            *(waiting, running, queued, free),
            *self._sizes,
            *self._abilities,
            cached,
            pooled,
            kind,
            info.node,
            age_s,
            info.max_running,
            releases,
            line,
            utilisation,
            unused,
            price_s,
            checkpoints,
            *self._last,
            depth,
        )
        return view


def geometry_of(info: WorkerInfo) -> Geometry:
    """The part of a worker's description that its block keys depend on; one object for each."""
    return _geometry(info.model_digest, info.layout, info.block_tokens)


_geometry = lru_cache(maxsize=256)(Geometry)
