"""Certificate authorities and what they sign, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kimi_runtime.spec.tls import TlsFiles

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl command here")


class Authority:
    """A CA in `folder`; not `strict`: one that lacks a usage, which Python refuses from 3.13 on."""

    def __init__(self, folder: Path, *, strict: bool = True) -> None:
        self.folder, self.certificate = folder, folder / "ca.pem"
        folder.mkdir()
        self._key = folder / "ca-key.pem"
        _openssl(
            *("req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=the CA"),
            *(("-addext", "keyUsage=critical,keyCertSign,cRLSign") if strict else ()),
            *_new_key(self._key, self.certificate),
        )

    def issue(
        self, folder: Path, *, host: str = "IP:127.0.0.1", name=None, days=1, usage: str = ""
    ) -> TlsFiles:
        """A certificate for `host`, with its key and the CA's certificate, written to `folder`.

        `usage` as extendedKeyUsage has it; empty: for all.
        """
        folder.mkdir(exist_ok=True)
        key, request, names = folder / "key.pem", folder / "request.pem", folder / "names"
        uses = f"extendedKeyUsage={usage}\n" if usage else ""
        keys = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
        names.write_text(f"subjectAltName={host}\n{keys}{uses}")
        _openssl("req", "-nodes", "-subj", "/CN=a daemon", *_new_key(key, request))
        certificate, ca = folder / "certificate.pem", folder / "ca.pem"
        _openssl(
            *("x509", "-req", "-days", days, "-CAcreateserial", "-extfile", names, "-in", request),
            *("-CA", self.certificate, "-CAkey", self._key, "-out", certificate),
        )
        ca.write_bytes(self.certificate.read_bytes())
        return TlsFiles(certificate=certificate, key=key, ca=ca, name=name)


def _new_key(key: Path, out: Path) -> tuple[object, ...]:
    return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-keyout", key, "-out", out


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
