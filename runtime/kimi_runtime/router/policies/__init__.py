"""Routing policies: one file each, opened by `open_policy`."""

from typing import assert_never

from kimi_runtime.router.policies.base import Policy
from kimi_runtime.spec.router import Cost, LeastLoad, LongestPrefix, PolicySpec


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
        case _:
            assert_never(spec)
