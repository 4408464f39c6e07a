"""Names of KV blocks: equal keys mean equal content.

`key = blake2b(parent ‖ ids, key=pool_key, digest_size=16)` with ids as little-endian uint32. The
root of a chain carries everything else that decides the content: model, layout, adapter, tenant.
The pool key never crosses a wire, so nobody outside the deployment can name (or guess) a block.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

from kimi_runtime.errors import ConfigError

KEY_BYTES = 16


def pool_key_of(call_key: bytes) -> bytes:
    """The pool key of a deployment, derived from its call key; 32 bytes.

    ConfigError for an empty call key: block names would be public.
    """
    if not call_key:
        raise ConfigError("the call key is empty; write at least 32 random bytes into its file")
    if len(call_key) > hashlib.blake2b.MAX_KEY_SIZE:
        call_key = hashlib.blake2b(call_key).digest()  # all of a long key counts
    return hashlib.blake2b(b"kimistack/pool-key", key=call_key, digest_size=32).digest()


def root_key(
    pool_key: bytes, *, model_digest: str, layout: str, adapter: str = "", tenant: str = "default"
) -> bytes:
    """The parent of a chain's first block."""
    parts = (model_digest, layout, adapter, tenant)
    digest = hashlib.blake2b(key=pool_key, digest_size=KEY_BYTES, person=b"kimi-root")
    for part in parts:
        text = part.encode()
        digest.update(struct.pack("<I", len(text)) + text)  # lengths: ("a","b") is not ("ab","")
    return digest.digest()


def next_key(pool_key: bytes, parent: bytes, ids: Sequence[int]) -> bytes:
    """The key of the block `ids` after the history that `parent` names."""
    packed = struct.pack(f"<{len(ids)}I", *ids)
    return hashlib.blake2b(parent + packed, key=pool_key, digest_size=KEY_BYTES).digest()


def block_keys(
    pool_key: bytes, parent: bytes, ids: Sequence[int], block_tokens: int
) -> list[bytes]:
    """Keys of the full blocks of `ids`, continuing after `parent`. A partial tail has no key."""
    keys = []
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        parent = next_key(pool_key, parent, ids[start : start + block_tokens])
        keys.append(parent)
    return keys


def hex_keys(keys: Iterable[bytes]) -> tuple[str, ...]:
    """Keys as they appear in JSON."""
    return tuple(key.hex() for key in keys)
