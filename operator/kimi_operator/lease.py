"""Leadership by a Lease: one operator works at a time, and one that cannot prove it stops.

The holder writes a renewal every few seconds; a candidate takes over once it has watched the same
renewal for the whole duration, by its own clock, so that clocks need not agree. The holder gives up
earlier than that: it must have stopped before another one starts. When it gives up is its `Tenure`,
which every request that writes is checked against as it is sent.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kimi_operator.kube import Kube
from kimi_operator.observed import Manifest, ObjectKey
from kimi_operator.wire import Tenure
from kimi_runtime.errors import ClusterBusy, ClusterConflict, ClusterError

DURATION_S = 15.0
GIVE_UP = 2 / 3
"""Share of the duration after which a holder that could not renew stops."""
RENEW_WITHIN_S = DURATION_S * GIVE_UP
LATE = 4 / 15
"""Share of it for which a write of the last moment may go on after that."""
RETRY = 2 / 15
"""Share of the duration between two renewals."""


@dataclass
class Leadership:
    """One candidate for one Lease. `stamp` is the time as a Lease has it."""

    kube: Kube
    key: ObjectKey
    identity: str
    now_s: Callable[[], float]
    stamp: Callable[[], str]
    duration_s: float = DURATION_S
    tenure: Tenure | None = None
    _seen: tuple[str, str, int] | None = None
    _seen_at_s: float = 0.0

    def __post_init__(self) -> None:
        self._tenure = self.tenure or Tenure(self.now_s)
        self._tenure.until_s = float("-inf")
        self._tenure.late_s = self.duration_s * LATE

    @property
    def held(self) -> bool:
        """Whether nobody else can lead now."""
        return self._tenure.remaining_s > 0

    @property
    def retry_s(self) -> float:
        """Seconds between two attempts."""
        return self.duration_s * RETRY

    @property
    def overdue_s(self) -> float:
        """Seconds since the process should have stopped for want of a renewal."""
        return -self._tenure.remaining_s

    async def attempt(self) -> bool:
        """Take or renew the Lease if that is possible now; whether it is held after that.

        An API server that cannot be reached is no reason to raise: `held` runs out by itself. One
        that does not answer is given up early enough for another attempt.
        """
        began_s = self.now_s()
        try:
            async with asyncio.timeout(self.duration_s * GIVE_UP / 2):
                if await self._write():
                    self._tenure.until_s = began_s + self.duration_s * GIVE_UP
        except (ClusterBusy, ClusterConflict, TimeoutError):
            pass
        return self.held

    async def release(self) -> None:
        """Let the next candidate begin at once."""
        self._tenure.until_s = float("-inf")
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
        return self.now_s() - self._seen_at_s > float(
            spec.get("leaseDurationSeconds", self.duration_s)
        )

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
            "leaseDurationSeconds": int(self.duration_s),
            "acquireTime": taken,
            "renewTime": self.stamp(),
            "leaseTransitions": changes,
        }
