"""What a daemon listens on, and the lock that makes it its arena's only one."""

import fcntl
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.umbp import UmbpSpec

SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket, by Linux."""


@contextmanager
def alone(arena: Path) -> Iterator[None]:
    """Only one daemon may own an arena; the lock ends with the process."""
    descriptor = os.open(f"{arena}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigError(
                f"another daemon runs on the arena {arena}; stop it or choose another arena"
            ) from exc
        yield
    finally:
        os.close(descriptor)


async def listen(runner: web.AppRunner, spec: UmbpSpec, tls: ssl.SSLContext | None = None) -> int:
    """Serve HTTP at the spec's address; the port."""
    site = web.TCPSite(runner, spec.host, spec.port, ssl_context=tls)
    try:
        await site.start()
    except OSError as exc:
        raise ConfigError(
            f"{spec.host}:{spec.port} can't be listened on ({exc.strerror or exc}); "
            "stop who uses it or choose another port"
        ) from exc
    return int(runner.addresses[0][1])


@contextmanager
def bound(path: Path) -> Iterator[socket.socket]:
    """A listening Unix socket, removed on the way out."""
    listener = _bind(path)
    try:
        yield listener
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    """A listening Unix socket, mode 0600, in place of a dead one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            _remove_dead(path)
        before = os.umask(0o177)  # there must be no moment at which others could connect
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise ConfigError(f"the socket {path} can't be created: {exc.strerror}") from exc
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} is there and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise ConfigError(f"another process listens on {path}; stop it or choose another path")
