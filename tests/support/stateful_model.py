"""A model that can't go on without its state: KV, state and every id are hashes of all before.

`serve` is the part of an engine that meets checkpoints: it restores what the pool has, computes the
rest in chunks, and keeps blocks and states where the policy wants them.
"""

import hashlib
from dataclasses import dataclass, field

from kimi_connect.wire import Outcome
from kimi_runtime.engine.checkpoint_policy import CheckpointPolicy
from kimi_runtime.engine.request import KeyChain
from kimi_runtime.umbp.checkpoints import Checkpoints
from kimi_runtime.umbp.client import PoolClient

BLOCK_TOKENS = 4
BLOCK_BYTES = 512
STATE_BYTES = 10_000
PIECE_BYTES = 4096
"""Two whole pieces and one that is short."""
POLICY = CheckpointPolicy(BLOCK_TOKENS, every_tokens=16)


def expanded(digest: bytes, size: int) -> bytes:
    """`size` bytes that depend on every bit of `digest`."""
    return hashlib.shake_128(digest).digest(size)


def step(state: bytes, token: int) -> bytes:
    """The state after one more token."""
    return expanded(hashlib.blake2b(state + token.to_bytes(4, "little")).digest(), STATE_BYTES)


def block_of(states: list[bytes]) -> bytes:
    """The KV of a block, given the states after each of its tokens."""
    return expanded(hashlib.blake2b(b"".join(states)).digest(), BLOCK_BYTES)


@dataclass
class Answer:
    """The next id, and how many tokens of the prompt were computed for it."""

    id: bytes
    computed: int
    outcome: Outcome = Outcome.HIT


@dataclass
class StatefulEngine:
    """Serves prompts with a pool. `refused` are positions whose state was missed."""

    pool: PoolClient
    deadline_s: float = 5.0
    tenant: str = "default"
    refused: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.pool, STATE_BYTES, piece_bytes=PIECE_BYTES)

    async def serve(self, tokens: list[int]) -> Answer:
        """The id that follows `tokens`; the last of them is always computed."""
        chain = KeyChain(b"p" * 32, b"r" * 16, BLOCK_TOKENS)
        chain.extend(tokens)
        keys = chain.keys[: (len(tokens) - 1) // BLOCK_TOKENS]
        targets = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
        kept = memoryview(bytearray(b"\xee" * STATE_BYTES))
        got = await self.checkpoints.restore(
            keys, targets, kept, deadline_s=self.deadline_s, tenant=self.tenant
        )
        if got.refused > got.blocks:
            self.refused.add(got.refused * BLOCK_TOKENS)
        start = got.blocks * BLOCK_TOKENS
        blocks = [bytes(block) for block in targets[: got.blocks]]
        state = bytes(kept) if got.blocks else bytes(STATE_BYTES)
        at, states = start, []
        known = len(tokens)
        while at < known:
            end = POLICY.stop(at, known, self.refused)
            for token in tokens[at:end]:
                state = step(state, token)
                states.append(state)
                if len(states) == BLOCK_TOKENS:
                    blocks.append(block_of(states))
                    states = []
            at = end
            if POLICY.wanted(at, known, self.refused):
                await self._keep(chain.keys[: at // BLOCK_TOKENS], blocks, state)
        return Answer(
            hashlib.blake2b(state + b"".join(blocks)).digest(), len(tokens) - start, got.outcome
        )

    async def _keep(self, keys: list[bytes], blocks: list[bytes], state: bytes) -> None:
        views = [memoryview(block) for block in blocks]
        await self.pool.store(keys, views, deadline_s=5.0, tenant=self.tenant)
        await self.checkpoints.keep(keys, memoryview(state), deadline_s=5.0, tenant=self.tenant)


def from_nothing(tokens: list[int]) -> bytes:
    """The id that follows `tokens`, without any pool."""
    state, states, blocks = bytes(STATE_BYTES), [], []
    for token in tokens:
        state = step(state, token)
        states.append(state)
        if len(states) == BLOCK_TOKENS:
            blocks.append(block_of(states))
            states = []
    return hashlib.blake2b(state + b"".join(blocks)).digest()
