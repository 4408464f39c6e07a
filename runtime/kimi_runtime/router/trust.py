"""Whom a router takes for a pool of its deployment: the CA's file, as whoever renews it left it."""

import logging
import ssl
from pathlib import Path

from kimi_runtime import clock
from kimi_runtime.errors import ConfigError

LOOK_S = 1.0
"""The file is read again no sooner than that after the last time."""

_log = logging.getLogger(__name__)


class PoolTrust:
    """The authority that signs pools' certificates, and the name they are made out to.

    `ca` None: whom the system trusts. `name` None: the host that is called. Raises ConfigError if
    there is no certificate to start from; later on, a file that holds none changes nothing.
    """

    def __init__(self, ca: Path | None = None, name: str | None = None) -> None:
        self.name = name
        self._ca = ca
        self._read = b"" if ca is None else _read(ca)
        self._context = None if ca is None else _context(ca, self._read)
        self._looked_s = clock.now_s()
        self._complaint = ""

    def context(self) -> ssl.SSLContext | bool:
        """What the next connection is checked by, as aiohttp takes it."""
        if self._ca is None or self._context is None:
            return True
        now_s = clock.now_s()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look(self._ca)
        return self._context

    def _look(self, ca: Path) -> None:
        try:
            found = _read(ca)
            if found != self._read:
                self._context = _context(ca, found)
                self._read = found
                _log.info("pools' authority renewed", extra={"fields": {"file": str(ca)}})
            self._complaint = ""
        except ConfigError as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                _log.error("pools' authority unchanged", extra={"fields": {"why": str(exc)}})


def _read(ca: Path) -> bytes:
    try:
        return ca.read_bytes()
    except OSError as exc:
        raise ConfigError(f"pools_ca: {ca} cannot be read: {exc.strerror}") from exc


def _context(ca: Path, found: bytes) -> ssl.SSLContext:
    if not found.strip():  # without any, the machine's own authorities would be trusted
        raise ConfigError(f"pools_ca: {ca} is empty; write the CA of the pools' certificates there")
    try:
        return ssl.create_default_context(cadata=found.decode("ascii"))
    except (ssl.SSLError, ValueError) as exc:
        raise ConfigError(f"pools_ca: {ca} holds no certificate that can be read: {exc}") from exc
