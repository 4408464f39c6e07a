"""A verbs session: queue pairs to one region of a peer, and the connection that controls them."""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kimi_connect.blocks import flat
from kimi_runtime import clock
from kimi_runtime.errors import PeerGone, ProtocolError, RegionGone, TransferError
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.background import Stop, in_thread
from kimi_runtime.transfer.base import LinkCounters, Span
from kimi_runtime.transfer.batches import Batches
from kimi_runtime.transfer.dialling import abort, dial
from kimi_runtime.transfer.handshake import receive_exactly
from kimi_runtime.transfer.memory import DeviceMemory
from kimi_runtime.transfer.network import NetworkSettings
from kimi_runtime.transfer.plan import cut, spread
from kimi_runtime.transfer.verbs_completions import CompletionThread
from kimi_runtime.transfer.verbs_device import Access, VerbsDevice
from kimi_runtime.transfer.verbs_enums import e
from kimi_runtime.transfer.verbs_local import LocalMemory
from kimi_runtime.transfer.verbs_owner import new_psn
from kimi_runtime.transfer.verbs_queues import Batch, Queues, Work
from kimi_runtime.transfer.verbs_wire import (
    LENGTH,
    PURPOSE,
    Connect,
    Connected,
    QueuePairInfo,
    Reconnect,
    Reconnected,
    Refused,
    Reply,
    Request,
    pack,
    unpack_length,
    unpack_reply,
)

_GRACE_S = 0.05
"""How long an ended batch may take for what is under way, before its queue pairs are failed."""
_FLUSH_S = 3.0
"""How long a failed queue pair may take to flush, before it is destroyed."""


