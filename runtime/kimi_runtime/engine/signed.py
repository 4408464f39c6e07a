"""Signing what one worker asks of another with the deployment's call key."""

import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from kimi_runtime import auth, clock


def signed_headers(call_key: bytes, method: str, url: str) -> Mapping[str, str]:
    """The headers of a request without a body; ValueError for a URL that is none."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    nonce = secrets.token_bytes(auth.NONCE_BYTES)
    signature = auth.sign(call_key, method, target, b"", unix_s=clock.unix_s(), nonce=nonce)
    return {auth.HEADER: signature}
