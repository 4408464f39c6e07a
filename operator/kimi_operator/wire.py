"""How requests leave the process: no write once leadership has ended; and what watches tell.

Both clients of the operator (`kube` for its own calls, kopf's for watches and finalizers) are given
sessions with `session_options`, so that neither can write past the other's knowledge.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from kimi_operator.kinds import Kind

if TYPE_CHECKING:
    from aiohttp.connector import Connection

READS = frozenset({"GET", "HEAD", "OPTIONS"})


class NotLeading(aiohttp.ClientConnectionError):
    """A write that was not sent: another operator may lead by now."""


@dataclass
class Tenure:
    """Until when this process may write, on the clock `now_s`. Without an election: for ever.

    The end is what the holder has proved to itself, by its own clock, from before its last renewal
    was sent; a process that was stopped and goes on finds it passed. A write that was sent within
    it may wait for its answer `late_s` longer.
    """

    now_s: Callable[[], float]
    until_s: float = float("inf")
    late_s: float = 0.0

    @property
    def remaining_s(self) -> float:
        """Seconds left; not positive once it is over."""
        return self.until_s - self.now_s()


@dataclass
class Watches:
    """When each watch last told anything, a bookmark included, by the path it watches."""

    now_s: Callable[[], float]
    _opened_at_s: dict[str, float] = field(default_factory=dict)
    _heard_at_s: dict[str, float] = field(default_factory=dict)

    def opened(self, path: str) -> None:
        """A watch of the path is asked for."""
        self._opened_at_s.setdefault(path, self.now_s())

    def heard(self, path: str) -> None:
        """Something came through it."""
        self._heard_at_s[path] = self.now_s()

    def heard_at_s(self, kind: Kind, namespace: str | None) -> float | None:
        """When the watch of a kind last told anything, or was first opened; None before that."""
        root = f"apis/{kind.api_version}" if kind.group else f"api/{kind.api_version}"
        inside = f"namespaces/{namespace}/" if namespace and kind.namespaced else ""
        for path, opened_at_s in self._opened_at_s.items():
            if path.endswith(f"/{root}/{inside}{kind.plural}"):
                return self._heard_at_s.get(path, opened_at_s)
        return None

    def silent_s(self, kind: Kind, namespace: str | None) -> float:
        """For how long the watch of a kind has told nothing; 0 before there is one."""
        at_s = self.heard_at_s(kind, namespace)
        return 0.0 if at_s is None else self.now_s() - at_s

    @property
    def all_silent_s(self) -> float:
        """For how long no watch at all has told anything; 0 before there is one."""
        last_s = (*self._heard_at_s.values(), *self._opened_at_s.values())
        return self.now_s() - max(last_s) if last_s else 0.0


class _ToldStream(aiohttp.StreamReader):
    """The body of a watch, telling of every piece that is read."""

    def __init__(self, body: aiohttp.StreamReader, heard: Callable[[], None]) -> None:
        self._body, self._heard = body, heard

    def __getattribute__(self, name: str) -> Any:
        if name in ("_body", "_heard", "iter_chunked"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_body"), name)

    def iter_chunked(self, n: int) -> Any:
        return _told(self._body.iter_chunked(n), self._heard)


async def _told(pieces: Any, heard: Callable[[], None]) -> AsyncIterator[bytes]:
    async for piece in pieces:
        heard()
        yield piece


def session_options(tenure: Tenure, watches: Watches) -> dict[str, Any]:
    """Arguments of an aiohttp session that keeps to the tenure and reports to the watches."""

    class FencedRequest(aiohttp.ClientRequest):
        async def send(self, conn: "Connection") -> aiohttp.ClientResponse:
            # here a connection is there and nothing is waited for any more before the bytes go
            if self.method not in READS and tenure.remaining_s <= 0 and not _of_leases(self.url):
                raise NotLeading("this process leads no longer, so it writes nothing")
            return await super().send(conn)

    class HeardResponse(aiohttp.ClientResponse):
        async def start(self, connection: "Connection") -> aiohttp.ClientResponse:
            watching = self.method == "GET" and "watch" in self.url.query
            path = self.url.path
            if watching:
                watches.opened(path)
            await super().start(connection)
            if watching:
                self.content = _ToldStream(self.content, lambda: watches.heard(path))
            return self

    return {"request_class": FencedRequest, "response_class": HeardResponse}


def _of_leases(url: Any) -> bool:
    return "/apis/coordination.k8s.io/v1/" in url.path
