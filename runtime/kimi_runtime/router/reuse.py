"""How likely a pool's block is wanted soon: the router's `ReuseProbability` for `umbp.retention`.

What a hint calls a pause's expected length is its median. The rest of its distribution has the
shape that gaps have (`estimate.gaps`): most tools are back at once or not for long, so that one
which is late is likely to stay away, more than a single-humped distribution would say. Pure.
"""

from functools import lru_cache

from kimi_runtime.router.estimate.gaps import HUMAN_PRIOR, TOOL_PRIOR, Curve
from kimi_runtime.umbp.retention import HORIZON_S, ReuseView, SessionView, tool_gap_reuse

PERSON_S = 45.0
"""Pauses expected to be longer are people's: their median is 86 s, that of tools below 1 s."""
TURN_S = 600.0
"""A turn that nobody reported the end of for so long has ended."""
RETURNS = 0.95
"""One session in twenty ends without anybody saying so."""


def gap_reuse(view: ReuseView) -> float:
    """The chance that a block is wanted within `HORIZON_S`, by its use and by its sessions."""
    unwanted = 1.0 - tool_gap_reuse(view._replace(sessions=()))
    for session in view.sessions:
        unwanted *= 1.0 - _returns(session)
    return 1.0 - unwanted


def _returns(session: SessionView) -> float:
    """The chance that the session comes back within the horizon, given that it has not yet."""
    curve = _curve(None if session.expected_s is None else float(f"{session.expected_s:.1e}"))
    since_s = max(session.since_s if session.paused else session.since_s - TURN_S, 0.0)
    away = curve.survival(since_s)
    waiting = RETURNS * away
    sure = waiting / (waiting + 1.0 - RETURNS)
    return sure * curve.ends_within(HORIZON_S, since_s=since_s)


@lru_cache(maxsize=1024)
def _curve(expected_s: float | None) -> Curve:
    if expected_s is None:
        return TOOL_PRIOR
    return (HUMAN_PRIOR if expected_s >= PERSON_S else TOOL_PRIOR).around(expected_s)
