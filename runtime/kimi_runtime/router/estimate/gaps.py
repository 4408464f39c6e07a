"""How long a session is away: the hazard of its return, per tool, with gaps that have not ended.

A gap's hazard is constant within each of `EDGES_S`; its estimate is events over exposure, so that
a gap still open (censored) counts with the time it has lasted and no event. Each tool is shrunk
to its tenant's tools, those to everybody's, those to TraceLab's published shares. Pure.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")

EDGES_S = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
"""Starts of the pieces; the last one is open."""
SHRINK_EVENTS = 4.0
"""Ends of gaps in a piece that the next wider group's hazard is worth."""
MAX_TOOLS = 16_384
HALF_LIFE_GAPS = 400.0

# TraceLab: 61 % of tool gaps end within 1 s, 27 % in 1 to 10 s, 8 % in 10 to 60 s, 4 % later, taken
# uniform, log-uniform, log-uniform and log-uniform up to 420 s; people take p50 86 s and p90
# 20.6 min, taken log-normal.
_TOOL_HAZARD = (
    0.33, 0.71, 1.1, 0.2, 0.111, 0.026, 0.019, 0.0073, 0.0073, 0.005, 0.002, 0.001,
)  # fmt: skip
_HUMAN_HAZARD = (
    0.0058, 0.0134, 0.0185, 0.0193, 0.0155, 0.0101, 0.0066, 0.0044, 0.0026, 0.00125, 0.0006,
    0.00022,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """The distribution of one gap: hazards per second, one for each piece of `edges_s`."""

    hazards: tuple[float, ...]
    edges_s: tuple[float, ...] = EDGES_S

    def hazard(self, t_s: float) -> float:
        """Returns per second, once the gap has lasted `t_s`."""
        return self.hazards[self._piece(t_s)]

    def survival(self, t_s: float, *, since_s: float = 0.0) -> float:
        """The probability that a gap that has lasted `since_s` lasts beyond `t_s`."""
        return math.exp(self._cumulated(since_s) - self._cumulated(max(t_s, since_s)))

    def ends_within(self, more_s: float, *, since_s: float) -> float:
        """The probability that a gap that has lasted `since_s` ends within `more_s`."""
        return 1 - self.survival(since_s + max(more_s, 0.0), since_s=since_s)

    def quantile(self, q: float, *, since_s: float = 0.0) -> float:
        """When a share `q` of gaps that have lasted `since_s` has ended; infinite if never."""
        left = -math.log1p(-min(max(q, 0.0), 1 - 1e-12))
        piece, start_s = self._piece(since_s), since_s
        while True:
            hazard = self.hazards[piece]
            end_s = self.edges_s[piece + 1] if piece + 1 < len(self.edges_s) else math.inf
            inside = hazard * (end_s - start_s) if hazard else 0.0
            if left <= inside or end_s == math.inf:
                return start_s + left / hazard if hazard else math.inf
            left -= inside
            piece, start_s = piece + 1, end_s

    def remaining_s(self, since_s: float) -> float:
        """Seconds a gap that has lasted `since_s` still goes on, on average."""
        piece, start_s, alive, total = self._piece(since_s), since_s, 1.0, 0.0
        while True:
            hazard = max(self.hazards[piece], 1e-9)
            end_s = self.edges_s[piece + 1] if piece + 1 < len(self.edges_s) else math.inf
            through = math.exp(-hazard * (end_s - start_s))
            total += alive * (1 - through) / hazard
            if end_s == math.inf:
                return total
            alive *= through
            piece, start_s = piece + 1, end_s

    def around(self, expected_s: float) -> "Curve":
        """The same shape with its median at `expected_s`: what a hint says of this one call."""
        factor = max(expected_s, 1e-3) / max(self.quantile(0.5), 1e-3)
        return Curve(
            tuple(hazard / factor for hazard in self.hazards),
            tuple(edge * factor for edge in self.edges_s),
        )

    def _piece(self, t_s: float) -> int:
        piece = len(self.edges_s) - 1
        while piece and t_s < self.edges_s[piece]:
            piece -= 1
        return piece

    def _cumulated(self, t_s: float) -> float:
        total, last = 0.0, len(self.edges_s) - 1
        for piece, start_s in enumerate(self.edges_s):
            if t_s <= start_s:
                break
            end_s = self.edges_s[piece + 1] if piece < last else math.inf
            total += self.hazards[piece] * (min(t_s, end_s) - start_s)
        return total


TOOL_PRIOR = Curve(_TOOL_HAZARD)
HUMAN_PRIOR = Curve(_HUMAN_HAZARD)
HUMAN = "human"
"""The tool's name for the person who answers at the end of a turn."""


class _Counts:
    __slots__ = ("events", "exposure_s")

    def __init__(self) -> None:
        self.events = [0.0] * len(EDGES_S)
        self.exposure_s = [0.0] * len(EDGES_S)

    def add(self, seconds: float, *, ended: bool) -> None:
        kept = 0.5 ** (1 / HALF_LIFE_GAPS)
        self.events = [kept * value for value in self.events]
        self.exposure_s = [kept * value for value in self.exposure_s]
        last = len(EDGES_S) - 1
        for piece, start_s in enumerate(EDGES_S):
            end_s = EDGES_S[piece + 1] if piece < last else math.inf
            self.exposure_s[piece] += min(seconds, end_s) - start_s
            if seconds < end_s:
                self.events[piece] += ended
                return

    def shrunk(self, wider: Curve) -> Curve:
        return Curve(
            tuple(
                (events + SHRINK_EVENTS) / (exposure_s + SHRINK_EVENTS / hazard)
                for events, exposure_s, hazard in zip(
                    self.events, self.exposure_s, wider.hazards, strict=True
                )
            )
        )


class Gaps:
    """Learns gaps; the least used tools are forgotten beyond `max_tools`."""

    def __init__(self, *, max_tools: int = MAX_TOOLS) -> None:
        self._max_tools = max_tools
        self._everybody = {False: _Counts(), True: _Counts()}
        self._tools: OrderedDict[tuple[str, str], _Counts] = OrderedDict()
        self._tenants: OrderedDict[tuple[str, bool], _Counts] = OrderedDict()

    def curve(self, tenant: str, tool: str, *, expected_s: float | None = None) -> Curve:
        """The gap after a call of `tool` (`HUMAN`: after a turn's end); a hint scales it."""
        human = tool == HUMAN
        curve = self._everybody[human].shrunk(HUMAN_PRIOR if human else TOOL_PRIOR)
        for counts in (self._tenants.get((tenant, human)), self._tools.get((tenant, tool))):
            if counts is not None:
                curve = counts.shrunk(curve)
        return curve if expected_s is None else curve.around(expected_s)

    def observe(self, tenant: str, tool: str, seconds: float, *, ended: bool) -> None:
        """A gap lasted `seconds`; not `ended`: longer, nobody knows by how much."""
        if not (math.isfinite(seconds) and seconds >= 0):
            return
        human = tool == HUMAN
        self._everybody[human].add(seconds, ended=ended)
        _of(self._tenants, (tenant, human), self._max_tools).add(seconds, ended=ended)
        _of(self._tools, (tenant, tool), self._max_tools).add(seconds, ended=ended)


def _of(known: OrderedDict[K, _Counts], key: K, limit: int) -> _Counts:
    counts = known.get(key)
    if counts is None:
        counts = known[key] = _Counts()
        if len(known) > limit:
            known.popitem(last=False)
    known.move_to_end(key)
    return counts
