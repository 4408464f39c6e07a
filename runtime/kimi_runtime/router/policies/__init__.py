"""Routing policies: one file each, opened by `open_policy`."""

from typing import TYPE_CHECKING, assert_never

from kimi_runtime.router.policies.base import Policy
from kimi_runtime.spec.router import (
    CacheAware,
    Cost,
    DynamoCost,
    InferaCost,
    LeastLoad,
    LlmdFilter,
    LongestPrefix,
    PolicySpec,
    PowerOfTwo,
    RoundRobin,
)

if TYPE_CHECKING:
    from kimi_runtime.router.cost.planner import Planner


def planner_of(policy: Policy) -> "Planner | None":
    """The planner behind a policy that learns what came of its plans; None of the others."""
    planner: Planner | None = getattr(policy, "planner", None)
    return planner


def open_policy(spec: PolicySpec) -> Policy:
    """The policy a router's file names."""
    match spec:
        case LeastLoad():
            from kimi_runtime.router.policies.least_load import LeastLoadPolicy

            return LeastLoadPolicy()
        case LongestPrefix():
            from kimi_runtime.router.policies.longest_prefix import LongestPrefixPolicy

            return LongestPrefixPolicy(
                queued_token_weight=spec.queued_token_weight,
                running_token_weight=spec.running_token_weight,
            )
        case Cost():
            from kimi_runtime.router.policies.cost import CostPolicy

            return CostPolicy(spec)
        case RoundRobin():
            from kimi_runtime.router.policies.round_robin import RoundRobinPolicy

            return RoundRobinPolicy()
        case PowerOfTwo():
            from kimi_runtime.router.policies.power_of_two import PowerOfTwoPolicy

            return PowerOfTwoPolicy()
        case CacheAware():
            from kimi_runtime.router.policies.cache_aware import CacheAwarePolicy

            return CacheAwarePolicy(spec)
        case DynamoCost():
            from kimi_runtime.router.policies.dynamo import DynamoPolicy

            return DynamoPolicy(spec)
        case LlmdFilter():
            from kimi_runtime.router.policies.llm_d import LlmdPolicy

            return LlmdPolicy(spec)
        case InferaCost():
            from kimi_runtime.router.policies.infera import InferaPolicy

            return InferaPolicy(spec)
        case _:
            assert_never(spec)
