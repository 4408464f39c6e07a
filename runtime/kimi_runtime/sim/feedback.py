"""What a policy is told of what came of its plans. Pure.

The simulator's router tells every policy the same; those that learn nothing are told for nothing.
"""

from kimi_runtime.router.cost.planner import Planner
from kimi_runtime.router.estimate.outputs import Phase
from kimi_runtime.router.plan import Plan
from kimi_runtime.router.policies import planner_of
from kimi_runtime.router.policies.base import Policy
from kimi_runtime.router.view import RequestView


class Feedback:
    """Told in the order in which it happens; times are seconds. Here nothing is learned."""

    def planned(self, name: str, plan: Plan, *, now_s: float) -> None:
        """The plan is carried out from now on."""

    def read(self, name: str, seconds: float | None, *, now_s: float) -> None:
        """What the plan wanted read for the prompt is there after so long; None: it never came."""

    def handed_over(self, name: str, seconds: float | None, *, now_s: float) -> None:
        """The hand-off has ended, as for `read`."""

    def prefilled(
        self, worker: str, new_tokens: int, cached_tokens: int, seconds: float, *, now_s: float
    ) -> None:
        """A prompt was computed, queueing and reading left out."""

    def found(self, worker: str, *, predicted: int, found: int) -> None:
        """Of the tokens thought to be in a worker's memory, how many were."""

    def stepped(
        self, worker: str, rows: int, kv_tokens: int, seconds: float, *, now_s: float
    ) -> None:
        """A decode step."""

    def answered(self, request: RequestView, tokens: int, *, cut: bool) -> None:
        """An answer's length."""

    def first_token(self, plan: Plan, seconds: float) -> float | None:
        """The first token came after so long; what was expected, None if nothing was."""
        del plan, seconds
        return None

    def gone(self, worker: str) -> None:
        """A worker restarted or is gone."""


FIRST_TOKEN_TERMS = ("queue", "fetch", "prefill", "room", "hand_off", "first_step")


class PlannerFeedback(Feedback):
    """Teaches the planner's models, and ends its picture of transfers when they end."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def planned(self, name: str, plan: Plan, *, now_s: float) -> None:
        """See `Feedback`."""
        self._planner.commit(name, plan, now_s=now_s)

    def read(self, name: str, seconds: float | None, *, now_s: float) -> None:
        """See `Feedback`."""
        self._ended(f"{name}.fetch", seconds, now_s)

    def handed_over(self, name: str, seconds: float | None, *, now_s: float) -> None:
        """See `Feedback`."""
        self._ended(f"{name}.hand_off", seconds, now_s)

    def prefilled(
        self, worker: str, new_tokens: int, cached_tokens: int, seconds: float, *, now_s: float
    ) -> None:
        """See `Feedback`."""
        speeds = self._planner.models.speeds("")
        speeds.prefilled(worker, new_tokens, cached_tokens, seconds, now_s=now_s)

    def found(self, worker: str, *, predicted: int, found: int) -> None:
        """See `Feedback`."""
        self._planner.models.hits.observe(worker, "hbm", predicted=predicted, found=found)

    def stepped(
        self, worker: str, rows: int, kv_tokens: int, seconds: float, *, now_s: float
    ) -> None:
        """See `Feedback`."""
        self._planner.models.speeds("").stepped(worker, rows, kv_tokens, seconds, now_s=now_s)

    def answered(self, request: RequestView, tokens: int, *, cut: bool) -> None:
        """See `Feedback`."""
        phase: Phase = request.phase
        self._planner.models.outputs.observe(request.session, phase, tokens, cut=cut)

    def first_token(self, plan: Plan, seconds: float) -> float | None:
        """See `Feedback`."""
        expected_s = sum(plan.terms.get(term, 0.0) for term in FIRST_TOKEN_TERMS)
        risk_s = max(plan.terms.get("risk", 0.0), 0.1 * expected_s, 1e-3)
        self._planner.models.came_true(
            plan.mode, expected_s=expected_s, sd_s=risk_s, actual_s=seconds
        )
        return expected_s

    def gone(self, worker: str) -> None:
        """See `Feedback`."""
        self._planner.models.forget(worker)

    def _ended(self, name: str, seconds: float | None, now_s: float) -> None:
        flow = self._planner.flows.end(name, now_s=now_s)
        if flow is not None and flow.links and seconds:
            sharing = self._planner.flows.sharing(flow, now_s=now_s)
            size = int(flow.size_bytes)
            self._planner.models.links.observe(
                flow.links[-1], size, seconds, sharing=sharing, now_s=now_s
            )


def feedback_of(policy: Policy) -> Feedback:
    """Who learns for this policy."""
    planner = planner_of(policy)
    return Feedback() if planner is None else PlannerFeedback(planner)
