"""Requests on queue pairs, posted within the device's limits.

Every request is signalled, so what a completion frees is never in doubt, not even after an error,
when all that was posted completes as flushed. At 256 KiB and more a request, that costs nothing.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from pyverbs.wr import SGE, SendWR

from kimi_runtime.errors import PeerGone, RegionGone, TransferError
from kimi_runtime.transfer.verbs_device import VerbsDevice, mapped
from kimi_runtime.transfer.verbs_enums import e

_REGION_ERRORS = frozenset(
    {e.IBV_WC_REM_ACCESS_ERR, e.IBV_WC_REM_INV_REQ_ERR, e.IBV_WC_REM_INV_RD_REQ_ERR}
)
_PEER_ERRORS = frozenset(
    {
        e.IBV_WC_RETRY_EXC_ERR,
        e.IBV_WC_RNR_RETRY_EXC_ERR,
        e.IBV_WC_REM_OP_ERR,
        e.IBV_WC_REM_ABORT_ERR,
        e.IBV_WC_RESP_TIMEOUT_ERR,
    }
)


def failure_of(status: int, peer: str, region: int) -> TransferError:
    """A completion's error as the caller of a transfer knows it."""
    name = e.ibv_wc_status(status).name.removeprefix("IBV_WC_").lower()
    if status in _REGION_ERRORS:
        return RegionGone(
            f"region {region} of {peer} was released or does not allow this ({name}); "
            "look its blocks up again"
        )
    if status in _PEER_ERRORS:
        return PeerGone(f"{peer} can't be reached any more ({name})")
    return TransferError(f"the network card refused a transfer with {peer} ({name})")


class Batch:
    """Requests that belong together. Changed under the lock of its session's queues."""

    __slots__ = ("_changed", "failure", "left", "withdrawn")

    def __init__(self, changed: Callable[[], object]) -> None:
        self.left = 0
        self.failure: TransferError | None = None
        self.withdrawn = False
        self._changed = changed

    @property
    def over(self) -> bool:
        """Whether the device will not touch its memory any more."""
        return not self.left

    def settle(self, count: int = 1) -> None:
        """So many of its requests are done with, one way or another."""
        self.left -= count
        if not self.left or self.failure is not None:
            self._changed()

    def fail(self, failure: TransferError) -> None:
        """Keep the first failure; what is not posted yet never will be."""
        if self.failure is None:
            self.failure = failure
            self._changed()

    def disturbed(self) -> None:
        """One of its queues broke for another's sake: somebody must connect it again."""
        self._changed()


class Work(NamedTuple):
    """One request: `local` and `remote` are addresses with their keys."""

    batch: Batch
    opcode: int
    local: int
    local_key: int
    remote: int
    remote_key: int
    size: int


class SendQueue:
    """One queue pair's requests. Used under its session's lock."""

    def __init__(self, pair: Any, depth: int) -> None:
        self.pair: Any | None = pair
        self.broken = False
        self.pending: deque[Work] = deque()
        self.posted: dict[int, Work] = {}
        self._depth = depth
        self._count = 0
        self._refused = SendWR(num_sge=1, sg=[SGE(0, 0, 0)])  # where a failed post began

    @property
    def number(self) -> int:
        """The queue pair's."""
        return -1 if self.pair is None else int(self.pair.qp_num)

    def pump(self) -> None:
        """Post what fits."""
        chain: list[SendWR] = []
        while self.pending and len(self.posted) < self._depth and not self.broken:
            work = self.pending.popleft()
            if work.batch.withdrawn or work.batch.failure is not None:
                work.batch.settle()
                continue
            self._count += 1
            request = _request(self._count, work)
            if chain:
                chain[-1].next_wr = request
            chain.append(request)
            self.posted[self._count] = work
        if chain:
            self._post(chain)

    def completed(self, number: int, status: int, failure: TransferError | None) -> None:
        """Take a completion. A flushed request of a batch that goes on is posted again later."""
        work = self.posted.pop(number)
        if status == e.IBV_WC_SUCCESS or work.batch.withdrawn or work.batch.failure is not None:
            work.batch.settle()
        elif failure is not None:
            work.batch.fail(failure)
            work.batch.settle()
        else:
            self.pending.append(work)
            work.batch.disturbed()

    def withdraw(self, batch: Batch) -> None:
        """Forget what of `batch` is not posted."""
        kept = deque(work for work in self.pending if work.batch is not batch)
        dropped = len(self.pending) - len(kept)
        self.pending = kept
        if dropped:
            batch.settle(dropped)

    def holds(self, batch: Batch) -> bool:
        """Whether a request of `batch` is under way."""
        return any(work.batch is batch for work in self.posted.values())

    def everybody(self) -> set[Batch]:
        """The batches with requests here."""
        return {work.batch for work in (*self.posted.values(), *self.pending)}

    def destroy(self) -> None:
        """Close the queue pair: the device touches no memory for it any more."""
        if self.pair is None:
            return
        with suppress(TransferError), mapped("closing a queue pair"):
            self.pair.close()
        self.pair, self.broken = None, True
        posted, self.posted = self.posted, {}
        for work in posted.values():
            work.batch.fail(PeerGone("the queue pair was destroyed"))
            work.batch.settle()

    def _post(self, chain: list[SendWR]) -> None:
        assert self.pair is not None
        first = chain[0].wr_id
        self._refused.wr_id = first
        try:
            with mapped("posting requests"):
                self.pair.post_send(chain[0], self._refused)
        except TransferError as exc:
            self.broken = True
            for number in [number for number in self.posted if number >= self._refused.wr_id]:
                work = self.posted.pop(number)
                work.batch.fail(exc)
                work.batch.settle()
        finally:
            for request in chain:
                request.close()


