"""Leadership by a Lease: one operator works at a time, and one that cannot prove it stops.

The holder writes a renewal every few seconds; a candidate takes over once it has watched the same
renewal for the whole duration, by its own clock, so that clocks need not agree. The holder gives up
earlier than that: it must have stopped before another one starts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kimi_operator.kube import Kube
from kimi_operator.observed import Manifest, ObjectKey
from kimi_runtime.errors import ClusterBusy, ClusterConflict, ClusterError

DURATION_S = 15.0
RENEW_WITHIN_S = 10.0
RETRY_S = 2.0


@dataclass
class Leadership:
    """One candidate for one Lease. `stamp` is the time as a Lease has it."""

    kube: Kube
    key: ObjectKey
    identity: str
    now_s: Callable[[], float]
    stamp: Callable[[], str]
    _seen: tuple[str, str, int] | None = None
    _seen_at_s: float = 0.0
    _renewed_at_s: float = field(default=float("-inf"))

    @property
    def held(self) -> bool:
        """Whether nobody else can lead now."""
        return self.now_s() - self._renewed_at_s < RENEW_WITHIN_S

    @property
    def renewed_ago_s(self) -> float:
        """Seconds since the last renewal."""
        return self.now_s() - self._renewed_at_s

    async def attempt(self) -> bool:
        """Take or renew the Lease if that is possible now; whether it is held after that.

        An API server that cannot be reached is no reason to raise: `held` runs out by itself.
        """
        began_s = self.now_s()
        try:
            if await self._write():
                self._renewed_at_s = began_s
        except (ClusterBusy, ClusterConflict):
            pass
        return self.held

    async def release(self) -> None:
        """Let the next candidate begin at once."""
        self._renewed_at_s = float("-inf")
        try:
            lease = await self.kube.get(self.key)
            if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
                spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                await self.kube.update({**lease, "spec": spec})
        except ClusterError:
            pass  # it runs out by itself

    async def _write(self) -> bool:
        lease = await self.kube.get(self.key)
        if lease is None:
            return await self.kube.create(self._new()) is not None
        spec = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self.identity) and not self._ran_out(spec):
            return False
        changes = int(spec.get("leaseTransitions") or 0) + int(holder != self.identity)
        taken = spec.get("acquireTime") if holder == self.identity else self.stamp()
        await self.kube.update({**lease, "spec": self._spec(changes, taken or self.stamp())})
        return True

    def _ran_out(self, spec: Manifest) -> bool:
        seen = (spec["holderIdentity"], str(spec.get("renewTime")), spec.get("leaseTransitions", 0))
        if seen != self._seen:
            self._seen, self._seen_at_s = seen, self.now_s()
        return self.now_s() - self._seen_at_s > float(spec.get("leaseDurationSeconds", DURATION_S))

    def _new(self) -> Manifest:
        metadata = {"name": self.key.name, "namespace": self.key.namespace}
        return {
            "apiVersion": self.key.api_version,
            "kind": self.key.kind,
            "metadata": metadata,
            "spec": self._spec(0, self.stamp()),
        }

    def _spec(self, changes: int, taken: str) -> Manifest:
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(DURATION_S),
            "acquireTime": taken,
            "renewTime": self.stamp(),
            "leaseTransitions": changes,
        }
