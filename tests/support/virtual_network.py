"""What lies between the processes of a simulated cluster: sockets, calls, feeds, memory.

Everything goes through `Network.step`, which numbers it, writes it down and says what goes wrong.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from kimi_connect.frames import FrameDecoder
from kimi_runtime.errors import KimistackError, PeerGone, TransferLate
from kimi_runtime.transfer.chaos import ChaosTransport, Fault
from kimi_runtime.transfer.loopback import Fabric, LoopbackTransport
from kimi_runtime.umbp.feed import decode_line
from kimi_runtime.umbp.remote.calls import FEED_SILENCE_S, OwnerBusy, OwnerCalls
from kimi_runtime.umbp.rpc.server import RpcServer
from kimi_runtime.umbp.serve_feed import Following, feed_lines
from mishaps import Blow, Kind, Mishap, Plan, Step, Upset, flipped, none
from virtual_streams import Stream
from virtual_time import Process, VirtualLoop, current

CALL_S, FEED_S, THREAD_S = 5e-4, 3e-4, 2e-4
DELAY_S = 0.2
STALL_S = 12.0
GRPC_PORT = 8102

SLOW = {Mishap.DELAY: DELAY_S, Mishap.REORDER: DELAY_S, Mishap.STALL: STALL_S}


@dataclass(slots=True, eq=False)
class Face:
    """What a daemon answers to its peers."""

    process: Process
    rpc: RpcServer
    state: Any
    feed_interval_s: float
    calls: set["asyncio.Future[bytes]"] = field(default_factory=set)
    feeds: set["asyncio.Queue[Any]"] = field(default_factory=set)

    def gone(self) -> None:
        """Its process has ended: who waits for it hears that."""
        for call in list(self.calls):
            if not call.done():
                call.set_exception(_failed(grpc.StatusCode.UNAVAILABLE, "connection reset"))
        for feed in self.feeds:
            feed.put_nowait(None)


class Network:
    """The links of one cluster, and the blows that `plan` deals."""

    def __init__(self, loop: VirtualLoop, seed: int = 0, plan: Plan = none) -> None:
        self.plan, self.dice = plan, random.Random(seed)
        self.trace: list[Step] = []
        self.blows: list[tuple[int, Step, Blow]] = []
        self.upset: Callable[[Upset, str], None] = lambda upset, whom: None
        self.faces: dict[str, list[Face]] = defaultdict(list)
        """Who answers at a host; several take turns."""
        self.fabric = Fabric()
        self._loop, self._turns = loop, 0
        loop.thread = self.thread
        loop.connect = self._connect

    def step(self, kind: Kind, what: str) -> Mishap | None:
        """A step begins: what goes wrong with it."""
        step = Step(round(self._loop.time(), 7), kind, current().name, what)
        number = len(self.trace)
        self.trace.append(step)
        blow = self.plan(number, step)
        if blow is None:
            return None
        self.blows.append((number, step, blow))
        if isinstance(blow.what, Upset):
            self.upset(blow.what, blow.whom or step.who)
            return None
        return blow.what

    def thread(self, what: str) -> float:
        """How long a piece of work in a thread takes."""
        mishap = self.step(Kind.THREAD, what)
        return THREAD_S + (SLOW[mishap] if mishap else 0.0)

    def claiming(self, claim: Callable[..., bool]) -> Callable[..., bool]:
        """Stands in for `Arena.claim`."""
        return lambda *given: self.step(Kind.CLAIM, "claim") is None and claim(*given)

    def face(self, host: str) -> Face:
        """Who answers there now. PeerGone."""
        faces = [face for face in self.faces[host] if face.process.alive]
        if not faces:
            raise PeerGone(f"nobody answers at {host}")
        self._turns += 1
        return faces[self._turns % len(faces)]

    def _connect(self, factory: Any, server: Any) -> Any:
        return Stream.pair(self._loop, self._frame, factory, server)

    def _frame(self, data: bytes) -> Mishap | None:
        decoder = FrameDecoder()
        start = data[: decoder.room().nbytes]
        decoder.room()[: len(start)] = start
        decoder.received(len(start))
        frame = decoder.next()
        return self.step(Kind.SOCKET, frame.op.name if frame else "part of a frame")

    async def transport(self, name: str, *, peer: str, **_: Any) -> ChaosTransport:
        """Stands in for `open_transport`."""
        inner = LoopbackTransport(peer, self.fabric)
        return ChaosTransport(inner, _Copies(self))

    def channel(self, target: str, *_: Any) -> "_Channel":
        """Stands in for gRPC's."""
        return _Channel(self, target.rpartition(":")[0])

    def calls(self, *given: Any, **named: Any) -> OwnerCalls:
        """Stands in for `OwnerCalls`, whose feed comes from here."""
        made = _Calls(*given, **named)
        made.network = self
        return made

    async def pass_on(self, kind: Kind, name: str, body: bytes) -> list[bytes]:
        """What arrives of a message, and how often; when it does."""
        mishap = self.step(kind, name)
        if mishap is Mishap.DROP:
            await asyncio.sleep(3600.0)  # who waits has a deadline
        if mishap is Mishap.CUT:
            raise _failed(grpc.StatusCode.UNAVAILABLE, "connection reset")
        await asyncio.sleep(CALL_S + SLOW.get(mishap, 0.0) if mishap else CALL_S)
        if mishap is Mishap.CORRUPT:
            body = flipped(body, self.dice)
        return [body, body] if mishap is Mishap.DUPLICATE else [body]