def _request(number: int, work: Work) -> SendWR:
    """A signalled request. pyverbs frees neither part by itself: close it once it is posted."""
    element = SGE(work.local, work.size, work.local_key)
    request = SendWR(
        wr_id=number,
        opcode=work.opcode,
        num_sge=1,
        sg=[element],
        send_flags=e.IBV_SEND_SIGNALED,
    )
    element.close()
    request.set_wr_rdma(work.remote_key, work.remote)
    return request


class Queues:
    """The send queues of one session and their completion queue."""

    def __init__(self, device: VerbsDevice, *, count: int, peer: str, region: int) -> None:
        self.lock = threading.Condition()
        self._device, self._peer, self._region = device, peer, region
        depth = device.limits.send_depth
        self._completions: Any | None = device.completion_queue(count * depth)
        self._entries = count * depth
        self.all: list[SendQueue] = []
        try:
            for _ in range(count):
                pair = device.queue_pair(self._completions, sends=depth)
                self.all.append(SendQueue(pair, depth))
        except BaseException:
            self.destroy()
            raise

    @property
    def busy(self) -> bool:
        """Whether a completion is due."""
        return any(queue.posted for queue in self.all)

    @property
    def broken(self) -> list[int]:
        """Queues that must be connected again."""
        return [at for at, queue in enumerate(self.all) if queue.broken]

    def submit(self, plans: Iterable[Iterable[Work]]) -> None:
        """One plan a queue, from the emptiest queue on."""
        with self.lock:
            queues = sorted(self.all, key=lambda queue: len(queue.posted) + len(queue.pending))
            for queue, plan in zip(queues, plans, strict=False):
                for work in plan:
                    work.batch.left += 1
                    queue.pending.append(work)
            for queue in queues:
                queue.pump()

    def poll(self) -> bool:
        """Take completions; whether there were any."""
        with self.lock:
            if self._completions is None or not self.busy:
                return False
            try:
                with mapped("polling completions"):
                    count, completions = self._completions.poll(min(64, self._entries))
            except TransferError:  # the device is gone, and nothing will complete any more
                for dead in self.all:
                    dead.destroy()
                return False
            if not count:
                return False
            by_number = {queue.number: queue for queue in self.all}
            for completion in completions:
                queue = by_number.get(completion.qp_num)
                if queue is not None and completion.wr_id in queue.posted:
                    self._take(queue, completion)
            for queue in self.all:
                queue.pump()
            self.lock.notify_all()
            return True

    def withdraw(self, batch: Batch) -> None:
        """Post no more of `batch`."""
        with self.lock:
            batch.withdrawn = True
            for queue in self.all:
                queue.withdraw(batch)

    def flush(self, batch: Batch | None = None) -> None:
        """Put the queues that hold requests of `batch` (None: all) in error, which ends them."""
        with self.lock:
            for queue in self.all:
                if queue.pair is None or (batch is not None and not queue.holds(batch)):
                    continue
                queue.broken = True
                with suppress(TransferError):
                    self._device.fail(queue.pair)

    def fail(self, failure: TransferError) -> None:
        """End every batch with `failure`."""
        self.flush()
        with self.lock:
            for queue in self.all:
                for batch in queue.everybody():
                    batch.fail(failure)
                pending, queue.pending = queue.pending, deque()
                for work in pending:
                    work.batch.settle()

    def drained(self, at: int, *, within_s: float) -> bool:
        """Wait until nothing is under way on a broken queue; for threads."""
        queue = self.all[at]
        with self.lock:
            return self.lock.wait_for(lambda: not queue.posted, within_s)

    def mended(self, at: int) -> None:
        """The pair of a queue is connected again."""
        with self.lock:
            self.all[at].broken = False
            self.all[at].pump()

    def destroy(self, batch: Batch | None = None) -> None:
        """Close the queue pairs that hold requests of `batch`; None: all, and what they share."""
        with self.lock:
            for queue in self.all:
                if batch is None or queue.holds(batch):
                    queue.destroy()
            if batch is None and self._completions is not None:
                completions, self._completions = self._completions, None
                with suppress(TransferError), mapped("closing a completion queue"):
                    completions.close()

    def _take(self, queue: SendQueue, completion: Any) -> None:
        status = completion.status
        failure = None
        if status not in (e.IBV_WC_SUCCESS, e.IBV_WC_WR_FLUSH_ERR):
            failure = failure_of(status, self._peer, self._region)
            queue.broken = True
            if isinstance(failure, RegionGone | PeerGone):  # then nobody fares better
                for batch in queue.everybody():
                    batch.fail(failure)
        queue.completed(completion.wr_id, status, failure)
