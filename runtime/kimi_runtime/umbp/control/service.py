"""The service that operators call."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from kimi_runtime.errors import Overloaded, RequestError
from kimi_runtime.umbp.control.drain import drain
from kimi_runtime.umbp.control.forget import clear, evict
from kimi_runtime.umbp.control.inspect import inspect
from kimi_runtime.umbp.control.verify import verify
from kimi_runtime.umbp.proto import control_pb2 as wire
from kimi_runtime.umbp.rpc.methods import CLEAR, DRAIN, EVICT, INSPECT, RELOAD, VERIFY
from kimi_runtime.umbp.rpc.server import RpcServer
from kimi_runtime.umbp.state import DaemonState
from kimi_runtime.umbp.tuning import Reloaded

VERIFY_S = 60.0
"""When to try again while somebody else verifies."""


class ControlService:
    """One daemon's. `reload` reads its file again."""

    def __init__(self, state: DaemonState, reload: Callable[[], Awaitable[Reloaded]]) -> None:
        self._state, self._reload, self._verifying = state, reload, False

    def add_to(self, server: RpcServer) -> None:
        """Answer through `server`."""
        server.unary(INSPECT, self.inspect)
        server.stream(VERIFY, self.verify)
        server.unary(EVICT, self.evict)
        server.unary(CLEAR, self.clear)
        server.unary(DRAIN, self.drain)
        server.unary(RELOAD, self.reload)

    async def inspect(self, asked: wire.InspectRequest) -> wire.InspectAnswer:
        """What it holds, for whom, and how it fares."""
        return inspect(self._state, asked)

    async def verify(self, asked: wire.VerifyRequest) -> AsyncGenerator[wire.VerifyProgress, None]:
        """Read blocks and check them; drop what is damaged. One at a time: each reads as it may."""
        if self._verifying:
            raise Overloaded("the blocks are being verified already", retry_after_s=VERIFY_S)
        self._verifying = True
        try:
            async with aclosing(verify(self._state.serving(), asked)) as answers:
                async for progress in answers:
                    yield progress
        finally:
            self._verifying = False

    async def evict(self, asked: wire.EvictRequest) -> wire.EvictAnswer:
        """Forget blocks that nobody reads."""
        self._meant(asked.epoch)
        return await evict(self._state.serving(), asked)

    async def clear(self, asked: wire.ClearRequest) -> wire.ClearAnswer:
        """Forget all that was put until now."""
        return clear(self._state.serving(), asked)

    async def drain(self, asked: wire.DrainRequest) -> wire.DrainAnswer:
        """Take no more, bring what is valuable to peers, wait for readers."""
        self._meant(asked.epoch)
        return await drain(self._state, asked)

    async def reload(self, asked: wire.ReloadRequest) -> wire.ReloadAnswer:
        """Read the file again."""
        done = await self._reload()
        return wire.ReloadAnswer(
            changed=done.changed, needs_restart=done.needs_restart, refused=done.refused
        )

    def _meant(self, epoch: int) -> None:
        """RequestError if a request names another daemon's epoch, or an earlier one of this.

        A call that was overheard can be sent to this daemon once more, or to another one that
        accepts the same key; what names an epoch does nothing there.
        """
        own = self._state.serving().arena.epoch
        if epoch not in (0, own):
            raise RequestError(f"this daemon's epoch is {own}, not {epoch}: ask again for that")
