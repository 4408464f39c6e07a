"""Sessions kept open between hand-offs, so that a peer's memory is mapped once, not per request."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kimi_runtime.errors import PeerGone, RegionGone
from kimi_runtime.spec.request import RegionRef
from kimi_runtime.transfer.base import Session, Transport


@dataclass(slots=True, eq=False)
class _Kept:
    session: Session | None = None
    users: int = 0
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionCache:
    """The most recently used sessions of a transport; at most `limit` of them idle."""

    def __init__(self, transport: Transport, *, limit: int = 256) -> None:
        self._transport, self._limit = transport, limit
        self._kept: OrderedDict[RegionRef, _Kept] = OrderedDict()

    def __len__(self) -> int:
        """How many are open."""
        return sum(kept.session is not None for kept in self._kept.values())

    @asynccontextmanager
    async def session(self, remote: RegionRef, *, deadline_s: float) -> AsyncIterator[Session]:
        """The session to a region, opened if need be; errors as `Transport.open`.

        A body that raises RegionGone or PeerGone has the session dropped.
        """
        kept = self._kept.setdefault(remote, _Kept())
        self._kept.move_to_end(remote)
        kept.users += 1
        gone = False
        try:
            async with kept.opening:
                if kept.session is None:
                    kept.session = await self._transport.open(remote, deadline_s=deadline_s)
            yield kept.session
        except (RegionGone, PeerGone):
            gone = True
            raise
        finally:
            kept.users -= 1
            if gone and self._kept.get(remote) is kept:
                del self._kept[remote]
            await self._close_idle(kept, remote)

    async def aclose(self) -> None:
        """Close all of them; running batches end with TransferCancelled."""
        while self._kept:
            _, kept = self._kept.popitem()
            if kept.session is not None:
                await kept.session.aclose()

    async def _close_idle(self, kept: _Kept, remote: RegionRef) -> None:
        closing = [] if self._kept.get(remote) is kept or kept.users else [kept]
        idle = [ref for ref, other in self._kept.items() if not other.users]
        closing += [self._kept.pop(ref) for ref in idle[: max(0, len(idle) - self._limit)]]
        for other in closing:
            if other.session is not None:
                await other.session.aclose()
