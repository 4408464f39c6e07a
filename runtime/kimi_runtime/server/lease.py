"""How long a worker may go on working without a router that hears it. Pure: time is an argument.

A pod on a node that does not answer may only be started elsewhere once its old worker has surely
ended. So the worker ends by itself: a load report that a router says to have received renews its
lease to the moment at which that report was made. A router counts silence from when a report
arrived, which is later: whenever every router says "nothing for a lease", the lease is over here,
even where calls still come in and only the answers are lost.
"""

from collections import OrderedDict

PROBATION_S = 10.0
"""A worker whose lease was over takes work again only so long after a router heard it: who was told
that it has ended may act on that for a few seconds yet. So does one that nobody heard for a lease
after its start; one that is heard at once has no past that anybody could take for ended."""
REMEMBERED_REPORTS = 8192


class Lease:
    """One worker's lease of `lease_s`; None: it never ends. It begins when a router hears it."""

    def __init__(self, lease_s: float | None, *, epoch: int, now_s: float) -> None:
        self._lease_s, self._epoch, self._started_s = lease_s, epoch, now_s
        self._made: OrderedDict[int, float] = OrderedDict()
        self._until_s = float("-inf")
        self._fenced_until_s = float("-inf")

    def reported(self, seq: int, *, now_s: float) -> None:
        """A load report was made."""
        if self._lease_s is None:
            return
        self._made[seq] = now_s
        while len(self._made) > REMEMBERED_REPORTS:
            self._made.popitem(last=False)

    def heard(self, epoch: int, seq: int, *, now_s: float) -> None:
        """A router says that it has received that report."""
        if epoch == self._epoch and (made_s := self._made.get(seq)) is not None:
            self._renew(made_s, now_s)

    def called(self, *, now_s: float) -> None:
        """A router of an older version called, which cannot say what it has received."""
        self._renew(now_s, now_s)

    def fenced(self, now_s: float) -> bool:
        """Whether the worker must not work: no router is known to hear it."""
        if self._lease_s is None:
            return False
        return now_s >= self._until_s or now_s < self._fenced_until_s

    def ends_in_s(self, now_s: float) -> float | None:
        """When it ends unless renewed; None where it has ended, has not begun, or never ends."""
        if self._lease_s is None or now_s >= self._until_s:
            return None
        return self._until_s - now_s

    def _renew(self, from_s: float, now_s: float) -> None:
        if self._lease_s is None or from_s + self._lease_s <= now_s:
            return
        since_s = max(self._until_s, self._started_s + self._lease_s)
        if now_s >= since_s:
            self._fenced_until_s = now_s + PROBATION_S
        self._until_s = max(self._until_s, from_s + self._lease_s)
