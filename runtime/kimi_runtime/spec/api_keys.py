"""The file of API keys: who may call the router, and as which tenant.

A line is a key, optionally followed by its tenant's name; blank lines and `#` comments are left
out. Keys without a name are tenants of their own: tenants never share cached prefixes, so giving
two keys one name is a decision of the operator.
"""

import hashlib
from pathlib import Path

from kimi_runtime.errors import ConfigError

MIN_API_KEY_CHARS = 16


def key_digest(key: bytes) -> bytes:
    """What a key is kept and looked up by, so that no comparison tells how near a guess came."""
    return hashlib.sha256(key).digest()


def read_tenants(path: Path) -> dict[bytes, str]:
    """Tenants by the digests of their keys.

    ConfigError if the file can't be read, has no key, or a line that is none.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the API keys {path} cannot be read: {exc}") from exc
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) > 2 or len(words[0]) < MIN_API_KEY_CHARS:
            raise ConfigError(
                f"{path}, line {number}: a key of at least {MIN_API_KEY_CHARS} characters is "
                "wanted, then optionally its tenant's name"
            )
        digest = key_digest(words[0].encode())
        tenants[digest] = words[1] if len(words) == 2 else f"key-{digest.hex()[:12]}"
    if not tenants:
        raise ConfigError(f"the API keys {path} has no key; write one a line")
    return tenants
