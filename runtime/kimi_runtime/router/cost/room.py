"""Does it fit, and when: KV space and sequence slots on one worker. Pure."""

import math

from kimi_runtime.router.estimate.moments import Estimate
from kimi_runtime.router.view import WorkerView

NEVER_S = 3600.0
"""What stands for a wait that nothing known will end; a request is never stuck for a figure."""


def wait_for_room(worker: WorkerView, need_blocks: int, each_s: float) -> Estimate:
    """Seconds until `need_blocks` blocks and a slot are free, after those who wait before us.

    `each_s` is how long a running sequence still goes on, on average. Where the worker tells when
    its blocks become free that is used; otherwise its running sequences end evenly over time, k of
    them after k * each_s / running, with the spread of k exponential waits.
    """
    if worker.free_blocks >= need_blocks * (worker.waiting + 1):
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


def _after_ends(worker: WorkerView, ends: int, each_s: float) -> Estimate:
    mean = min(ends * each_s / max(worker.running, 1), NEVER_S)
    return Estimate(mean, mean * mean / max(ends, 1))
