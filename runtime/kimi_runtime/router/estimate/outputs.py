"""How many tokens an answer will have, by the phase of its session. Pure.

Lengths are log-normal: by phase, and by session within it as far as the session has shown itself.
Before any data: median 220 and p90 1,000 tokens for agents (TraceLab: median 184 to 252).
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

from kimi_runtime.router.estimate.moments import Estimate

MAX_SESSIONS = 100_000
SESSION_COUNT = 4.0
"""Answers that "this session is like its phase" is worth."""
PHASE_RATE = 0.005
SESSION_RATE = 0.1
PRIOR_COUNT = 20.0
_NORMAL = NormalDist()


class Phase(StrEnum):
    """What the model is about to say."""

    TOOL = "tool"
    """Amid a task: usually a tool call."""
    FINAL = "final"
    """After the last tool: usually prose."""


PRIORS = {Phase.TOOL: (math.log(220), 1.1), Phase.FINAL: (math.log(400), 1.1)}
"""Mean and sd of the logarithm of tokens."""


@dataclass(frozen=True, slots=True)
class Length:
    """A log-normal number of tokens, cut at `limit`."""

    log_mean: float
    log_sd: float
    limit: float

    @property
    def tokens(self) -> Estimate:
        """Mean and variance of the cut length."""
        sd, mu = self.log_sd, self.log_mean
        cut = (math.log(self.limit) - mu) / sd
        first = math.exp(mu + sd * sd / 2) * _cdf(cut - sd)
        second = math.exp(2 * mu + 2 * sd * sd) * _cdf(cut - 2 * sd)
        beyond = 1 - _cdf(cut)
        mean = first + self.limit * beyond
        return Estimate(mean, max(second + self.limit**2 * beyond - mean * mean, 0.0))

    def quantile(self, q: float) -> float:
        """Tokens that a share `q` of answers do not pass; 0 < q < 1."""
        return min(math.exp(self.log_mean + self.log_sd * _NORMAL.inv_cdf(q)), self.limit)

    def remaining(self, made: int) -> float:
        """Tokens still to come, on average, once `made` are there: longer ones are left over."""
        if made >= self.limit:
            return 0.0
        if made < 1:
            return self.tokens.mean
        sd, mu = self.log_sd, self.log_mean
        low, high = (math.log(made) - mu) / sd, (math.log(self.limit) - mu) / sd
        alive = 1 - _cdf(low)
        if alive < 1e-9:  # it outlived all that were known
            return min(float(made), self.limit - made)
        first = math.exp(mu + sd * sd / 2) * (_cdf(high - sd) - _cdf(low - sd))
        return max((first + self.limit * (1 - _cdf(high))) / alive - made, 0.0)


@dataclass(slots=True)
class _Known:
    log_mean: float
    log_var: float
    count: float


class Outputs:
    """Learns lengths; the coldest sessions are forgotten beyond `max_sessions`."""

    def __init__(self, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._phases = {
            phase: _Known(mean, sd * sd, PRIOR_COUNT) for phase, (mean, sd) in PRIORS.items()
        }
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[tuple[bytes, Phase], _Known] = OrderedDict()

    @property
    def usual(self) -> float:
        """Tokens of an answer in the middle of a task, on average."""
        common = self._phases[Phase.TOOL]
        return math.exp(common.log_mean + common.log_var / 2)

    def expect(self, session: bytes, phase: Phase, *, limit: int) -> Length:
        """The length of the session's next answer, at most `limit` tokens."""
        common, own = self._phases[phase], self._sessions.get((session, phase))
        mean, var = common.log_mean, common.log_var
        if own is not None:
            weight = own.count / (own.count + SESSION_COUNT)
            mean += weight * (own.log_mean - mean)
            # a session explains a part of its phase's spread, never all of it
            var += weight * (max(own.log_var, 0.25 * var) - var)
        return Length(mean, math.sqrt(var), float(max(limit, 1)))

    def observe(self, session: bytes, phase: Phase, tokens: int, *, cut: bool = False) -> None:
        """An answer had `tokens`; `cut`: it would have gone on, as far as such answers do."""
        if tokens < 1:
            return
        if cut:
            tokens += round(self.expect(session, phase, limit=64 * tokens).remaining(tokens))
        value = math.log(tokens)
        _learn(self._phases[phase], value, PHASE_RATE)
        own = self._sessions.get((session, phase))
        if own is None:
            own = _Known(value, self._phases[phase].log_var, 0.0)
            self._sessions[session, phase] = own
        _learn(own, value, SESSION_RATE)
        self._sessions.move_to_end((session, phase))
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def forget(self, session: bytes) -> None:
        """The session ended."""
        for phase in Phase:
            self._sessions.pop((session, phase), None)


def _learn(known: _Known, value: float, least_rate: float) -> None:
    known.count += 1
    rate = max(1 / known.count, least_rate)
    off = value - known.log_mean
    known.log_mean += rate * off
    known.log_var = max(known.log_var + rate * (off * off - known.log_var), 0.01)


def _cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
