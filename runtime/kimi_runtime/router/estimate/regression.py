"""Seconds as a sum of known shapes with learned, non-negative sizes.

`y = sum_i theta_i * prior_i * x_i`: a coefficient of 1 is the prior's. Bayesian linear regression
in information form, theta ~ N(1, relative_sd^2) before any data, so that directions nobody excited
keep the prior. What was observed counts relative to its prediction (a millisecond off in ten is as
bad as a second off in ten thousand), is cut at Huber's bound, and fades: by `forgetting` with every
later observation and by `age_out_s` with time, back to the prior. A two-sided CUSUM of the
standardised residuals tells a change from noise; then the data are dropped, and the noise and the
prior's own spread widened: what changed may be further from the prior than was expected.

Sources: Huber (1964) for the bound of 1.345 sd; Page (1954) for the CUSUM. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kimi_runtime.router.estimate.moments import Estimate

HUBER_SD = 1.345
CLIP_SD = 4.0
"""No single residual moves the change detector further than this."""
CUSUM_SLACK_SD = 0.75
CUSUM_ALARM_SD = 12.0
WIDENED = 4.0
"""Times the prior's noise variance that is assumed after a change."""
MAX_SPREAD = 256.0
"""Times the prior's variance that repeated changes widen it to, at most."""
NOISE_COUNT = 10.0
"""Observations that the prior's noise is worth."""
LEAST_RATE = 0.02
FARTHEST = 16.0
"""A measurement beyond this many times the prior, either way, counts as this many."""
RESOLVE_SHARE = 0.05
"""Of `age_out_s`: how old a solution may be before what has faded since is taken into account."""


class Fit(NamedTuple):
    """One solution: coefficients in the units of x, their covariance, the relative noise."""

    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise_var: float

    def at(self, x: Sequence[float]) -> Estimate:
        """The prediction at x, with the noise of one observation."""
        mean = self.mean(x)
        return Estimate(mean, self.noise_var * mean * mean + self.model_var(x))

    def mean(self, x: Sequence[float]) -> float:
        """The prediction at x alone."""
        if len(self.coefficients) == 3:
            (a, b, c), (u, v, w) = self.coefficients, x
            return a * u + b * v + c * w
        mean = 0.0
        for coefficient, value in zip(self.coefficients, x, strict=True):
            mean += coefficient * value
        return mean

    def model_var(self, x: Sequence[float]) -> float:
        """The part of the variance that more data would remove."""
        var = 0.0
        for value, row in zip(x, self.covariance, strict=True):
            if value:
                for other, cov in zip(x, row, strict=True):
                    var += value * other * cov
        return max(var, 0.0)


