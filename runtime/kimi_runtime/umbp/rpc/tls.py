"""TLS of a daemon, for gRPC and HTTP, from files that are replaced as certificates are renewed.

Over gRPC both sides show a certificate that the deployment's CA signed. HTTP asks its callers for
none, since probes and scrapers have none; who calls for more is known by the call key.
"""

import logging
import math
import ssl
from datetime import UTC, datetime
from typing import NamedTuple

import grpc

from kimi_runtime import clock
from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.tls import TlsFiles
from kimi_runtime.umbp.rpc.proof import refusal
from kimi_runtime.umbp.rpc.validity import Validity, validity_of

log = logging.getLogger(__name__)


class _Read(NamedTuple):
    """What the files said."""

    certificate: bytes
    key: bytes
    ca: bytes


class Tls:
    """The certificates as of the last `refresh`; ConfigError if there are none to start from."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.renewals = 0
        """Times that new files were taken."""
        self.server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """For the HTTP face; renewed in place."""
        self._read = _read(files)
        self.client_context = self._take(self._read)
        """For calls of others' HTTP faces; another one after a renewal."""
        self._complaint = ""
        self._warned_day: int | None = None
        self._warn()

    @property
    def days_left(self) -> float:
        """Days until the daemon's own certificate ends, negative once it has; NaN: unreadable."""
        validity = self._validity
        return math.nan if validity is None else validity.days_left(clock.unix_s())

    @property
    def days(self) -> float:
        """Days for which that certificate was made out; NaN: unreadable."""
        return math.nan if self._validity is None else self._validity.days

    def refresh(self) -> None:
        """Look at the files; new ones that fit together count from the next connection on."""
        try:
            found = _read(self.files)
            if found != self._read:
                self.client_context = self._take(found)
                self._read = found
                self.renewals += 1
                self._warned_day = None
                log.info("umbp: the certificates were renewed")
            self._complaint = ""
        except ConfigError as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.error("umbp: the certificates are as before: %s", exc)
        self._warn()

    def server_credentials(self) -> "grpc.ServerCredentials":
        """For a gRPC server, which then follows renewals by itself."""
        given = self._read

        def newest() -> "grpc.ServerCertificateConfiguration | None":
            nonlocal given
            if self._read is given:
                return None
            given = self._read
            return _configuration(given)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given), newest, require_client_authentication=True
        )

    def channel_credentials(self) -> "grpc.ChannelCredentials":
        """For a gRPC channel; it keeps these, so make another one after a renewal."""
        read = self._read
        return grpc.ssl_channel_credentials(read.ca, read.key, read.certificate)

    def _warn(self) -> None:
        """Say once a day that the certificate ends soon, or has ended."""
        now_s, validity = clock.unix_s(), self._validity
        if validity is None or not validity.ends_soon(now_s):
            return
        days = math.floor(validity.days_left(now_s))
        if days == self._warned_day:
            return
        self._warned_day = days
        path, when = self.files.certificate, f"{datetime.fromtimestamp(validity.ends_s, UTC):%F %R}"
        if validity.days_left(now_s) <= 0:
            log.error(
                "umbp: the certificate %s has expired on %s UTC, and others refuse it: renew it, "
                "or correct this machine's clock",
                *(path, when),
            )
        else:
            log.warning(
                "umbp: the certificate %s expires on %s UTC, in %.1f days: renew it",
                *(path, when, validity.days_left(now_s)),
            )

    def _take(self, found: _Read) -> ssl.SSLContext:
        """Check that the files fit together, and use them."""
        files = self.files
        if not found.ca.strip():  # libraries take "no CA" for "every CA of this machine"
            raise ConfigError(f"tls: {files.ca} is empty; write the CA of this deployment there")
        try:
            ca = found.ca.decode("ascii")
            client = ssl.create_default_context(cadata=ca)
            client.load_cert_chain(files.certificate, files.key)
            name = files.name
            why = name and refusal(files.certificate, files.key, ca, name)
            if why:  # before others find out, one after the other
                raise ConfigError(
                    f"tls: peers will refuse {files.certificate}: {why}; write one made out to "
                    f"{name}, for servers and clients, that {files.ca} has signed"
                )
            self.server_context.load_cert_chain(files.certificate, files.key)
        except (ssl.SSLError, OSError, ValueError) as exc:
            raise ConfigError(
                f"tls: {files.certificate}, {files.key} and {files.ca} are no certificate with its "
                f"key and a CA ({exc}); write PEM files that belong together"
            ) from exc
        try:
            self._validity: Validity | None = validity_of(found.certificate)
        except ValueError:  # good enough for the library that uses it
            self._validity = None
        return client


def _configuration(read: _Read) -> "grpc.ServerCertificateConfiguration":
    return grpc.ssl_server_certificate_configuration([(read.key, read.certificate)], read.ca)


def _read(files: TlsFiles) -> _Read:
    try:
        return _Read(files.certificate.read_bytes(), files.key.read_bytes(), files.ca.read_bytes())
    except OSError as exc:
        raise ConfigError(f"tls: {exc.filename} cannot be read: {exc.strerror}") from exc
