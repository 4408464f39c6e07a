"""Before a daemon is stopped for good: what is valuable goes to peers, and readers end."""

import asyncio
import logging

from kimi_runtime import clock
from kimi_runtime.errors import RequestError
from kimi_runtime.umbp.clients import Clients
from kimi_runtime.umbp.proto import control_pb2 as wire
from kimi_runtime.umbp.remote.evacuate import EvacuationReport
from kimi_runtime.umbp.state import DaemonState, Phase

EVACUATION_SHARE = 0.8
"""Of the time that is given; the rest is for readers, whose leases end by themselves."""

LOOK_S = 0.05

log = logging.getLogger(__name__)


async def drain(state: DaemonState, asked: wire.DrainRequest) -> wire.DrainAnswer:
    """Take nothing more, move what peers lack, wait for readers; all within the time asked for.

    There is no way back but a restart. What is here is served until the daemon stops.
    """
    if not asked.within_ms:
        raise RequestError("say how long the drain may take (within_ms)")
    clients, ends_s = state.serving(), clock.now_s() + asked.within_ms / 1e3
    state.phase, clients.draining = Phase.DRAINED, True
    clients.pool.revoke()
    log.info("umbp: draining for at most %.0f s", asked.within_ms / 1e3)
    answer = await _evacuated(clients, EVACUATION_SHARE * asked.within_ms / 1e3)
    if clients.second is not None:
        left_s = max(0.0, ends_s - clock.now_s())
        try:
            async with asyncio.timeout(left_s):
                await clients.second.tier.flush()
        except TimeoutError:
            log.warning("umbp: the SSD log was not on stable storage in time")
        answer.ssd_blocks = clients.second.tier.stats().blocks
    while True:
        answer.pins_left = clients.pool.open_pins
        if not answer.pins_left or clock.now_s() >= ends_s:
            break
        await asyncio.sleep(LOOK_S)
    log.info("umbp: drained; %d readers are left", answer.pins_left)
    return answer


async def _evacuated(clients: Clients, deadline_s: float) -> wire.DrainAnswer:
    if clients.remote is None:
        return _answer(EvacuationReport(0, 0, clients.pool.live_blocks, 0, 0, 0))
    return _answer(await clients.remote.evacuate(deadline_s=deadline_s))


def _answer(report: EvacuationReport) -> wire.DrainAnswer:
    fates = {
        "moved": report.kept,
        "elsewhere": report.elsewhere,
        "refused": report.refused,
        "late": report.late,
        "worthless": report.gone,
    }
    counts = [wire.Count(name=name, value=count) for name, count in fates.items()]
    return wire.DrainAnswer(blocks=counts, moved_bytes=report.bytes)
