"""One pass over one KimiDeployment: observe, decide, apply, prune, say so once.

Level-triggered: a pass may start at any time, for any reason, twice. Nothing is remembered that
the next pass needs; what is (nodes for a minute, the answer to the last apply) only saves requests.
"""

import asyncio
import logging
import secrets
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from kimi_operator.cache import Cache, Key
from kimi_operator.changes import Apply, Changes, Delete, changes, deletion, fingerprint
from kimi_operator.conditions import transitions
from kimi_operator.decide import Decider, Decision, NotDecided
from kimi_operator.desired.security import with_call_key
from kimi_operator.events import event_of
from kimi_operator.fleet_marks import fleet_patches
from kimi_operator.heard import Heard
from kimi_operator.instances import broken_pods, doubtful_pods, drain_patches, instance_views
from kimi_operator.kube import Kube
from kimi_operator.lost import lost_pods
from kimi_operator.metrics import Metrics
from kimi_operator.nodes import node_view, with_taken
from kimi_operator.observed import (
    Capabilities,
    Manifest,
    NodeView,
    ObjectKey,
    Observed,
)
from kimi_operator.repairs import Repairs, cannot_change, may_replace, remedy, rivals
from kimi_operator.scale import workers_replicas
from kimi_operator.stamps import rfc3339
from kimi_operator.status import first_status, status_of, unable_status
from kimi_operator.teardown import OVERDUE_S, STAGES, endless_pods, next_teardown
from kimi_operator.verdicts import Problem
from kimi_runtime.errors import ClusterBusy, ClusterConflict, ClusterError, ClusterRefused

RESYNC_S = 600.0
REFUSED_S = 300.0
"""A refused request may pass once somebody changed a right or a quota, of which no event tells."""
NODES_FOR_S = 60.0
NODES_SOON_S = 5.0
"""While a pod of ours may be on a lost node."""
LOST_LOOK_S, LOST_LATER_S = 3.0, 60.0
GIVE_UP_WITHIN_S = 5.0
"""A worker that routers reach again waits longer than this before it takes work."""
_Error = TypeVar("_Error", bound=ClusterError)
logger = logging.getLogger(__name__)


class Loads(Protocol):
    """What routers say. Never waits and never raises: what is not known is absent."""

    def read(self, key: Key, children: Mapping[ObjectKey, Manifest]) -> Heard:
        """What the deployment's routers have said by now."""


class NoLoads:
    """Nobody is asked."""

    def read(self, key: Key, children: Mapping[ObjectKey, Manifest]) -> Heard:
        """Nothing is known."""
        del key, children
        return Heard()


@dataclass
class _Remembered:
    """Of one deployment, by uid: what saves requests."""

    key: Key
    uid: str
    settled: dict[ObjectKey, str] = field(default_factory=dict)
    created: set[ObjectKey] = field(default_factory=set)
    repairs: Repairs = field(default_factory=Repairs)
    applies: int = 0
    asks_again: bool = False


