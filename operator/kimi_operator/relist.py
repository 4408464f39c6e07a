"""Listings beside the watches: what a watch that broke off has lost, and whether one is deaf.

Every kind is listed now and then. One whose watch has told nothing for a while, not even the
bookmark that a server sends every minute, is listed sooner: if the listing tells something new that
the watch does not tell soon after, that watch is deaf, and only a new process gets rid of it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kimi_operator.cache import Cache, Key
from kimi_operator.kinds import Kind
from kimi_operator.kube import Kube
from kimi_operator.wire import Watches
from kimi_runtime.errors import ClusterError

RELIST_S = 600.0
SILENT_S = 300.0
"""Four new connections without a word. Some servers send no bookmarks of a kind nobody uses."""
DEAF_S = 30.0
"""How long a watch may lag behind a listing."""
OUR_KIND = "KimiDeployment"
logger = logging.getLogger(__name__)


@dataclass
class Relist:
    """Lists `kinds` in `namespaces` (None: in all) by `selector`; calls `missed` per finding."""

    kube: Kube
    cache: Cache
    watches: Watches
    kinds: Sequence[Kind]
    namespaces: Sequence[str | None]
    selector: str
    now_s: Callable[[], float]
    missed: Callable[[Key], None]
    _listed_at_s: dict[tuple[str, str | None], float] = field(default_factory=dict)
    _behind_since_s: dict[tuple[Kind, str | None], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in self.kinds:
            for namespace in self.namespaces:
                self._listed_at_s[kind.id, namespace] = self.now_s()

    async def once(self) -> bool:
        """List what is due. Whether any of it was so by its turn, not for a silent watch alone."""
        regular = False
        for kind in self.kinds:
            for namespace in self.namespaces:
                since_s = self.now_s() - self._listed_at_s[kind.id, namespace]
                due = since_s >= RELIST_S
                silent = self.watches.silent_s(kind, namespace) > SILENT_S and since_s > SILENT_S
                if due or silent:
                    await self._list(kind, namespace, silent=silent)
                regular |= due
        return regular

    @property
    def deaf(self) -> str | None:
        """Which watch tells nothing although there was something to tell; None if all do."""
        for (kind, namespace), since_s in self._behind_since_s.items():
            heard_s = self.watches.heard_at_s(kind, namespace)
            if self.now_s() - since_s > DEAF_S and (heard_s or 0.0) <= since_s:
                where = f" in {namespace}" if namespace else ""
                silent_s = self.watches.silent_s(kind, namespace)
                return f"the watch of {kind.plural}{where} has told nothing for {silent_s:.0f}s"
        return None

    async def _list(self, kind: Kind, namespace: str | None, *, silent: bool) -> None:
        self._listed_at_s[kind.id, namespace] = self.now_s()
        known = self.cache.known(kind.id, namespace)
        selector = "" if kind.kind == OUR_KIND else self.selector
        try:
            found = await self.kube.list(kind.id, namespace, selector)
        except ClusterError as exc:
            logger.warning("listing %s: %s", kind.plural, exc)
            return
        told = self.cache.replace(kind.id, found, known)
        for key in told:
            self.missed(key)
        if told and silent:
            self._behind_since_s.setdefault((kind, namespace), self.now_s())
        elif (self.watches.heard_at_s(kind, namespace) or 0.0) > self._behind_since_s.get(
            (kind, namespace), float("inf")
        ):
            del self._behind_since_s[kind, namespace]
