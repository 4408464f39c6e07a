"""A daemon's file, read again while it runs: what changes at once, and what needs a restart.

What is wrong in the file changes nothing. Fields that size or place what is allocated, or that
engines were told of, need a restart; so does every field that is not named here.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kimi_runtime.auth import read_call_keys
from kimi_runtime.errors import KimistackError
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.umbp.assembly import seconds_per_byte, terms_of
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.http import PoolHttp
from kimi_runtime.umbp.rpc.tls import Tls
from kimi_runtime.umbp.state import DaemonState

LOOK_S = 1.0
"""Between two looks whether a file changed."""

LIVE = frozenset(
    {
        *("evict_above", "evict_to", "recompute_rate"),
        *("tenants", "tenant_default"),
        *("ssd_after_uses", "ssd_write_rate"),
        *("peers", "feed_interval", "call_key", "log_level"),
    }
)
"""Fields that take effect at once; `peers` where there were some at the start."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a daemon's spec comes from, and how it is read (KimistackError if it is none)."""

    path: Path
    read: Callable[[], UmbpSpec]
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it read again soon, as a signal asks for."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What another look at the file brought."""

    changed: Sequence[str] = ()
    needs_restart: Sequence[str] = ()
    """Fields that differ and keep the value the daemon started with."""
    refused: str = ""
    """Why the file was not taken; all is as before."""


class Tuner:
    """Applies changes of its file to a running daemon."""

    def __init__(
        self,
        spec: UmbpSpec,
        source: Source | None,
        state: DaemonState,
        http: PoolHttp,
        tls: Tls | None = None,
    ) -> None:
        """`spec` is what the daemon started with; without a `source` there is nothing to reload."""
        self.spec = spec
        """What is in force."""
        self._source, self._state, self._http, self._tls = source, state, http, tls
        self._asked = asyncio.Event() if source is None else source.asked
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> Reloaded:
        """Read the file and apply what can be. Unavailable before the daemon serves."""
        clients = self._state.serving()
        async with self._one_at_a_time:
            try:
                if self._source is None:
                    done = Reloaded(refused="this daemon was not started from a file")
                else:
                    done = self._apply(clients, await asyncio.to_thread(self._source.read))
            except KimistackError as exc:
                done = Reloaded(refused=str(exc))
        self._tell(done)
        return done

    async def watch(self) -> None:
        """Reload when asked to, or when the file or the call key has changed; until cancelled.

        Certificates are renewed in the same pace.
        """
        seen = self._stamps()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._asked.wait()
            if self._tls is not None:
                self._tls.refresh()
            now = self._stamps()
            if now != seen or self._asked.is_set():
                seen = now
                self._asked.clear()
                await self.reload()

    def _stamps(self) -> list[tuple[int, ...] | None]:
        return [_stamp(self._source.path), _stamp(self.spec.call_key)] if self._source else []

    def _apply(self, clients: Clients, new: UmbpSpec) -> Reloaded:
        """Whatever can fail comes first, so that a file is taken as a whole or not at all."""
        old = self.spec
        differ = [
            name for name in UmbpSpec.model_fields if getattr(new, name) != getattr(old, name)
        ]
        live = [name for name in differ if name in LIVE]
        if clients.remote is None or old.peers_file is not None:
            live = [name for name in live if name != "peers"]
        keys = read_call_keys(new.call_key)
        if list(keys) != self._state.call_keys and "call_key" not in live:
            live.append("call_key")
        self.spec = old.model_copy(update={name: getattr(new, name) for name in live})
        self._state.call_keys[:] = keys
        self._put_in_force(clients, live)
        return Reloaded(live, [name for name in differ if name not in live])

    def _put_in_force(self, clients: Clients, live: Sequence[str]) -> None:
        spec, pool, second = self.spec, clients.pool, clients.second
        pool.high, pool.low = spec.evict_above, spec.evict_to
        pool.retention.seconds_per_byte = seconds_per_byte(
            spec, None if second is None else second.on_ssd
        )
        pool.accounts.grant(*terms_of(spec, pool.page_bytes))
        self._http.feed_interval_s = spec.feed_interval
        if second is not None:
            second.after_uses = spec.ssd_after_uses
            second.writer.bytes_per_s = spec.ssd_write_rate
        if clients.remote is not None and "peers" in live:
            clients.remote.owners.update(spec.peers)
        if "log_level" in live:
            logging.getLogger().setLevel(spec.log_level.upper())

    def _tell(self, done: Reloaded) -> None:
        if done.refused:
            self._state.reloads["refused"] += 1
            log.error("umbp: the file is not taken, all is as before: %s", done.refused)
            return
        self._state.reloads["applied" if done.changed else "unchanged"] += 1
        if done.changed:
            log.info("umbp: in force now: %s", ", ".join(done.changed))
        if done.needs_restart:
            log.warning("umbp: these need a restart: %s", ", ".join(done.needs_restart))


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Tells one state of a file from another; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