@dataclass
class Reconciler:
    """Passes over deployments. One pass of a deployment at a time; the caller sees to that."""

    kube: Kube
    cache: Cache
    capabilities: Capabilities
    decide: Decider
    metrics: Metrics
    unix_s: Callable[[], float]
    loads: Loads = field(default_factory=NoLoads)
    nodes_changed: Callable[[], object] = lambda: None
    """Called when a listing finds other nodes than the one before."""
    new_key: Callable[[], str] = lambda: secrets.token_hex(32)
    _remembered: dict[Key, _Remembered] = field(default_factory=dict)
    _nodes: tuple[NodeView, ...] | None = None
    _nodes_at_s: float = float("-inf")

    async def run_pass(self, key: Key) -> float | None:
        """One pass; when the next one is due although nothing happened, None if never.

        Raises ClusterBusy and ClusterConflict: the same pass may go through later.
        """
        resource = self.cache.deployment(key)
        if resource is None:
            memory = self._remembered.pop(key, None)
            if memory is not None:
                self.decide.forget(memory.uid)
            return None
        if "deletionTimestamp" in resource["metadata"]:
            return None
        memory = self._memory(key, resource["metadata"]["uid"])
        if not self.has_status(key):
            generation = resource["metadata"]["generation"]
            await self._write_status(key, first_status(generation, self._now()))
        try:
            return await self._converge(key, memory)
        except NotDecided as exc:
            await self._write_unable(key, Problem(exc.reason, str(exc)))
            return RESYNC_S

    async def tear_down(self, key: Key) -> str | None:
        """One step of the ordered deletion; the stage under way, None when nothing is left of it.

        Raises as `run_pass`, and ClusterRefused.
        """
        resource = self.cache.deployment(key)
        if resource is None:
            return None
        children, uid = self.cache.children(key), resource["metadata"]["uid"]
        nodes = await self._list_nodes(NODES_SOON_S)
        stage, deletes = next_teardown(children, uid, endless_pods(children, nodes, self.unix_s()))
        for wanted in deletes:
            if "deletionTimestamp" in children[wanted.key]["metadata"]:
                logger.warning("%s: %s is let go: nobody ends its pods", key, wanted.key)
            await self._delete(key, wanted)
        return stage

    def has_status(self, key: Key) -> bool:
        """Whether an operator has looked at the deployment before."""
        return bool((self.cache.deployment(key) or {}).get("status"))

    def applies(self, key: Key) -> int:
        """Children applied so far: a pass that failed after some has come closer to its end."""
        memory = self._remembered.get(key)
        return memory.applies if memory is not None else 0

    def teardown_s(self, key: Key) -> float:
        """How long the ordered deletion may take, whatever happens: each stage its pods' grace."""
        graces = [
            float(child["spec"].get("terminationGracePeriodSeconds") or 30)
            for at, child in self.cache.children(key).items()
            if at.kind == "Pod"
        ]
        return len(STAGES) * (30.0 + OVERDUE_S) + 4 * max(graces, default=0.0)

    async def _converge(self, key: Key, memory: _Remembered) -> float | None:
        decision, observed = await self._look(key)
        problems: list[Problem] = []
        wrote = 0
        if not decision.hands_off:
            wrote, problems = await self._write(key, memory, decision, observed)
        if wrote:
            # the status must speak of what is there now, not of what was there before the writes
            decision, observed = await self._look(key)
        facts = replace(decision.facts, problems=(*decision.facts.problems, *problems))
        resource = self.cache.deployment(key)
        if resource is None:
            return None
        status = status_of(facts, resource.get("status") or {}, self._now())
        await self._write_status(key, status)
        for workers, workers_status in decision.workers_status.items():
            await self._write_workers_status(workers, workers_status, observed)
        waits = [RESYNC_S, *([decision.wait_s] if decision.wait_s is not None else [])]
        if doubtful_pods(observed.children, self.unix_s()):
            waits.append(NODES_SOON_S)
        waits += [LOST_LOOK_S if one.heals else LOST_LATER_S for one in observed.lost]
        return min(waits + ([REFUSED_S] if problems else []))

    async def _look(self, key: Key) -> tuple[Decision, Observed]:
        resource = self.cache.deployment(key)
        if resource is None:
            raise ClusterConflict(f"{key} was deleted during the pass")
        observed = await self._observe(key, resource["metadata"]["uid"])
        return self.decide(resource, observed, self.unix_s()), observed

    async def _observe(self, key: Key, uid: str) -> Observed:
        children = self.cache.children(key)
        heard = self.loads.read(key, children)
        doubt = doubtful_pods(children, self.unix_s()) | heard.silent()
        nodes = await self._list_nodes(NODES_SOON_S if doubt else NODES_FOR_S)
        now_s = self.unix_s()
        revisions = [
            child
            for at, child in children.items()
            if at.kind == "ControllerRevision" and _is_ours(child, uid)
        ]
        return Observed(
            children=children,
            instances=instance_views(children, uid, heard.loads(children)),
            revisions=tuple(
                sorted(revisions, key=lambda r: (r["revision"], r["metadata"]["name"]))
            ),
            nodes=with_taken(nodes, self.cache.taken(key)),
            signals=heard.signals(now_s),
            workers_replicas=workers_replicas(children, uid),
            capabilities=self.capabilities,
            lost=lost_pods(children, nodes, heard, now_s),
        )

    async def _list_nodes(self, for_s: float) -> tuple[NodeView, ...] | None:
        """The nodes, no older than that."""
        now_s = self.unix_s()
        if now_s - self._nodes_at_s < for_s:
            return self._nodes
        try:
            found = tuple(node_view(node) for node in await self.kube.list("v1/Node", None))
        except ClusterRefused:
            found = None
        changed = found != self._nodes and self._nodes_at_s != float("-inf")
        self._nodes, self._nodes_at_s = found, now_s
        if changed:
            self.nodes_changed()
        return self._nodes

    async def look_at_nodes(self) -> None:
        """List the nodes anew where nobody has for `NODES_FOR_S`, so that a change is noticed.

        Nodes are not watched: their status is written all the time, and little of it matters here.
        Raises ClusterError.
        """
        await self._list_nodes(NODES_FOR_S)

    async def _write(
        self, key: Key, memory: _Remembered, decision: Decision, observed: Observed
    ) -> tuple[int, list[Problem]]:
        """Everything a decision asks for; how much was written, and what was refused."""
        plan = changes(
            decision.wanted,
            observed.children,
            memory.uid,
            kept=decision.kept,
            settled=memory.settled,
        )
        problems = [_taken(foreign) for foreign in plan.foreign]
        wrote = await self._give_up_lost(key, observed)
        for manifest in decision.once:
            wrote += await self._create_once(memory, manifest, observed, problems)
        wrote += await self._mark_drains(decision, observed)
        wrote += await self._scale(decision, observed)
        wrote += await self._apply_all(memory, plan, decision, observed, problems)
        wrote += await self._merge_all(fleet_patches(observed.children, decision.wanted))
        # a daemon whose template or routers have only just changed, or may not change, stays
        moved = {one.key.kind for one in plan.applies if one.reason != "drift"}
        renewed = () if moved & {"DaemonSet", "Deployment"} else decision.renewed
        for wanted in (*plan.deletes, *renewed):
            await self._delete(key, wanted)
        for pod in broken_pods(observed.children):
            metadata = pod["metadata"]
            await self.kube.delete(ObjectKey.of(pod), uid=metadata["uid"])
        return wrote + len(plan.deletes) + len(renewed), problems

    async def _give_up_lost(self, key: Key, observed: Observed) -> int:
        """Take pods away from lost nodes whose workers have certainly ended.

        Asked once more right before each: a pass may have waited for the API server since.
        """
        gave = 0
        for lost in observed.lost:
            heard = self.loads.read(key, observed.children)
            now = lost_pods(observed.children, observed.nodes, heard, self.unix_s())
            if not any(one.uid == lost.uid and one.expired for one in now):
                continue
            at = ObjectKey("v1", "Pod", key.namespace, lost.pod)
            try:
                async with asyncio.timeout(GIVE_UP_WITHIN_S):
                    await self.kube.delete(at, uid=lost.uid, grace_s=0)
            except TimeoutError as exc:
                raise ClusterBusy(f"{at} was not deleted in {GIVE_UP_WITHIN_S:g} s") from exc
            logger.warning("%s: pod %s is given up with node %s", key, lost.pod, lost.node)
            self.metrics.lost.inc()
            self.cache.condemn(key, at, lost.uid, self._now())
            gave += 1
        return gave

    async def _create_once(
        self,
        memory: _Remembered,
        manifest: Manifest,
        observed: Observed,
        problems: list[Problem],
    ) -> int:
        """POST what may not be read: that the name is taken means that it is there.

        Where an earlier process has come as far as a workload, it was there by then: a start with
        many deployments asks for none of them. Whether it is there still is asked at the next
        listing.
        """
        at = ObjectKey.of(manifest)
        if not memory.asks_again and any(
            key.kind == "Deployment" and _is_ours(child, memory.uid)
            for key, child in observed.children.items()
        ):
            memory.created.add(at)
        if at in memory.created:
            return 0
        call_key = self.new_key()
        try:
            # one that is there keeps its key: this one is then never used
            created = await self.kube.create(with_call_key(manifest, call_key))
        except ClusterRefused as exc:
            problems.append(_refused(at, _without(call_key, exc)))
            return 0
        except ClusterError as exc:
            raise _without(call_key, exc) from None
        memory.created.add(at)
        return int(created is not None)

    async def _apply_all(
        self,
        memory: _Remembered,
        plan: Changes,
        decision: Decision,
        observed: Observed,
        problems: list[Problem],
    ) -> int:
        wrote = 0
        for change in plan.applies:
            at, child = change.key, observed.children.get(change.key)
            if change.reason == "drift" and child is not None:
                wait_s = memory.repairs.wait_s(at, self.unix_s())
                if wait_s:
                    problems.append(_contested(at, rivals(change.manifest, child)))
                    continue
                memory.repairs.made(at, self.unix_s())
            try:
                wrote += await self._apply(memory, change, decision.seeds.get(at))
            except ClusterRefused as exc:
                if child is None or not cannot_change(exc):
                    problems.append(_refused(at, exc))
                elif may_replace(change.manifest):
                    await self._delete(memory.key, deletion(at, child))
                    wrote += 1
                else:
                    problems.append(_unchangeable(at, exc))
        return wrote

    async def _apply(self, memory: _Remembered, change: Apply, seed: Manifest | None) -> int:
        at = change.key
        if change.reason == "create":
            there = await self.kube.get(at)
            if there is not None and not _is_ours(there, memory.uid):
                raise ClusterRefused(f"{at} is there and belongs to somebody else")
            if there is None and seed is not None:
                await self.kube.create(seed)
        answer = await self.kube.apply(change.manifest)
        self.metrics.applies.labels(at.kind, change.reason).inc()
        memory.settled[at] = fingerprint(answer)
        memory.applies += 1
        self.cache.saw("MODIFIED", answer)
        return 1

    async def _mark_drains(self, decision: Decision, observed: Observed) -> int:
        stay = decision.facts.step.instances
        return await self._merge_all(
            drain_patches(observed.children, decision.drain, stay, self.unix_s())
        )

    async def _merge_all(self, patches: Mapping[ObjectKey, Manifest]) -> int:
        for at, patch in patches.items():
            answer = await self.kube.merge(at, patch)
            if answer is not None:
                self.cache.saw("MODIFIED", answer)
        return len(patches)

    async def _scale(self, decision: Decision, observed: Observed) -> int:
        """Write the planner's numbers where its last ones are kept."""
        wrote = 0
        for at, replicas in decision.scales.items():
            workers = observed.children.get(at)
            if workers is not None and workers["spec"].get("replicas") != replicas:
                answer = await self.kube.merge(at, {"spec": {"replicas": replicas}})
                if answer is not None:
                    self.cache.saw("MODIFIED", answer)
                wrote += 1
        return wrote

    async def _delete(self, key: Key, wanted: Delete) -> None:
        await self.kube.delete(wanted.key, uid=wanted.uid, foreground=wanted.foreground)
        self.metrics.deletes.labels(wanted.key.kind).inc()
        self.cache.condemn(key, wanted.key, wanted.uid, self._now())

    async def _write_unable(self, key: Key, problem: Problem) -> None:
        resource = self.cache.deployment(key)
        if resource is not None:
            generation = resource["metadata"]["generation"]
            previous = resource.get("status") or {}
            await self._write_status(key, unable_status(generation, problem, previous, self._now()))

    async def _write_status(self, key: Key, status: dict[str, Any]) -> None:
        """Patch the status if it differs, and tell of its transitions."""
        resource = self.cache.deployment(key)
        if resource is None:
            return
        before = resource.get("status") or {}
        if before == status:
            return
        # a merge patch keeps what it does not name
        gone = dict.fromkeys(before.keys() - status.keys())
        answer = await self.kube.patch_status(key.object, {**_nulled(before, status), **gone})
        self.metrics.status_patches.inc()
        if answer is None:
            return
        self.cache.saw("MODIFIED", answer)
        for transition in transitions(before.get("conditions") or (), status["conditions"]):
            event = event_of(resource, transition, self._now())
            if event is None:
                continue
            try:
                await self.kube.create(event)
            except ClusterRefused as exc:
                logger.warning("an Event was refused: %s", exc)

    async def _write_workers_status(
        self, at: ObjectKey, status: Mapping[str, Any], observed: Observed
    ) -> None:
        workers = observed.children.get(at)
        if workers is None or (workers.get("status") or {}) == status:
            return
        answer = await self.kube.patch_status(at, status)
        if answer is not None:
            self.cache.saw("MODIFIED", answer)

    def _memory(self, key: Key, uid: str) -> _Remembered:
        memory = self._remembered.get(key)
        if memory is None or memory.uid != uid:
            memory = self._remembered[key] = _Remembered(key, uid)
        return memory

    def forget_settled(self, key: Key) -> None:
        """Let the next pass create again what it cannot see (the call key)."""
        if key in self._remembered:
            self._remembered[key].created.clear()
            self._remembered[key].asks_again = True

    def _now(self) -> str:
        return rfc3339(self.unix_s())