class _Copies:
    """The plan of a `ChaosTransport`: the next step says what happens."""

    seed = 0
    delay_s = DELAY_S

    def __init__(self, network: Network) -> None:
        self._network = network

    def draw(self, dice: random.Random) -> Fault | None:
        """The fault of one batch."""
        mishap = self._network.step(Kind.COPY, "read")
        return None if mishap is None else Fault(mishap.value)


class _Channel:
    """A gRPC channel to a host."""

    def __init__(self, network: Network, host: str) -> None:
        self._network, self._host = network, host

    async def close(self, grace: float | None = None) -> None:
        """Nothing is kept open."""

    def unary_unary(self, path: str) -> Callable[..., Any]:
        """Calls of one method."""

        async def call(body: bytes, *, timeout: float, metadata: Any) -> bytes:
            try:
                async with asyncio.timeout(timeout):
                    return await self._call(path, body, timeout, metadata)
            except TimeoutError as exc:
                raise _failed(grpc.StatusCode.DEADLINE_EXCEEDED, "too late") from exc

        return call

    async def _call(self, path: str, body: bytes, timeout: float, metadata: Any) -> bytes:
        name = path.rpartition("/")[2]
        bodies = await self._network.pass_on(Kind.CALL, name, body)
        try:
            face = self._network.face(self._host)
        except PeerGone as exc:
            raise _failed(grpc.StatusCode.UNAVAILABLE, str(exc)) from exc
        _, service, method = path.split("/")
        handler = face.rpc._services[service][method].unary_unary
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        face.calls.add(answered)
        for one in bodies:
            work = self._answer(name, handler, one, _Context(timeout, metadata), answered)
            face.process.start(work)
        try:
            return await answered
        finally:
            face.calls.discard(answered)

    async def _answer(
        self,
        name: str,
        handler: Any,
        body: bytes,
        context: "_Context",
        answered: "asyncio.Future[bytes]",
    ) -> None:
        """The server's side: it works for as long as its caller waits."""
        try:
            async with asyncio.timeout(context.timeout):
                answer = await handler(body, context)
                (answer, *_) = await self._network.pass_on(Kind.ANSWER, name, answer)
        except TimeoutError:
            return
        except grpc.aio.AioRpcError as exc:
            if not answered.done():
                answered.set_exception(exc)
            return
        if not answered.done():
            answered.set_result(answer)


class _Context:
    """What a handler sees of its call."""

    def __init__(self, timeout: float, metadata: Any) -> None:
        self.timeout, self._metadata = timeout, metadata

    def invocation_metadata(self) -> Any:
        """As it was sent."""
        return self._metadata

    def time_remaining(self) -> float:
        """Until the caller gives up."""
        return self.timeout

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with an error."""
        raise _failed(code, details)


def _failed(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=details)


class _Calls(OwnerCalls):
    """`OwnerCalls` whose feed comes over a simulated connection."""

    network: Network

    async def feed(self, epoch: int | None, after: int) -> AsyncGenerator[Any, None]:
        """Lines until the owner ends the stream."""
        await asyncio.sleep(CALL_S)
        face = self.network.face(self.url.removeprefix("http://").partition(":")[0])
        try:
            log = face.state.serving().feed
        except KimistackError as exc:
            raise OwnerBusy(str(exc)) from exc
        self._port = GRPC_PORT
        await self._close_stale()
        lines = feed_lines(
            log,
            face.state.pulse,
            Following(epoch, after, summed=True),
            interval_s=face.feed_interval_s,
        )
        arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        face.feeds.add(arrived)
        sending = face.process.start(self._send(lines, arrived))
        try:
            while (line := await _in_time(arrived)) is not None:
                yield decode_line(line)
        finally:
            face.feeds.discard(arrived)
            sending.cancel()

    async def _send(self, lines: Any, arrived: "asyncio.Queue[bytes | None]") -> None:
        """Send each line; what is to be reordered waits for the next one."""
        network, loop, due_s = self.network, asyncio.get_running_loop(), 0.0
        held: bytes | None = None
        async for line in lines:
            mishap = network.step(Kind.FEED, "line")
            if mishap is Mishap.CUT:
                break
            if mishap is Mishap.DROP:
                continue
            if mishap is Mishap.REORDER:
                held = line
                continue
            due_s = max(due_s, loop.time() + FEED_S + (SLOW.get(mishap, 0.0) if mishap else 0.0))
            body = flipped(line[:-1], network.dice) if mishap is Mishap.CORRUPT else line
            sent = [body, body] if mishap is Mishap.DUPLICATE else [body]
            sent, held = [*sent, *([] if held is None else [held])], None
            for one in sent:
                loop.call_at(due_s, arrived.put_nowait, one)
        loop.call_at(max(due_s, loop.time()), arrived.put_nowait, None)


async def _in_time(arrived: "asyncio.Queue[bytes | None]") -> bytes | None:
    try:
        async with asyncio.timeout(FEED_SILENCE_S):
            return await arrived.get()
    except TimeoutError as exc:
        raise TransferLate("the feed is silent") from exc
