"""Who may call an internal port: every HTTP request is signed with the deployment's call key.

The header is `X-Kimistack-Auth: v1 <unix seconds> <nonce> <mac>`, with

    mac = HMAC-SHA256(call key, "v1" ‖ METHOD ‖ path with query ‖ seconds ‖ nonce ‖ SHA-256(body))

and a newline between the fields. A signature is good for `FRESH_S` seconds around its time and,
where the callee keeps a `ReplayGuard`, once. The key itself never crosses a wire. Pure but for
`read_call_keys`: time and nonce are arguments. `docs/decisions/0002-internal-auth.md` has the
reasons.
"""

import hashlib
import hmac
import stat
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from kimi_runtime.errors import ConfigError, Unauthorized

HEADER = "X-Kimistack-Auth"
FRESH_S = 60.0
MIN_KEY_BYTES = 32
NONCE_BYTES = 16
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""What probes and scrapers read, which can't sign. These answers hold no request data."""

_VERSION = "v1"


def sign(
    call_key: bytes, method: str, path: str, body: bytes, *, unix_s: float, nonce: bytes
) -> str:
    """The header's value for one request.

    `path` is the request target as sent (`/feed?epoch=3&after=0`), `body` the exact bytes. `nonce`
    is `NONCE_BYTES` fresh random bytes (`secrets.token_bytes`).
    """
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    seconds = str(int(unix_s))
    mac = _mac(call_key, method, path, body, seconds, nonce.hex())
    return f"{_VERSION} {seconds} {nonce.hex()} {mac}"


def verify(
    call_keys: Sequence[bytes],
    header: str | None,
    method: str,
    path: str,
    body: bytes,
    *,
    unix_s: float,
) -> bytes:
    """Check a header against any of `call_keys` (the new and the old one during a rotation).

    Returns the nonce, for a `ReplayGuard`. Raises Unauthorized, which never says how near a guess
    came; the comparison takes constant time.
    """
    if not header:
        raise Unauthorized(f"{method} {path} needs the header {HEADER}, signed with the call key")
    fields = header.split(" ")
    if len(fields) != 4 or fields[0] != _VERSION:
        raise Unauthorized(f"{HEADER} is not of the form '{_VERSION} seconds nonce mac'")
    _, seconds, nonce_hex, mac = fields
    nonce = _nonce(nonce_hex)
    if not seconds.isascii() or not seconds.isdigit() or len(seconds) > 15:
        raise Unauthorized(f"{HEADER} has no valid time")
    good = False
    for call_key in call_keys:
        expected = _mac(call_key, method, path, body, seconds, nonce_hex)
        good |= hmac.compare_digest(expected.encode(), mac.encode())
    if not good:
        raise Unauthorized(f"{HEADER} does not match the request and this deployment's call key")
    if abs(unix_s - int(seconds)) > FRESH_S:
        raise Unauthorized(
            f"{HEADER} was signed {unix_s - int(seconds):+.0f} s off this host's clock; "
            f"at most {FRESH_S:.0f} s are accepted: synchronise the clocks"
        )
    return nonce


class ReplayGuard:
    """Remembers nonces while their signatures are fresh, so that each is accepted once.

    Holds at most `limit` nonces; beyond it the oldest are forgotten, which shortens the protection
    but never refuses a good caller.
    """

    def __init__(self, limit: int = 200_000) -> None:
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        self._limit = limit

    def accept(self, nonce: bytes, *, unix_s: float) -> None:
        """Take a verified nonce in; Unauthorized if it was here before."""
        while self._seen:
            oldest, at_s = next(iter(self._seen.items()))
            # signatures may lie FRESH_S ahead and are good for FRESH_S after that
            if at_s >= unix_s - 2 * FRESH_S and len(self._seen) < self._limit:
                break
            del self._seen[oldest]
        if nonce in self._seen:
            raise Unauthorized(f"{HEADER} was used before: sign every request anew")
        self._seen[nonce] = unix_s


def read_call_keys(path: Path) -> tuple[bytes, ...]:
    """The keys in a call-key file, one a line, newest first: sign with the first, accept all.

    Raises ConfigError if the file is missing, readable by others, empty, or has a key of fewer
    than `MIN_KEY_BYTES` bytes.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"the call key {path} cannot be read ({exc.strerror}); "
            f"create it with: head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > {path}"
        ) from exc
    if not stat.S_ISREG(mode):
        raise ConfigError(f"the call key {path} is no file; name a file with the key as its text")
    if mode & stat.S_IROTH:
        raise ConfigError(
            f"the call key {path} can be read by every user (mode {stat.S_IMODE(mode):04o}); "
            f"run: chmod 600 {path}"
        )
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or min(map(len, keys)) < MIN_KEY_BYTES:
        have = min(map(len, keys), default=0)
        raise ConfigError(
            f"the call key {path} has {have} bytes; it must have {MIN_KEY_BYTES} or more"
        )
    return keys


def read_call_key(path: Path) -> bytes:
    """The key to sign with: the first of `read_call_keys`."""
    return read_call_keys(path)[0]


def _mac(call_key: bytes, method: str, path: str, body: bytes, seconds: str, nonce_hex: str) -> str:
    digest = hashlib.sha256(body).hexdigest()
    message = "\n".join((_VERSION, method.upper(), path, seconds, nonce_hex, digest))
    return hmac.new(call_key, message.encode(), hashlib.sha256).hexdigest()


def _nonce(text: str) -> bytes:
    try:
        nonce = bytes.fromhex(text)
    except ValueError as exc:
        raise Unauthorized(f"{HEADER} has no valid nonce") from exc
    if len(nonce) != NONCE_BYTES:
        raise Unauthorized(f"{HEADER} has no valid nonce")
    return nonce
