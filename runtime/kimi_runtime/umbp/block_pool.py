"""Loading and storing by the node's pool, as its users see it; `client.PoolClient` is one.

A missing or slow pool is an outcome or a number, never an exception.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kimi_connect.wire import Outcome


class LoadResult(NamedTuple):
    """The first `blocks` targets have their verified bytes; `outcome` says why the run ended.

    Targets after the run have undefined bytes, and nothing writes to them any more.
    """

    blocks: int
    outcome: Outcome


class BlockPool(Protocol):
    """What everybody who keeps blocks needs."""

    async def load(
        self,
        keys: Sequence[bytes],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str,
    ) -> LoadResult:
        """Copy the leading run of `keys` into `into`, verified. Writes nothing after it returns."""

    async def store(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        *,
        deadline_s: float,
        tenant: str,
        group_bytes: Sequence[int] | None = None,
    ) -> int:
        """Keep leading blocks, of layer groups of `group_bytes`, or of the client's own; returns
        how many are held now.
        """
