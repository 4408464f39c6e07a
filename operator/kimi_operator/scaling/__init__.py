"""How many instances each role should have, from the spec, `/scale` or the routers' signals.

The counts always respect the bounds of each role, the ratio and the GPU budget, and never leave
one role at zero while the other runs. Which instances go is the rollout planner's choice.
"""

from kimi_operator.scaling.bounds import Bounds, RoleBounds, bounds_of
from kimi_operator.scaling.history import History
from kimi_operator.scaling.targets import Targets, seed, targets

__all__ = ["Bounds", "History", "RoleBounds", "Targets", "bounds_of", "seed", "targets"]
