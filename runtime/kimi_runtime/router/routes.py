"""Which links a worker's fetch passes over: the small graph of nodes, network and memories. Pure.

Sizes are bytes of one tensor rank: MLA's rows are the same on every rank, so each rank reads them
all over its own NIC, and the NICs of a node that serves others are divided by the ranks that read.
Links are named after what they belong to: `decode-0/in`, `node-3/out`.
"""

from collections.abc import Iterable

from kimi_runtime.router.estimate.rates import LinkRates
from kimi_runtime.router.view import KvSource, WorkerView
from kimi_runtime.spec.hardware import LinkSpec, NodeSpec

MAX_ROUTES = 65_536


class Routes:
    """The routes of a deployment whose workers run on nodes of one kind."""

    def __init__(self, rates: LinkRates, node: NodeSpec, *, ranks: int) -> None:
        self._rates = rates
        shared = node.nic.rate * node.nics / ranks
        self._kinds: dict[str, LinkSpec] = {
            "in": node.nic,
            "out": node.nic,
            "host": node.host_link,
            "peer": node.gpu_link,
            "net": node.nic.model_copy(update={"name": "node's NICs", "rate": shared}),
            "ssd": node.drive,  # what is read once serves all ranks
            "pool": node.host_link,
        }
        self.near_per_byte_s = 1 / node.gpu_link.rate
        """No hand-off within a node is faster."""
        self.far_per_byte_s = 1 / node.nic.rate
        """None from another node is."""
        self._known: set[str] = set()
        self._inbound: dict[str, tuple[str, ...]] = {}
        self._outbound: dict[str, tuple[str, ...]] = {}
        self._peer: dict[str, tuple[str, ...]] = {}
        self._routes: dict[tuple[str, str, str, str, str], tuple[str, ...]] = {}

    def to_worker(self, source: KvSource, worker: WorkerView) -> tuple[str, ...]:
        """From a source's memory into the worker's.

        Without nodes nobody knows what lies between; it is then one link of the worker's own.
        """
        key = (source.name, source.node, source.tier, worker.name, worker.node)
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            route = self._routes[key] = self._to_worker(source, worker)
        return route

    def _to_worker(self, source: KvSource, worker: WorkerView) -> tuple[str, ...]:
        if source.name == worker.name:
            return ()
        local = bool(source.node) and source.node == worker.node
        if not source.node or not worker.node:
            return self._have((worker.name, "pool"))
        if source.tier == "hbm":
            if local:
                return self._have((source.name, "peer"), (worker.name, "peer"))
            return self._have((source.name, "out"), (worker.name, "in"))
        start = [(source.node, "ssd")] if source.tier == "ssd" else []
        if local:
            return self._have(*start, (worker.name, "host"))
        return self._have(*start, (source.node, "net"), (worker.name, "in"))

    def between(self, prefill: WorkerView, decode: WorkerView) -> tuple[str, ...]:
        """From a prefill worker's memory into a decode worker's."""
        if prefill.node and prefill.node == decode.node:
            return self.near(prefill) + self.near(decode)
        return self.outbound(prefill) + self.inbound(decode)

    def inbound(self, worker: WorkerView) -> tuple[str, ...]:
        """The last part of every route into the worker from another node."""
        known = self._inbound.get(worker.name)
        if known is None:
            known = self._inbound[worker.name] = self._have((worker.name, "in"))
        return known

    def outbound(self, worker: WorkerView) -> tuple[str, ...]:
        """The first part of every route out of the worker to another node."""
        known = self._outbound.get(worker.name)
        if known is None:
            known = self._outbound[worker.name] = self._have((worker.name, "out"))
        return known

    def near(self, worker: WorkerView) -> tuple[str, ...]:
        """The part of routes within a node that is the worker's own."""
        known = self._peer.get(worker.name)
        if known is None:
            known = self._peer[worker.name] = self._have((worker.name, "peer"))
        return known

    def forget(self, owners: Iterable[str]) -> None:
        """Workers or nodes are gone."""
        self._routes.clear()
        for owner in owners:
            self._inbound.pop(owner, None)
            self._outbound.pop(owner, None)
            self._peer.pop(owner, None)
            for kind in self._kinds:
                link = f"{owner}/{kind}"
                if link in self._known:
                    self._known.discard(link)
                    self._rates.forget(link)

    def _have(self, *links: tuple[str, str]) -> tuple[str, ...]:
        names = tuple(f"{owner}/{kind}" for owner, kind in links)
        for name, (_, kind) in zip(names, links, strict=True):
            if name not in self._known:
                self._known.add(name)
                self._rates.expect(name, self._kinds[kind])
        return names
