"""What the planner prices with: everything that is learned, in bounded memory. Pure."""

from collections.abc import Mapping

from kimi_runtime.router.estimate.calibration import Calibration
from kimi_runtime.router.estimate.changes import Changes
from kimi_runtime.router.estimate.gaps import Gaps
from kimi_runtime.router.estimate.outputs import Outputs
from kimi_runtime.router.estimate.rates import LinkRates
from kimi_runtime.router.estimate.ratios import HitRatios, QueueRatios
from kimi_runtime.router.estimate.speeds import Speeds
from kimi_runtime.router.estimate.usual import UsualWork
from kimi_runtime.spec.speed import SpeedPrior

MAX_KINDS = 32
USUAL_TOKENS, USUAL_CONTEXT = 4_000, 30_000
"""Of an agent's request, before any was seen: a dozen turns compute their session's first prompt
and a thousand tokens or so each."""


class Models:
    """`kinds` are the priors by kind of worker; other kinds learn apart, from the `default` on.

    Beyond `MAX_KINDS` a kind is taken for the default's.
    """

    def __init__(self, default: SpeedPrior, kinds: Mapping[str, SpeedPrior] | None = None) -> None:
        self.changes = Changes()
        """Of `speeds`, `hits` and `queues`, by worker."""
        self._prior, self._default = default, self._speeds(default)
        self._kinds = {kind: self._speeds(prior) for kind, prior in (kinds or {}).items()}
        self.outputs, self.gaps = Outputs(), Gaps()
        self.links = LinkRates()
        self.hits = HitRatios(changes=self.changes)
        self.queues = QueueRatios(changes=self.changes)
        curves = self._default.curves(now_s=0.0)
        self.usual = UsualWork(curves.prefill_s(USUAL_TOKENS, USUAL_CONTEXT).mean)
        self.calibration: dict[str, Calibration] = {}
        """Of the time to the first token, by mode."""

    def speeds(self, kind: str) -> Speeds:
        """How fast workers of a kind are."""
        known = self._kinds.get(kind)
        if known is None:
            if not kind or len(self._kinds) >= MAX_KINDS:
                return self._default
            known = self._kinds[kind] = self._speeds(self._prior)
        return known

    def _speeds(self, prior: SpeedPrior) -> Speeds:
        return Speeds(prior, changes=self.changes)

    def z(self, mode: str, q: float) -> float:
        """See `Calibration.z`."""
        known = self.calibration.get(mode)
        return (known or _NOTHING).z(q)

    def came_true(self, mode: str, *, expected_s: float, sd_s: float, actual_s: float) -> None:
        """A plan of `mode` expected its first token after `expected_s`; it took `actual_s`."""
        known = self.calibration.setdefault(mode, Calibration())
        known.observe(expected_s=expected_s, sd_s=sd_s, actual_s=actual_s)

    def forget(self, worker: str) -> None:
        """A worker restarted or is gone: what was particular to it no longer holds."""
        for speeds in (self._default, *self._kinds.values()):
            speeds.forget(worker)
        self.hits.forget(worker)
        self.queues.forget(worker)


_NOTHING = Calibration()