def _nulled(before: Any, after: Any) -> Any:
    """`after` as a merge patch over `before`: what it lacks is null, at every depth."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return after
    gone: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    return gone | {name: _nulled(before.get(name), value) for name, value in after.items()}


def _is_ours(child: Mapping[str, Any], uid: str) -> bool:
    owners = child["metadata"].get("ownerReferences", ())
    return any(owner.get("controller") and owner["uid"] == uid for owner in owners)


def _taken(at: ObjectKey) -> Problem:
    return Problem(
        "NameTaken",
        f"{at} is there and belongs to somebody else; delete it, or give the deployment another "
        "name",
    )


def _without(secret: str, exc: _Error) -> _Error:
    """The error without a secret that a server or a webhook quotes from the request."""
    text = str(exc)
    for form in (secret, b64encode(f"{secret}\n".encode()).decode()):
        text = text.replace(form, "(the call key)")
    return type(exc)(text, code=exc.code, retry_after_s=exc.retry_after_s)


def _contested(at: ObjectKey, managers: tuple[str, ...]) -> Problem:
    who = ", ".join(managers) or "somebody"
    return Problem(
        "FieldConflict",
        f"{who} keeps changing fields of {at} that this deployment sets; it is taken back "
        f"ever more rarely. Keep {who} from that object, or set the field in this spec",
        stalled=False,
    )


def _unchangeable(at: ObjectKey, exc: ClusterRefused) -> Problem:
    return Problem("ImmutableField", f"{at}: {exc}; {remedy(at)}")


def _refused(at: ObjectKey, exc: ClusterRefused) -> Problem:
    return Problem("Rejected", f"{at}: {exc}")
