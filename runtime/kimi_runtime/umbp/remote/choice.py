"""Whom to ask for a run of blocks. Pure."""

import hashlib
from collections.abc import Collection, Mapping


def owner_to_ask(
    runs: Mapping[str, int], usable: Collection[str], busy: Mapping[str, int], key: bytes
) -> str | None:
    """The usable owner that has most of the run; None if none has any of it.

    `runs` is the length of the leading run by owner, `busy` the fetches under way from each. Equal
    ones share by rendezvous over the run's first `key`: all who want it ask the same owner, and
    other runs ask others.
    """
    able = [owner for owner, run in runs.items() if run and owner in usable]
    return max(
        able, key=lambda owner: (runs[owner], -busy.get(owner, 0), lot(owner, key)), default=None
    )


def lot(owner: str, key: bytes) -> bytes:
    """Rendezvous: the highest lot of a key gets it."""
    return hashlib.blake2b(owner.encode() + b"\0" + key, digest_size=8).digest()