@dataclass(slots=True)
class Regression:
    """`prior` are the coefficients before any data; a prior of 0 stays 0.

    `noise_sd` is the relative scatter of one observation before it is measured.
    """

    prior: tuple[float, ...]
    relative_sd: float
    noise_sd: float = 0.1
    forgetting: float = 0.995
    age_out_s: float = 600.0
    farthest: float = FARTHEST
    """What is measured is taken to be within this factor of the prior."""
    changes: int = 0
    observations: int = 0
    _information: list[list[float]] = field(init=False)
    _moment: list[float] = field(init=False)
    _noise_var: float = field(init=False)
    _noise_count: float = field(init=False)
    _spread: float = 1.0
    _up: float = 0.0
    _down: float = 0.0
    _faded_at_s: float | None = None
    _fit: Fit | None = None
    _solved_at_s: float = 0.0

    def __post_init__(self) -> None:
        """Start at the prior."""
        self._drop()
        self._noise_var, self._noise_count = self.noise_sd**2, NOISE_COUNT

    def fit(self, *, now_s: float) -> Fit:
        """The solution now, or a little ago. A clock that jumps back changes nothing."""
        fit = self._fit
        if fit is not None and (
            not self.observations or now_s - self._solved_at_s < RESOLVE_SHARE * self.age_out_s
        ):
            return fit
        self._fade(now_s)
        self._fit, self._solved_at_s = self._solve(), now_s
        return self._fit

    def observe(self, x: Sequence[float], seconds: float, *, now_s: float) -> bool:
        """Learn from one measurement; True if it made a change certain.

        What is no number, negative, or measured where nothing was predicted is passed over.
        """
        fit = self._fit
        if fit is None or now_s != self._solved_at_s:
            self._fade(now_s)
            fit = self._solve()
        expected_s, model_var = fit.mean(x), fit.model_var(x)
        usual = sum([prior * value for prior, value in zip(self.prior, x, strict=True)])
        if not (math.isfinite(seconds) and seconds >= 0 and usual > 0):
            return False
        self.observations += 1
        seconds = min(max(seconds, usual / self.farthest), usual * self.farthest)
        scale = max(expected_s, usual / self.farthest)
        residual = seconds - expected_s
        sd_s = math.sqrt(fit.noise_var * expected_s * expected_s + model_var)
        off = residual / math.hypot(sd_s, 1e-6 * scale)
        changed = self._detect(off)
        if changed:
            self.changes += 1
            self._drop()
            self._spread = min(WIDENED * self._spread, MAX_SPREAD)
            self._noise_var, self._noise_count = WIDENED * self.noise_sd**2, NOISE_COUNT
        weight = 1.0 if abs(off) <= HUBER_SD else HUBER_SD / abs(off)
        self._learn_noise(residual / scale, model_var / scale**2)
        phi = [prior * value / scale for prior, value in zip(self.prior, x, strict=True)]
        kept, moment = self.forgetting, self._moment
        for i, left in enumerate(phi):
            weighted = weight * left
            moment[i] = kept * moment[i] + weighted * seconds / scale
            row = self._information[i]
            self._information[i] = [
                kept * known + weighted * right for known, right in zip(row, phi, strict=True)
            ]
        self._fit = None
        return changed

    def _learn_noise(self, relative: float, explained_var: float) -> None:
        # what the coefficients' own uncertainty explains is no noise
        seen = min(max(relative * relative - explained_var, 0.0), CLIP_SD**2 * self._noise_var)
        self._noise_count += 1
        rate = max(1 / self._noise_count, LEAST_RATE)
        floor = (0.1 * self.noise_sd) ** 2
        self._noise_var = max(self._noise_var + rate * (seen - self._noise_var), floor)

    def _detect(self, off: float) -> bool:
        off = min(max(off, -CLIP_SD), CLIP_SD)
        self._up = max(0.0, self._up + off - CUSUM_SLACK_SD)
        self._down = max(0.0, self._down - off - CUSUM_SLACK_SD)
        if max(self._up, self._down) <= CUSUM_ALARM_SD:
            return False
        self._up = self._down = 0.0
        return True

    def _drop(self) -> None:
        size = len(self.prior)
        self._information = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._fit = None

    def _fade(self, now_s: float) -> None:
        if self._faded_at_s is not None and now_s > self._faded_at_s:
            kept = math.exp((self._faded_at_s - now_s) / self.age_out_s)
            self._spread = max(self._spread**kept, 1.0)
            self._moment = [kept * value for value in self._moment]
            self._information = [[kept * value for value in row] for row in self._information]
        self._faded_at_s = now_s

    def _solve(self) -> Fit:
        """The posterior; coefficients that came out negative are 0 and the others re-solved."""
        prior, noise_var, moment = self.prior, self._noise_var, self._moment
        size, trust = len(prior), 1 / (self._spread * self.relative_sd**2)
        if size == 3 and min(prior) > 0:  # as of speeds: a third sooner done without loops
            (a, b, c), (d, e, f), (g, h, i) = self._information
            solved, inverse = _solved_of_three(
                [
                    [a / noise_var + trust, b / noise_var, c / noise_var],
                    [d / noise_var, e / noise_var + trust, f / noise_var],
                    [g / noise_var, h / noise_var, i / noise_var + trust],
                ],
                [value / noise_var + trust for value in moment],
            )
            if min(solved) >= 0:
                return self._fitted_of_three(solved, inverse)
        active = [i for i in range(size) if prior[i] > 0]
        while active:
            known = [self._information[i] for i in active]
            matrix = [[row[j] / noise_var for j in active] for row in known]
            for a, row in enumerate(matrix):
                row[a] += trust
            solved, inverse = _solved(matrix, [moment[i] / noise_var + trust for i in active])
            lowest = min(solved)
            if lowest >= 0:
                return self._fitted(active, solved, inverse)
            del active[solved.index(lowest)]
        return self._fitted((), (), ())

    def _fitted_of_three(self, solved: Sequence[float], inverse: Sequence[Sequence[float]]) -> Fit:
        """`_fitted`, where all three are active."""
        (p, q, r), (x, y, z) = self.prior, solved
        (a, b, c), (d, e, f), (g, h, i) = inverse
        covariance = (
            (a * p * p, b * p * q, c * p * r),
            (d * q * p, e * q * q, f * q * r),
            (g * r * p, h * r * q, i * r * r),
        )
        return Fit((x * p, y * q, z * r), covariance, self._noise_var)

    def _fitted(
        self,
        active: Sequence[int],
        solved: Sequence[float],
        inverse: Sequence[Sequence[float]],
    ) -> Fit:
        """In the units of x; what is not active is 0."""
        prior, size = self.prior, len(self.prior)
        if len(active) == size:
            sizes = tuple([value * own for value, own in zip(solved, prior, strict=True)])
            rows = [
                tuple([cov * own * other for cov, other in zip(row, prior, strict=True)])
                for own, row in zip(prior, inverse, strict=True)
            ]
            return Fit(sizes, tuple(rows), self._noise_var)
        theta, covariance = [0.0] * size, [[0.0] * size for _ in range(size)]
        for i, value, row in zip(active, solved, inverse, strict=True):
            own, of = prior[i], covariance[i]
            theta[i] = value * own
            for j, cov in zip(active, row, strict=True):
                of[j] = cov * own * prior[j]
        return Fit(tuple(theta), tuple([tuple(row) for row in covariance]), self._noise_var)


