"""The next step from the pods of one revision to those of another, derived from what is there.

Nothing is remembered between two passes: `next_step` sees the instances of each revision and says
which should exist and which of them drain, so a restarted operator goes on where it was.
`all_steps` rolls the same function forward on paper.
"""

from kimi_operator.rollout.forecast import Stage, all_steps
from kimi_operator.rollout.planner import next_step
from kimi_operator.rollout.victims import choose_victims
from kimi_operator.rollout.view import Revisions, RolloutView, Step, view_of

__all__ = [
    "Revisions",
    "RolloutView",
    "Stage",
    "Step",
    "all_steps",
    "choose_victims",
    "next_step",
    "view_of",
]
