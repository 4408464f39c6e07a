"""Decisions from the moment they are made to what came of them. Pure: time is an argument.

`decide` makes one, `course` carries it out: it enters the plan's transfers before anything is
awaited and takes all of it back when the block ends, however that is. In between a course is told
what the workers say, and teaches the policy's models.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kimi_runtime.router.course import Course, Outcome
from kimi_runtime.router.insight import Front, Insight
from kimi_runtime.router.plan import Plan
from kimi_runtime.router.policies.base import Policy
from kimi_runtime.router.view import RequestView, WorkerView

if TYPE_CHECKING:
    from kimi_runtime.router.cost.planner import Decided

FEW_WORKERS = 8
"""Up to here pricing every plan takes less than a millisecond."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision and what it was made from. `name` is unique, `request` what the client knows.

    `keys` are those of the prompt's full blocks by worker, `fronts` what others may share of it.
    """

    request: str
    attempt: int
    asked: RequestView
    workers: Mapping[str, WorkerView]
    plan: Plan
    decided: "Decided | None"
    """None for policies that do not explain themselves."""
    now_s: float
    fronts: Sequence[Front] = ()

    @property
    def new_tokens(self) -> int:
        """Of the prompt, those that whoever prefills will have to compute, as far as is known."""
        first = self.plan.prefill or self.plan.decode
        cached = self.workers[first].cached_tokens
        if self.decided is not None:
            cached = self.decided.explanation.chosen.cached_tokens
        return max(self.asked.prompt_tokens - cached, 0)

    @property
    def expected_s(self) -> float | None:
        """Until the first token, as it was predicted; None where nothing was."""
        if self.decided is None:
            return None
        return self.decided.explanation.chosen.terms.first_token_s


Tell = Callable[[Decision, Outcome], None]


@dataclass(slots=True)
class Decisions:
    """Decides by `policy`. `tell` hears of every decision that has come to its end.

    `explains`: among few workers every plan is priced, also those that cannot be the best.
    """

    policy: Policy
    insight: Insight
    tell: Tell = field(default=lambda _decision, _outcome: None)
    explains: bool = False

    def decide(
        self,
        request: str,
        asked: RequestView,
        workers: Sequence[WorkerView],
        *,
        attempt: int = 0,
        fronts: Sequence[Front] = (),
        now_s: float,
    ) -> Decision:
        """The plan of now; its mode may be DEFER. Raises what `Policy.choose` raises."""
        planner = self.insight.planner
        decided = None
        if planner is not None:
            fully = self.explains and len(workers) <= FEW_WORKERS
            decided = planner.plan(asked, workers, now_s=now_s, exhaustive=fully)
        chosen = decided and decided.plan
        plan = chosen or self.policy.choose(asked, workers, now_s=now_s)
        views = {worker.name: worker for worker in workers}
        return Decision(request, attempt, asked, views, plan, decided, now_s, fronts)

    @contextmanager
    def course(self, name: str, decision: Decision, clock: Callable[[], float]) -> Iterator[Course]:
        """The decision is carried out under `name`, which no other has, while the block runs."""
        insight, plan = self.insight, decision.plan
        started_s = clock()
        course = Course(name, decision, insight)
        if insight.planner is not None:
            insight.planner.commit(name, plan, now_s=started_s)
        length = insight.expected_length(decision.asked)
        if length is not None:
            prompt = decision.asked.prompt_tokens
            insight.answers.begin(plan.decode, name, prompt_tokens=prompt, length=length)
        self._promise(decision, started_s)
        failure: BaseException | None = None
        try:
            yield course
        except BaseException as exc:
            failure = exc
            raise
        finally:
            now_s = clock()
            insight.answers.end(plan.decode, name)
            if insight.learning is not None:
                insight.learning.given_up(name, now_s=now_s)
            outcome = course.close(failure, now_s=now_s)
            if outcome.first_token_s is None:
                self._break_promise(decision)
            self.tell(decision, outcome)

    def refused(self, decision: Decision) -> None:
        """A decision to defer that was not waited for."""
        self.tell(decision, Outcome(ended="refused", total_s=0.0))

    def _promise(self, decision: Decision, now_s: float) -> None:
        if self.insight.planner is None:
            return
        worker = decision.plan.prefill or decision.plan.decode
        work_s = decision.plan.terms.get("prefill", 0.0)
        cached = decision.workers[worker].cached_tokens
        for tokens, key in decision.fronts:
            if tokens > cached:
                self.insight.siblings.placed(key, worker, tokens=tokens, work_s=work_s, now_s=now_s)

    def _break_promise(self, decision: Decision) -> None:
        for _, key in decision.fronts:
            worker = decision.plan.prefill or decision.plan.decode
            self.insight.siblings.failed(key, worker)


def without_tenant(asked: RequestView) -> RequestView:
    """The request as it may be written down."""
    return replace(asked, tenant="")
