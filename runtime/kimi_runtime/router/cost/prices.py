"""The planner's exchange rates, and what is the same for every plan of one decision. Pure."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kimi_runtime.router.cost.order import Grid
from kimi_runtime.router.estimate.models import Models
from kimi_runtime.router.flows import Flows
from kimi_runtime.router.routes import Routes
from kimi_runtime.router.view import RequestClass, RequestView
from kimi_runtime.spec.router import Cost
from kimi_runtime.spec.speed import SpeedPrior

if TYPE_CHECKING:
    from kimi_runtime.router.cost.columns import Columns

ROOM_QUANTILE = 0.8
"""Space is asked for as long an answer as four in five have."""


@dataclass(frozen=True, slots=True)
class Prices:
    """`spec.router.Cost` as plain numbers."""

    stream: float
    others: float
    interactive_q: float
    background_q: float
    move_share: float
    move_again_s: float
    horizon_s: float
    target_s: float | None
    grid: Grid

    @classmethod
    def of(cls, spec: Cost) -> "Prices":
        """The numbers of a file."""
        return cls(
            stream=spec.stream_weight,
            others=spec.others_weight,
            interactive_q=spec.interactive_quantile,
            background_q=spec.background_quantile,
            move_share=spec.move_share,
            move_again_s=spec.move_again,
            horizon_s=spec.replication_horizon,
            target_s=spec.first_token_target,
            grid=Grid(spec.tie, spec.tie_share),
        )

    def quantile(self, urgency: RequestClass) -> float:
        """The share of outcomes that a plan's cost is to cover."""
        return self.interactive_q if urgency is RequestClass.INTERACTIVE else self.background_q


class Kind(NamedTuple):
    """The speeds of one kind of worker in one decision.

    Prefill of tokens r to L takes `fixed + token (L - r) + pair (L - r)(L + r) / 2`. Variances are
    those of the residuals, relative to the mean squared: by how much two equal plans may differ.
    What nobody knows of the kind itself is the same for all its workers, and no risk of a choice.
    """

    prior: SpeedPrior
    fixed_s: float
    token_s: float
    pair_s: float
    relative_var: float
    step: tuple[float, float, float]
    step_relative_var: float


@dataclass(slots=True)
class Context:
    """One decision: the request, what is expected of it, and what is known of the world."""

    request: RequestView
    prices: Prices
    models: Models
    flows: Flows
    routes: Routes
    columns: "Columns"
    now_s: float
    usual_s: float = field(init=False)
    """Seconds of prefill that a request takes, on average."""
    output_tokens: float = field(init=False)
    room_tokens: float = field(init=False)
    _kinds: dict[str, Kind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look ahead once for all plans."""
        request = self.request
        self.usual_s = self.models.usual.mean_s
        length = self.models.outputs.expect(
            request.session, request.phase, limit=request.max_tokens
        )
        self.output_tokens = length.tokens.mean
        self.room_tokens = length.quantile(ROOM_QUANTILE)

    def kind(self, name: str) -> Kind:
        """The speeds of a kind, looked up once."""
        known = self._kinds.get(name)
        if known is None:
            curves = self.models.speeds(name).curves(now_s=self.now_s)
            fixed_s, token_s, pair_s = curves.prefill.coefficients
            step_fixed_s, rows, step_token_s = curves.step.coefficients
            known = self._kinds[name] = Kind(
                curves.prior,
                fixed_s,
                token_s,
                pair_s,
                curves.prefill.noise_var,
                (step_fixed_s, rows, step_token_s),
                curves.step.noise_var,
            )
        return known

    def cold_s(self, kind: Kind) -> float:
        """Seconds to compute the whole prompt on a usual worker of a kind."""
        length = self.request.prompt_tokens
        return kind.fixed_s + length * (kind.token_s + kind.pair_s * length / 2)

    def leaves_owner(self, *workers: str) -> bool:
        """Whether a plan with these workers moves the session away from who had it last."""
        owners = self.request.owners
        if not owners:
            return False
        return all(worker not in owners for worker in workers)
