"""What others will say of a certificate: a handshake with oneself, in memory."""

import ssl
from pathlib import Path

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL: dates are looked at elsewhere, and pass."""


def refusal(certificate: Path, key: Path, ca: str, name: str) -> str | None:
    """Why peers that expect `name` would refuse the certificate, as server or as client.

    `ca` is PEM. None: they take it. Raises ssl.SSLError and OSError for files that are none.
    """
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.verify_mode = ssl.CERT_REQUIRED
    accepting.load_verify_locations(cadata=ca)
    calling = ssl.create_default_context(cadata=ca)  # as peers call: Python 3.13's is stricter
    for context in (accepting, calling):
        context.load_cert_chain(certificate, key)
        context.verify_flags |= _NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = accepting.wrap_bio(there, back, server_side=True)
    client = calling.wrap_bio(back, there, server_hostname=name)
    for step in (client, server, client, server):  # each says what it can, and hears the other
        try:
            step.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as exc:
            return exc.verify_message
    return None
