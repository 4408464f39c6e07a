"""Does it fit, and when: KV space and sequence slots on one worker. Pure."""

import math
from heapq import heapify, heappop, heappush

from kimi_runtime.router.estimate.moments import Estimate
from kimi_runtime.router.view import Line, WorkerView

NEVER_S = 3600.0
"""What stands for a wait that nothing known will end; a request is never stuck for a figure."""
LEAST_S = 1e-3
"""Nothing is expected to end sooner."""


def wait_for_room(worker: WorkerView, need_blocks: int, each_s: float) -> Estimate:
    """Seconds until `need_blocks` blocks and a slot are free, after those who wait before us.

    Where the worker's line is known those in it are served first, one after the other. Otherwise
    each who waits is taken to need what one that runs has, on average, and `each_s` is how long
    that goes on: running sequences end evenly over time, k of them after k * each_s / running,
    with the spread of k exponential waits, unless it is known when blocks become free.
    """
    if worker.line is not None:
        blocks = _behind(worker.line, need_blocks)
    elif worker.free_blocks >= need_blocks * (worker.waiting + 1):
        blocks = Estimate(0.0)
    else:
        blocks = _for_blocks(worker, need_blocks, each_s)
    limit = worker.max_running
    if limit is None or worker.running + worker.waiting < limit:
        return blocks
    slots = _after_ends(worker, worker.running + worker.waiting - limit + 1, each_s)
    return slots if slots.mean > blocks.mean else blocks


def _for_blocks(worker: WorkerView, need_blocks: int, each_s: float) -> Estimate:
    held = worker.total_blocks - worker.free_blocks
    average = held / worker.running if worker.running and held > 0 else float(need_blocks)
    short = need_blocks + worker.waiting * average - worker.free_blocks
    if short <= 0:
        return Estimate(0.0)
    for at_s, blocks in worker.releases:
        short -= blocks
        if short <= 0:
            return Estimate(max(at_s, 0.0), (0.5 * at_s) ** 2)
    last_s = worker.releases[-1][0] if worker.releases else 0.0
    more = _after_ends(worker, math.ceil(short / max(average, 1.0)), each_s)
    return Estimate(min(last_s + more.mean, NEVER_S), more.var + (0.5 * last_s) ** 2)


def _behind(line: Line, need_blocks: int) -> Estimate:
    """When all before us have had what they take, and so many blocks are there for us.

    Whoever takes on average m_1, m_2, ... seconds more: the next of them ends after
    1 / (1 / m_1 + 1 / m_2 + ...), which is also its standard deviation if ends have no memory. The
    one that ends is taken to be the one with least left.
    """
    free, mean, var, ends = line.blocks, 0.0, 0.0, list(line.releases)
    heapify(ends)
    rate = sum(_rate(left_s) for left_s, _ in ends)
    for blocks, seconds in (*line.waits, (round(line.share * need_blocks), 0.0)):
        while free < blocks and ends:
            mean, var = mean + 1 / rate, var + 1 / rate**2
            left_s, freed = heappop(ends)
            free += freed
            rate = max(rate - _rate(left_s), 1 / NEVER_S)
        free -= blocks
        heappush(ends, (seconds, blocks))
        rate += _rate(seconds)
    return Estimate(min(mean, NEVER_S), var)


def _rate(left_s: float) -> float:
    return 1 / min(max(left_s, LEAST_S), NEVER_S)


def _after_ends(worker: WorkerView, ends: int, each_s: float) -> Estimate:
    mean = min(ends * each_s / max(worker.running, 1), NEVER_S)
    return Estimate(mean, mean * mean / max(ends, 1))
