"""Route to who can serve it fastest: plans priced in seconds of this request and of others."""

from collections.abc import Sequence

from kimi_runtime.router.cost.planner import Planner
from kimi_runtime.router.cost.prices import Prices
from kimi_runtime.router.estimate.models import Models
from kimi_runtime.router.flows import Flows
from kimi_runtime.router.plan import Mode, Plan, refusal
from kimi_runtime.router.routes import Routes
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.hardware import NODES
from kimi_runtime.spec.router import Cost
from kimi_runtime.spec.speed import known_prior


class CostPolicy:
    """A planner behind the policies' contract. What is learned goes into `planner.models`."""

    def __init__(self, spec: Cost) -> None:
        models = Models(known_prior(spec.model, spec.gpu, tensor=spec.tensor))
        routes = Routes(models.links, NODES[spec.gpu], ranks=spec.tensor)
        self.planner = Planner(Prices.of(spec), models, Flows(models.links), routes)

    def choose(self, request: RequestView, workers: Sequence[WorkerView], *, now_s: float) -> Plan:
        """See `Policy.choose`. Terms are seconds."""
        plan = self.planner.plan(request, workers, now_s=now_s).plan
        if plan.mode is Mode.DEFER:
            raise refusal(plan)
        return plan
