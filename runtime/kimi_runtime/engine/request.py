"""A request as the scheduler sees it: tokens known, tokens computed, and blocks in between.

There is no prefill phase and no decode phase. A prompt makes many tokens known at once, a sampled
id makes one more known, and a step computes some of what is known. Pure integers.
"""

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kimi_runtime.spec.request import KvUsage, Priority
from kimi_runtime.umbp.keys import next_key

Fetched = Literal["pool", "hand_off"]


class KeyChain:
    """The keys of the full blocks of a growing list of ids; each block is hashed once."""

    def __init__(self, pool_key: bytes, root: bytes, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.keys: list[bytes] = []
        self._pool_key, self._root, self._last = pool_key, root, root

    def extend(self, ids: Sequence[int]) -> None:
        """`ids` is the whole list as it is now; it begins with what was given before."""
        size = self.block_tokens
        for start in range(len(self.keys) * size, len(ids) - size + 1, size):
            self._last = next_key(self._pool_key, self._last, ids[start : start + size])
            self.keys.append(self._last)

    def binding(self, index: int, ids: Sequence[int]) -> bytes:
        """What names block `index` of `ids`: its key, or the like of one for a partial tail.

        `ids` is the list or a front of it, which may end inside a block that is full in the list.
        """
        if index < len(self.keys) and (index + 1) * self.block_tokens <= len(ids):
            return self.keys[index]
        parent = self.keys[index - 1] if index else self._root
        return next_key(self._pool_key, parent, ids[index * self.block_tokens :])


def rank_of(priority: Priority, arrived_s: float, *, background_delay_s: float) -> float:
    """Who goes first: the lower rank.

    A background request goes behind every interactive one that arrives within
    `background_delay_s` after it and before all later ones. Ranks are fixed and later arrivals
    have higher ones, so everybody's turn comes.
    """
    return arrived_s + (background_delay_s if priority is Priority.BACKGROUND else 0.0)


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` are known, the first `computed` of them have their KV in `blocks`.

    With `samples`, the last known token is always computed, never taken from a cache, because the
    next id comes from its logits. Block `i` of `fetched` was brought in from elsewhere.
    """

    number: int
    tokens: MutableSequence[int]
    chain: KeyChain
    rank: float
    priority: Priority = Priority.INTERACTIVE
    tenant: str = "default"
    samples: bool = True
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    fetched: dict[int, Fetched] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    """Positions up to which all blocks were there, but no state to go on with."""
    coming: int = 0
    """Tokens that it has once what is read for it, or waits for room, has arrived."""
    hand_off_bytes: int = 0
    hand_off_early_bytes: int = 0
    hand_off_failure: str | None = None
    usage: KvUsage | None = None
    """Where the prompt's KV came from; set when the request first runs."""
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Hash the prompt's full blocks."""
        self.prompt_tokens = len(self.tokens)
        self.chain.extend(self.tokens)

    @property
    def lacking(self) -> int:
        """Tokens known and not computed."""
        return len(self.tokens) - self.computed

    @property
    def generating(self) -> bool:
        """Whether all it lacks is the id that was sampled last."""
        return self.lacking == 1 and len(self.tokens) > self.prompt_tokens

    @property
    def to_compute(self) -> int:
        """Tokens of it that will have to be computed, if all comes that is to come."""
        return len(self.tokens) - max(self.computed, self.coming)

    @property
    def reusable_keys(self) -> list[bytes]:
        """Keys of the blocks that may come from a cache."""
        reusable = len(self.tokens) - 1 if self.samples else len(self.tokens)
        return self.chain.keys[: reusable // self.chain.block_tokens]

    def settle_usage(self) -> None:
        """Fix where the prompt's KV came from, by what is computed now. Later calls do nothing."""
        if self.usage is not None:
            return
        size = self.chain.block_tokens
        full, part = divmod(self.computed, size)
        brought = {"pool": 0, "hand_off": 0}
        for index, source in self.fetched.items():
            if index < full:
                brought[source] += size
            elif index == full:
                brought[source] += part
        pool, hand_off = brought["pool"], brought["hand_off"]
        self.usage = KvUsage(
            hbm_tokens=self.computed - pool - hand_off,
            pool_tokens=pool,
            hand_off_tokens=hand_off,
            computed_tokens=self.prompt_tokens - self.computed,
            hand_off_bytes=self.hand_off_bytes,
            hand_off_early_bytes=self.hand_off_early_bytes,
            hand_off_failure=self.hand_off_failure,
        )


def order_of(request: Request) -> tuple[float, int]:
    """Who goes first: total, or two equals could block each other for ever."""
    return request.rank, request.number
