"""What a router does besides choosing: every part can be left out, to see what it brings. Pure."""

from pydantic import Field

from kimi_runtime.spec.base import SpecModel


class Features(SpecModel):
    """Parts of the stack around the policy."""

    siblings: bool = Field(
        True, description="Subagents see the prefix that the first of their burst will bring."
    )
    replication: bool = Field(
        True, description="Further copies of a shared prefix are worth something."
    )
    hints: bool = Field(False, description="Pools are told where sessions stand.")
