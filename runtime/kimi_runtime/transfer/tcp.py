"""Moving bytes between hosts without RDMA: several authenticated streams per session, no copies.

The owner answers from threads of its own (`tcp_owner`), so a computing event loop delays no peer. A
reader's batch is merged, cut and spread over the session's streams, which few threads serve, each
several of them as their bytes come, with the target memory itself as their buffer. More threads
than cores would only wake each other. A batch that is cancelled or late ends its connections with a
reset: nothing is written from then on, and the owner forgets it.
"""

import asyncio
from collections.abc import Sequence

from kimi_connect.blocks import flat
from kimi_runtime import clock
from kimi_runtime.errors import PeerGone, RegionGone, TransferError
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.background import Stop, cores_for_copies, in_thread
from kimi_runtime.transfer.base import LinkCounters, Session, Span
from kimi_runtime.transfer.batches import Batches
from kimi_runtime.transfer.exports import Exports
from kimi_runtime.transfer.memory import Memory
from kimi_runtime.transfer.network import NetworkSettings, address_of, listen
from kimi_runtime.transfer.plan import spread
from kimi_runtime.transfer.serving import Server
from kimi_runtime.transfer.tcp_drive import Drive
from kimi_runtime.transfer.tcp_owner import Owner
from kimi_runtime.transfer.tcp_stream import Moving, Stream
from kimi_runtime.transfer.workers import Workers

_READER_THREADS = 64


class TcpTransport:
    """Serves its regions to peers and reads theirs."""

    name = "tcp"

    def __init__(self, peer: str, settings: NetworkSettings) -> None:
        self._settings = settings
        self._exports = Exports(self.name, peer)
        self._threads = Workers(_READER_THREADS, f"{peer}-tcp-reader")
        self._server: Server | None = None
        self._address = ""
        self._sessions: list[TcpSession] = []
        self._serving = f"{peer}-tcp-owner"

    def register(self, memory: Memory, *, writable: bool = False) -> RegionRef:
        """Let holders of a call key reach `memory`. ConfigError if nothing can be listened on."""
        if self._server is None:
            listener = listen(self._settings)
            self._address = address_of(listener, self._settings)
            owner = Owner(self._exports, self._settings.call_keys)
            threads = cores_for_copies()
            self._server = Server(listener, owner.serve, threads=threads, name=self._serving)
        return self._exports.register(
            flat(memory.view),
            size_bytes=memory.size_bytes,
            writable=writable,
            address=self._address,
        )

    def release(self, region: RegionRef) -> None:
        """From now on nobody reads or writes the region; what was under way has been told so."""
        self._exports.release(region)

    async def open(self, remote: RegionRef, *, deadline_s: float) -> Session:
        """A session with its first stream; PeerGone also where the deadline passes."""
        session = TcpSession(remote, self._settings, self._threads)
        try:
            await session.connect(deadline_s)
        except BaseException:
            await session.aclose()
            raise
        self._sessions = [s for s in self._sessions if not s.closed] + [session]
        return session

    async def aclose(self) -> None:
        """Release every region, close every session, end every thread."""
        self._exports.clear()
        for session in self._sessions:
            await session.aclose()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None
        self._threads.shutdown(wait=False)


class TcpSession:
    """Streams to one region of a peer."""

    def __init__(self, remote: RegionRef, settings: NetworkSettings, threads: Workers) -> None:
        self._remote, self._threads = remote, threads
        self._batches = Batches(remote.peer)
        self._width = settings.streams
        self._lanes = cores_for_copies()
        self._streams = [Stream(remote, settings) for _ in range(settings.streams)]
        self._free = self._streams[::-1]  # the last one freed, still connected, is taken first
        self._freed = asyncio.Semaphore(settings.streams)
        self._writable = False

    @property
    def counters(self) -> LinkCounters:
        """Bytes and time so far."""
        return self._batches.counters

    @property
    def closed(self) -> bool:
        """Whether the session was given up."""
        return self._batches.closed

    async def connect(self, deadline_s: float) -> None:
        """Open the region on one stream."""
        stream = self._streams[0]

        def work(stop: Stop) -> TransferError | None:
            try:
                stream.connect(stop)
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
        self._writable = stream.writable

    async def read(self, spans: Sequence[Span], into: memoryview, *, deadline_s: float) -> None:
        """Receive spans of the region into `into`."""
        await self._move(spans, flat(into), writes=False, deadline_s=deadline_s)

    async def write(self, spans: Sequence[Span], data: memoryview, *, deadline_s: float) -> None:
        """Send spans of `data` into the region."""
        if not self._writable and not self.closed:
            raise RegionGone(f"region {self._remote.key} is registered for reading only")
        await self._move(spans, flat(data), writes=True, deadline_s=deadline_s)

    async def aclose(self) -> None:
        """End the running batches and their connections."""
        await self._batches.aclose()
        for stream in self._streams:
            stream.close()

    async def _move(
        self, spans: Sequence[Span], local: memoryview, *, writes: bool, deadline_s: float
    ) -> None:
        ends_s = clock.now_s() + deadline_s
        with self._batches.batch(
            spans, remote_bytes=self._remote.size_bytes, local_bytes=local.nbytes, writes=writes
        ) as stop:
            failures: list[TransferError] = []
            in_time = deadline_s > 0
            plans = spread(spans, self._width) if in_time else ()
            if plans:
                streams = await self._take(len(plans), ends_s)
                try:
                    if len(streams) < len(plans):
                        plans = spread(spans, max(1, len(streams)))
                    moving = [
                        (stream, stream.move(plan, local, writes, stop))
                        for stream, plan in zip(streams, plans, strict=False)
                    ]
                    in_time = bool(moving) and await self._run(moving, stop, ends_s, failures)
                finally:
                    self._give_back(streams)
            if failures and not self.closed:
                raise failures[0]
            self._batches.require(in_time, spans, deadline_s)

    async def _take(self, wanted: int, ends_s: float) -> list[Stream]:
        """A stream as soon as one is free, and of the others what is free then; none: too late."""
        try:
            async with asyncio.timeout(ends_s - clock.now_s()):
                await self._freed.acquire()
        except TimeoutError:
            return []
        taken = [self._free.pop()]
        while len(taken) < wanted and not self._freed.locked():
            await self._freed.acquire()
            taken.append(self._free.pop())
        return taken

    def _give_back(self, streams: Sequence[Stream]) -> None:
        self._free += streams[::-1]
        for _ in streams:
            self._freed.release()

    async def _run(
        self,
        moving: Sequence[tuple[Stream, Moving]],
        stop: Stop,
        ends_s: float,
        failures: list[TransferError],
    ) -> bool:
        """Whether all was moved in time, each thread's streams one after another as they can."""
        lanes = [moving[lane :: self._lanes] for lane in range(min(self._lanes, len(moving)))]
        if len(lanes) == 1:
            return await self._lane(moving, stop, ends_s, failures)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._lane(lane, stop, ends_s, failures)) for lane in lanes
            ]
        return all(task.result() for task in running)

    async def _lane(
        self,
        moving: Sequence[tuple[Stream, Moving]],
        stop: Stop,
        ends_s: float,
        failures: list[TransferError],
    ) -> bool:
        """Whether one thread's part was moved in time. Its failure ends the others'."""
        drive = Drive(moving, stop)
        try:
            moved, _ = await in_thread(
                lambda _: drive.run(),
                ends_s=ends_s,
                stop=stop,
                executor=self._threads,
                meanwhile=drive.start,
            )
        except TransferError as exc:
            failures.append(exc)
            stop.set()
            return False
        return moved
