"""A state on its way from one worker to another: for that time it lies in KV blocks.

So it needs no memory that others can read, no pins, tags or transfers of its own. It is handed over
at any position, not at ends of blocks alone, and takes its name from all tokens before.
"""

from collections.abc import Sequence

from kimi_connect.states import piece_keys
from kimi_runtime.engine.request import KeyChain


def blocks_of_state(state_bytes: int, block_bytes: int) -> int:
    """How many blocks a state takes."""
    return -(-state_bytes // block_bytes)


def state_bindings(chain: KeyChain, tokens: Sequence[int], count: int) -> list[bytes]:
    """What the tags of the `count` blocks with the state behind `tokens` are bound to."""
    last = (len(tokens) - 1) // chain.block_tokens
    return piece_keys(chain.binding(last, tokens), count)


def spread(state: memoryview, into: Sequence[memoryview]) -> None:
    """Copy a state into blocks; what follows it in the last one is left."""
    at = 0
    for block in into:
        part = state[at : at + block.nbytes]
        block[: part.nbytes] = part
        at += part.nbytes


def gather(blocks: Sequence[memoryview], state: memoryview) -> None:
    """Copy a state out of its blocks."""
    at = 0
    for block in blocks:
        count = min(block.nbytes, state.nbytes - at)
        state[at : at + count] = block[:count]
        at += count
