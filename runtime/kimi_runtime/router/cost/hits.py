"""How much of a prompt can come from memory: whole blocks, and for hybrid models a checkpoint.

A model with linear-attention layers resumes only where its state was kept: a hit is the deepest
position that has both KV and a state checkpoint. One token at least is computed, for its logits.
Pure.
"""

from bisect import bisect_right
from collections.abc import Sequence

from kimi_runtime.router.view import KvSource, RequestView, WorkerView

Found = Sequence[tuple[int, KvSource]]
"""Tokens to resume from and who has them, deepest first."""


def usable_tokens(
    held: int, checkpoints: tuple[int, ...] | None, *, prompt_tokens: int, block_tokens: int
) -> int:
    """The deepest position to resume from, of `held` tokens of KV."""
    limit = min(held, prompt_tokens - 1)
    if limit <= 0:
        return 0
    if checkpoints is None:
        return limit - limit % block_tokens
    index = bisect_right(checkpoints, limit)
    return checkpoints[index - 1] if index else 0


def usable_of(source: KvSource, held: int, request: RequestView, worker: WorkerView) -> int:
    """What the worker can resume from, of `held` tokens that a source has."""
    return usable_tokens(
        held,
        # a source that tells no checkpoints has none that a hybrid model could use
        None if worker.checkpoints is None else source.checkpoints or (),
        prompt_tokens=request.prompt_tokens,
        block_tokens=worker.block_tokens,
    )


class Sources:
    """Whom workers can read this prompt's front from: pools, and peers if they can be told to."""

    def __init__(self, request: RequestView, peers: Sequence[KvSource]) -> None:
        self._request, self._peers = request, peers
        self._found: dict[tuple[int, bool, bool, bool], Found] = {}

    def each(self, workers: Sequence[WorkerView]) -> list[Found]:
        """Every worker's sources; it may be one of them itself."""
        some, known = bool(self._request.sources), self._found
        found: list[Found] = []
        for one in workers:
            reached = some and one.reads_pools
            if not reached and one.pool_tokens:
                found.append(self._own_pool(one))
                continue
            key = (one.block_tokens, one.checkpoints is None, one.fetches, reached)
            if key not in known:
                known[key] = self._of(one, reached=reached)
            found.append(known[key])
        return found

    def _of(self, worker: WorkerView, *, reached: bool) -> Found:
        peers = self._peers if worker.fetches else ()
        return self._sorted([*(self._request.sources if reached else ()), *peers], worker)

    def _own_pool(self, worker: WorkerView) -> Found:
        pool = KvSource("pool", "", "dram", worker.pool_tokens, worker.checkpoints)
        return self._sorted([pool, *(self._peers if worker.fetches else ())], worker)

    def _sorted(self, sources: Sequence[KvSource], worker: WorkerView) -> Found:
        found = [(usable_of(one, one.tokens, self._request, worker), one) for one in sources]
        return sorted((one for one in found if one[0]), key=lambda one: -one[0])
