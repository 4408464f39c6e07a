"""The explain log of a router; see `line_log` for what is promised of it."""

from kimi_runtime import clock
from kimi_runtime.router.course import Outcome
from kimi_runtime.router.decisions import Decision
from kimi_runtime.router.explain.record import line_of, record_of
from kimi_runtime.router.line_log import LineLog
from kimi_runtime.spec.router import ExplainSpec, PolicySpec

_Item = tuple[Decision, Outcome, float]


class ExplainLog(LineLog[_Item]):
    """Decisions and what came of them."""

    def __init__(self, spec: ExplainSpec, *, router: str, policy: PolicySpec) -> None:
        def line(item: _Item) -> bytes:
            decision, outcome, unix_s = item
            return line_of(
                record_of(decision, outcome, router=router, policy=policy, unix_s=unix_s)
            )

        super().__init__(spec.path, spec.max_bytes, line, what="explain log")

    def explain(self, decision: Decision, outcome: Outcome) -> None:
        """Write the decision soon."""
        self.put((decision, outcome, clock.unix_s()))
