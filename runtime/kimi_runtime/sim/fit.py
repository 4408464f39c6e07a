"""The constants of `Timing` from the published prefill/decode series of K2.5 on the MI355X. Pure.

A P/D system shows both sides apart. Its decode worker holds B = output rate x TPOT sequences, and
TPOT is linear in the launch time of an operation, the time of a row and that of a row in a crowd:
least squares of the relative errors, none negative. (All these answers have one length, so that a
KV token cannot be told from a row: it is read at the rate that kernels were published to reach.) A
saturated prefill worker tells what a prompt takes beside its computation, a single request what a
hand-off adds.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kimi_runtime.sim.published import Series, published_figures
from kimi_runtime.sim.timing import CROWD_ROWS, Constants, Timing, operations, timing_of
from kimi_runtime.spec.hardware import MI355X_NODE

GPU = "MI355X"
_NOTHING = Constants(launch_s=0.0, row_s=0.0, crowd_s=0.0, prompt_s=0.0, hand_off_s=0.0)


@lru_cache(maxsize=1)
def fitted_constants() -> Constants:
    """The fit over all series that are marked for it."""
    return fit([series for series in published_figures().series if series.fitted])


def fit(series: Sequence[Series]) -> Constants:
    """Fit to P/D series of one model and parallelism."""
    base = timing_of(series[0].model, GPU, tensor=series[0].tensor, constants=_NOTHING)
    solved = _step(series, base)
    step = Constants(*solved, prompt_s=0.0, hand_off_s=0.0)
    timing = Timing(base.model, base.node, base.tensor, step)
    prompt_s = max(_saturated_s(series) - timing.prefill_s(round(series[0].mean_input)), 0.0)
    single = min((p for p in series[0].points), key=lambda p: p.concurrency)
    tokens = round(series[0].mean_input)
    moved_s = MI355X_NODE.nic.seconds(tokens * timing.kv_token_bytes)
    known_s = timing.prefill_s(tokens) + prompt_s + moved_s + timing.step_s(1, tokens)
    return Constants(*solved, prompt_s, max(single.ttft_s - known_s, 0.0))


def _step(series: Sequence[Series], base: Timing) -> tuple[float, float, float]:
    shape, rest = [], []
    for one in series:
        length = one.mean_input + one.mean_output / 2
        for point in one.points:
            share = one.mean_output / (one.mean_input + one.mean_output)
            rows = point.total_tokens_per_s * share * point.tpot_s / one.decode
            known_s = _between(base, rows) + rows * length * base.kv_token_s
            columns = (operations(base.model), rows, max(rows - CROWD_ROWS, 0.0))
            shape.append([column / point.tpot_s for column in columns])
            rest.append((point.tpot_s - known_s) / point.tpot_s)
    return _non_negative(np.array(shape), np.array(rest))


def _between(timing: Timing, rows: float) -> float:
    """A step of a number of rows that is an average, and no whole number."""
    low = int(rows)
    share = rows - low
    below = timing.step_s(max(low, 1), 0.0)
    return (1 - share) * below + share * timing.step_s(low + 1, 0.0)


def _non_negative(shape: np.ndarray, rest: np.ndarray) -> tuple[float, float, float]:
    """Least squares; what comes out negative is 0 and the others are solved for again."""
    active = list(range(shape.shape[1]))
    solved = np.zeros(shape.shape[1])
    while active:
        part, *_ = np.linalg.lstsq(shape[:, active], rest, rcond=None)
        if part.min() >= 0:
            solved[active] = part
            break
        del active[int(part.argmin())]
    return float(solved[0]), float(solved[1]), float(solved[2])


def _saturated_s(series: Sequence[Series]) -> float:
    """What one prompt takes a prefill worker, where it has no rest."""
    rates = [
        point.total_tokens_per_s / (one.mean_input + one.mean_output) / one.prefill
        for one in series
        for point in one.points
    ]
    return 1 / max(rates)
