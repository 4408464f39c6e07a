"""Who can serve a request soonest, at what cost to others: every plan in seconds. Pure.

`plan` decides, `commit` enters the decision's transfers, and `models` learns what came of it. A
plan is `(prefill, decode, fetches, mode)`. No worker is left out by a guess: pairs that are not
tried are those that provably cannot be the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from kimi_runtime.router.cost.columns import Columns
from kimi_runtime.router.cost.join import Joined, Joiner
from kimi_runtime.router.cost.prices import Context, Prices
from kimi_runtime.router.cost.search import Search
from kimi_runtime.router.cost.terms import Candidate
from kimi_runtime.router.estimate.models import Models
from kimi_runtime.router.flows import Flows
from kimi_runtime.router.plan import Mode, Plan, able, nobody, pairings
from kimi_runtime.router.routes import Routes
from kimi_runtime.router.view import KvSource, RequestView, WorkerView
from kimi_runtime.spec.worker import Role

MAX_PEERS = 3
"""Peers whose memory is read from: those that hold most. Workers themselves are never left out."""
MIN_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan was chosen: enough to replay the decision. Holds no text and no token ids."""

    request: RequestView
    now_s: float
    candidates: tuple[Candidate, ...]
    """Every plan that was priced, the chosen one included."""
    left_out: int
    """Workers and pairs that were not priced, since they could not be the best."""
    chosen: Candidate


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan and why."""

    plan: Plan
    explanation: Explanation
    work_s: float
    """The prefill that lay before it where it prefills, at the speeds known then."""


class Planner:
    """Prices by `models`, over links that `flows` share."""

    def __init__(self, prices: Prices, models: Models, flows: Flows, routes: Routes) -> None:
        self.prices, self.models = prices, models
        self.flows, self.routes = flows, routes
        self.columns = Columns(models)

    def plan(
        self,
        request: RequestView,
        workers: Sequence[WorkerView],
        *,
        now_s: float,
        exhaustive: bool = False,
    ) -> Decided:
        """The best plan; DEFER for a session start that would miss its target everywhere.

        `exhaustive` prices what cannot win too: the same plan, explained in full.
        Raises Unavailable (NobodyNow) with each worker's obstacle when nobody can.
        """
        self.flows.advance(now_s)
        context = Context(
            *(request, self.prices, self.models, self.flows, self.routes, self.columns), now_s=now_s
        )
        fit = able(request, workers)
        whole = [worker for worker in fit if worker.role is Role.BOTH]
        joiner = Joiner(context, exhaustive=exhaustive)
        search = Search(joiner, _peers(fit), exhaustive=exhaustive)
        search.whole(whole)
        if len(whole) < len(fit):
            for prefills, decodes in pairings(fit):
                search.pairs(prefills, decodes)
        if joiner.best is None:
            search.whole([worker for worker in fit if Role.BOTH in worker.roles])
        if joiner.best is None:
            raise nobody(request, workers)
        return self._decided(search, joiner.best)

    def commit(self, name: str, plan: Plan, *, now_s: float) -> None:
        """The plan is carried out: its transfers share links from now on. Before any await.

        End them by `flows.end(f"{name}.fetch")` and `f"{name}.hand_off"` when they are done.
        """
        for fetch in plan.fetches:
            self.flows.start(f"{name}.fetch", fetch.links, fetch.size_bytes, now_s=now_s)
        if plan.hand_off is not None:
            hand_off = plan.hand_off
            self.flows.start(f"{name}.hand_off", hand_off.links, hand_off.size_bytes, now_s=now_s)

    def _decided(self, search: Search, best: Joined) -> Decided:
        chosen, context = best.candidate, search.context
        explanation = Explanation(
            context.request, context.now_s, tuple(search.joiner.priced), search.left_out, chosen
        )
        plan = Plan(
            mode=chosen.mode,
            prefill=chosen.prefill,
            decode=chosen.decode,
            terms=chosen.terms._asdict(),
            considered=len(search.joiner.priced) + search.left_out,
            fetches=() if best.fetch is None else (best.fetch,),
            hand_off=best.hand_off,
            wait_s=self._wait_s(context, chosen),
        )
        if plan.wait_s > 0:
            plan = Plan(
                Mode.DEFER, None, plan.decode, plan.terms, plan.considered, wait_s=plan.wait_s
            )
        return Decided(plan, explanation, best.work_s)

    def _wait_s(self, context: Context, chosen: Candidate) -> float:
        """How long a session start has to wait before its first token would be in time."""
        target_s, request = self.prices.target_s, context.request
        if target_s is None or not request.starts_session:
            return 0.0
        late_s = chosen.terms.first_token_s + chosen.terms.risk - target_s
        # what is late however idle the workers are cannot be waited for
        waiting_s = chosen.terms.queue + chosen.terms.room
        return max(min(late_s, waiting_s), MIN_WAIT_S) if late_s > 0 and waiting_s > 0 else 0.0


def _peers(fit: Sequence[WorkerView]) -> tuple[KvSource, ...]:
    if not any(worker.fetches for worker in fit):
        return ()
    holders = [
        (-worker.cached_tokens, worker.running + worker.waiting, worker.name, number)
        for number, worker in enumerate(fit)
        if worker.cached_tokens
    ]
    most = [fit[number] for *_, number in nsmallest(MAX_PEERS, holders)]
    return tuple(
        [KvSource(one.name, one.node, "hbm", one.cached_tokens, one.checkpoints) for one in most]
    )