class VerbsSession:
    """Reads and writes one region of a peer."""

    def __init__(
        self,
        remote: RegionRef,
        settings: NetworkSettings,
        *,
        device: VerbsDevice,
        local: LocalMemory,
        completions: CompletionThread,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._remote, self._settings = remote, settings
        self._device, self._local, self._completions = device, local, completions
        self._threads = threads
        self._batches = Batches(remote.peer)
        self._queues = Queues(
            device, count=settings.rdma.queue_pairs, peer=remote.peer, region=remote.key
        )
        self._control: socket.socket | None = None
        self._opened: Connected | None = None
        self._gone: PeerGone | None = None
        self._mending = asyncio.Lock()
        completions.watch(self._queues)

    @property
    def counters(self) -> LinkCounters:
        """Bytes and time so far."""
        return self._batches.counters

    @property
    def closed(self) -> bool:
        """Whether the session was given up."""
        return self._batches.closed

    async def connect(self, deadline_s: float) -> None:
        """Open the region and connect every queue pair. RegionGone, PeerGone."""

        def work(stop: Stop) -> TransferError | None:
            try:
                self._connect(stop)
            except TransferError as exc:
                return exc
            return None

        failure, late = await in_thread(
            work, ends_s=clock.now_s() + deadline_s, executor=self._threads
        )
        if late:
            raise PeerGone(
                f"{self._remote.peer} at {self._remote.address} did not answer "
                f"within {deadline_s:.3f} s"
            ) from failure
        if failure is not None:
            raise failure
        self._watch_control()

    async def read(
        self, spans: Sequence[Span], into: memoryview | DeviceMemory, *, deadline_s: float
    ) -> None:
        """RDMA reads of spans of the region into `into`, which may be a GPU's memory."""
        await self._move(spans, into, e.IBV_WR_RDMA_READ, deadline_s)

    async def write(
        self, spans: Sequence[Span], data: memoryview | DeviceMemory, *, deadline_s: float
    ) -> None:
        """RDMA writes of spans of `data` into the region."""
        if not self.closed and self._opened is not None and not self._opened.writable:
            raise RegionGone(f"region {self._remote.key} is registered for reading only")
        await self._move(spans, data, e.IBV_WR_RDMA_WRITE, deadline_s)

    async def aclose(self) -> None:
        """End the running batches, the queue pairs and the control connection."""
        await self._batches.aclose()
        self._completions.forget(self._queues)
        self._queues.destroy()
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    async def _move(
        self,
        spans: Sequence[Span],
        local: memoryview | DeviceMemory,
        opcode: int,
        deadline_s: float,
    ) -> None:
        ends_s = clock.now_s() + deadline_s
        memory = local if isinstance(local, DeviceMemory) else flat(local)
        writes = opcode == e.IBV_WR_RDMA_WRITE
        with self._batches.batch(
            spans, remote_bytes=self._remote.size_bytes, local_bytes=memory.nbytes, writes=writes
        ) as stop:
            if self._gone is not None:
                raise self._gone
            in_time = deadline_s > 0
            if in_time and spans:
                low = min(span.local for span in spans)
                high = max(span.local + span.size for span in spans)
                with self._local.reached(memory, low, high) as (base, key):
                    in_time = await self._run(spans, opcode, base, key, stop, ends_s)
            self._batches.require(in_time, spans, deadline_s)

    async def _run(
        self, spans: Sequence[Span], opcode: int, base: int, key: int, stop: Stop, ends_s: float
    ) -> bool:
        """Whether the batch was done by `ends_s`. The device has done with it in any case."""
        assert self._opened is not None
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def note() -> None:
            with suppress(RuntimeError):  # the loop has ended, and all that waited with it
                loop.call_soon_threadsafe(changed.set)

        batch = Batch(note)
        limit = self._device.limits.message_bytes
        region, remote_key = self._opened.address, self._opened.remote_key
        plans = [
            [
                Work(batch, opcode, base + at, key, region + remote, remote_key, size)
                for remote, at, size in cut(plan, limit)
            ]
            for plan in spread(spans, len(self._queues.all))
        ]
        done = False
        with stop.waking(changed.set):
            try:
                self._queues.submit(plans)
                self._completions.rouse()
                done = await self._until_over(batch, changed, stop, ends_s)
            finally:
                await self._end(batch, changed)
        if batch.failure is not None and not self.closed:
            raise batch.failure
        return done

    async def _until_over(
        self, batch: Batch, changed: asyncio.Event, stop: Stop, ends_s: float
    ) -> bool:
        while not batch.over and batch.failure is None and not stop():
            if self._queues.broken:
                await self._mend(stop, ends_s)
                continue
            left_s = ends_s - clock.now_s()
            if left_s <= 0:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()
            changed.clear()
        return batch.over and batch.failure is None

    async def _end(self, batch: Batch, changed: asyncio.Event) -> None:
        """Return when the device has done with a batch, whatever happens to us meanwhile."""
        if batch.over:
            return
        self._queues.withdraw(batch)
        cancelled: asyncio.CancelledError | None = None
        for wait_s, then in (
            (_GRACE_S, self._queues.flush),
            (_FLUSH_S, self._queues.destroy),
        ):
            until_s = clock.now_s() + wait_s
            while not batch.over and clock.now_s() < until_s:
                changed.clear()
                if batch.over:
                    break
                try:
                    async with asyncio.timeout(until_s - clock.now_s()):
                        await changed.wait()
                except TimeoutError:
                    break
                except asyncio.CancelledError as exc:
                    cancelled = exc
            if not batch.over:
                then(batch)
                self._completions.rouse()
        if cancelled is not None:
            raise cancelled

    async def _mend(self, stop: Stop, ends_s: float) -> None:
        """Reconnect the queue pairs that are in error. Raises PeerGone where that fails."""
        async with self._mending:
            broken = self._queues.broken
            if not broken or stop():
                return
            self._unwatch_control()

            def work(stop: Stop) -> TransferError | None:
                try:
                    for at in broken:
                        self._reconnect(at, stop)
                except TransferError as exc:
                    return exc
                return None

            failure, late = await in_thread(work, ends_s=ends_s, stop=stop, executor=self._threads)
            if late:
                return
            if failure is not None:
                self._lose(f"and its queue pairs can't be reconnected: {failure}")
                assert self._gone is not None
                raise self._gone
            self._watch_control()
            self._completions.rouse()

    def _connect(self, stop: Stop) -> None:
        remote = self._remote
        self._control = dial(remote, self._settings, PURPOSE, stop)
        ours = [QueuePairInfo(number=q.number, psn=new_psn()) for q in self._queues.all]
        request = Connect(
            key=remote.key,
            epoch=remote.epoch,
            size_bytes=remote.size_bytes,
            port=self._device.port,
            queue_pairs=ours,
        )
        reply = self._ask(request, stop)
        if isinstance(reply, Refused):
            raise RegionGone(
                f"region {remote.key} of {remote.peer} was released, or {remote.peer} restarted; "
                "look its blocks up again"
            )
        if not isinstance(reply, Connected) or len(reply.queue_pairs) != len(ours):
            raise PeerGone(f"{remote.peer} answered something else than was asked")
        for queue, own, theirs in zip(self._queues.all, ours, reply.queue_pairs, strict=True):
            self._device.connect(queue.pair, own.psn, theirs, reply.port, Access.NONE)
        self._opened = reply

    def _reconnect(self, at: int, stop: Stop) -> None:
        assert self._opened is not None
        if not self._queues.drained(at, within_s=_FLUSH_S):
            raise PeerGone(f"queue pair {at} does not flush")
        pair = self._queues.all[at].pair
        if pair is None:
            raise PeerGone(f"queue pair {at} was destroyed")
        psn = new_psn()
        reply = self._ask(Reconnect(index=at, psn=psn), stop)
        if not isinstance(reply, Reconnected):
            raise PeerGone(f"{self._remote.peer} did not reconnect queue pair {at}")
        theirs = QueuePairInfo(number=self._opened.queue_pairs[at].number, psn=reply.psn)
        self._device.connect(pair, psn, theirs, self._opened.port, Access.NONE)
        self._queues.mended(at)

    def _ask(self, request: Request, stop: Stop) -> Reply:
        """One exchange on the control connection. PeerGone."""
        control = self._control
        if control is None:
            raise PeerGone(f"the control connection to {self._remote.peer} is closed")
        try:
            with stop.waking(lambda: abort(control)):
                control.sendall(pack(request))
                size = unpack_length(receive_exactly(control, LENGTH.size))
                return unpack_reply(receive_exactly(control, size))
        except (OSError, ProtocolError) as exc:
            raise PeerGone(f"{self._remote.peer} broke off: {exc}") from exc

    def _watch_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().add_reader(self._control, self._heard)

    def _unwatch_control(self) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)

    def _heard(self) -> None:
        """An owner says nothing unasked, so this is its end."""
        self._lose("and has ended or was cut off")

    def _lose(self, why: str) -> None:
        self._unwatch_control()
        if self._gone is None:
            self._gone = PeerGone(f"{self._remote.peer} can't be reached any more, {why}")
            self._queues.fail(self._gone)
            self._completions.rouse()