def _solved(matrix: list[list[float]], right: list[float]) -> tuple[list[float], list[list[float]]]:
    """`matrix^-1 right` and `matrix^-1`, of a symmetric positive definite matrix."""
    size = len(right)
    if size == 3:
        return _solved_of_three(matrix, right)
    rows = [
        [*matrix[i], *(1.0 if i == j else 0.0 for j in range(size)), right[i]] for i in range(size)
    ]
    for i in range(size):
        pivot = rows[i][i]
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i and rows[j][i]:
                factor = rows[j][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[-1] for row in rows], [row[size:-1] for row in rows]


def _solved_of_three(
    matrix: list[list[float]], right: list[float]
) -> tuple[list[float], list[list[float]]]:
    """The same, to the last bit, without loops: load reports ask for it thousands of times a second
    of a large fleet. `i`, `j` and `k` are the columns of the inverse, `r` is the right side.
    """
    (a0, a1, a2), (b0, b1, b2), (c0, c1, c2) = matrix
    ar, br, cr = right
    a1, a2, ai, ar = a1 / a0, a2 / a0, 1.0 / a0, ar / a0
    b1, b2, bi, br = b1 - b0 * a1, b2 - b0 * a2, 0.0 - b0 * ai, br - b0 * ar
    c1, c2, ci, cr = c1 - c0 * a1, c2 - c0 * a2, 0.0 - c0 * ai, cr - c0 * ar
    b2, bi, bj, br = b2 / b1, bi / b1, 1.0 / b1, br / b1
    a2, ai, aj, ar = a2 - a1 * b2, ai - a1 * bi, 0.0 - a1 * bj, ar - a1 * br
    c2, ci, cj, cr = c2 - c1 * b2, ci - c1 * bi, 0.0 - c1 * bj, cr - c1 * br
    ci, cj, ck, cr = ci / c2, cj / c2, 1.0 / c2, cr / c2
    ai, aj, ak, ar = ai - a2 * ci, aj - a2 * cj, 0.0 - a2 * ck, ar - a2 * cr
    bi, bj, bk, br = bi - b2 * ci, bj - b2 * cj, 0.0 - b2 * ck, br - b2 * cr
    return [ar, br, cr], [[ai, aj, ak], [bi, bj, bk], [ci, cj, ck]]
