"""Seeded streams of chance: the one module of the simulator that knows `random`.

Every stream has its own name, so that drawing more of one changes nothing in another: what is
compared with the same seed then differs in nothing but what is compared.
"""

import random
from typing import TypeAlias

Chance: TypeAlias = random.Random


def stream(seed: int, *names: object) -> Chance:
    """The stream of that name. The same names and seed give the same draws anywhere."""
    return random.Random("/".join(map(str, (seed, *names))))


def log_normal(chance: Chance, median: float, sigma: float) -> float:
    """A draw by median and standard deviation of the logarithm."""
    return median * float(2.718281828459045 ** (sigma * chance.gauss(0.0, 1.0)))


def log_uniform(chance: Chance, low: float, high: float) -> float:
    """A draw whose logarithm is uniform."""
    return low * float((high / low) ** chance.random())
