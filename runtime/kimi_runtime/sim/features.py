"""What a router does besides choosing: every part can be left out, to see what it brings. Pure."""

from typing import Annotated

from annotated_types import Ge, Gt
from pydantic import Field

from kimi_runtime.spec.base import SpecModel


class Features(SpecModel):
    """Parts of the stack around the policy.

    What is done in tool gaps needs a planner's figures, and is not done for policies without one.
    """

    siblings: bool = Field(
        True, description="Subagents see the prefix that the first of their burst will bring."
    )
    replication: bool = Field(
        True, description="Further copies of a shared prefix are worth something."
    )
    admission: bool = Field(
        False, description="Sessions are let in as a whole, as far as there is KV memory."
    )
    oversubscribe: Annotated[float, Gt(0)] = Field(
        1.0, description="Tokens of sessions let in, over tokens that workers have memory for."
    )
    hold_s: Annotated[float, Ge(0)] = Field(
        30.0, description="While its tool runs a session's memory is kept for it so long at most."
    )
    hints: bool = Field(False, description="Pools are told where sessions stand.")
    expected_pauses: bool = Field(
        False, description="Clients tell how long their tools will take, within a third or so."
    )
    demote: bool = Field(
        False,
        description="In a tool gap, what is not worth its space in GPU memory is given up there.",
    )
    prefetch: bool = Field(
        False, description="KV that went to the pool is read back before its session is expected."
    )
    moves: bool = Field(
        False, description="Sessions move to a less loaded worker while their tool runs."
    )
    moves_keep_context: bool = Field(
        True, description="False: a move changes who serves the session, and its KV is lost."
    )
