"""Where a simulated worker reads KV from besides its own pool: other pools, peers' memory. Pure."""

from collections.abc import Sequence

from kimi_runtime.sim.cluster import Cluster
from kimi_runtime.sim.work import Read
from kimi_runtime.sim.worker import SimWorker

EVERYTHING = 1 << 30


def read_from(
    cluster: Cluster, source: str, worker: SimWorker, *, until: int = EVERYTHING
) -> Read | None:
    """A read by `worker` up to block `until` of a prompt; None if the source is gone."""
    pool = cluster.pools.get(source)
    if pool is not None:
        pins: list[int] = []

        def pin(keys: Sequence[bytes]) -> int:
            number, held = pool.pin(keys, now_s=cluster.timeline.now_s)
            pins.append(number)
            return held

        def unpin() -> None:
            while pins:
                pool.unpin(pins.pop())

        return Read("pool", cluster.route(source, worker), pin, unpin, until)
    peer = cluster.workers.get(source)
    if peer is None or peer.failed or peer.scheduler.limits.checkpoints is not None:
        return None  # what a worker of a model with states has, it has without them
    lent: list[int] = []

    def lend(keys: Sequence[bytes]) -> int:
        lent.extend(peer.lend(keys))
        return len(lent)

    def give_back() -> None:
        blocks, lent[:] = lent[:], []
        peer.give_back(blocks)

    return Read("hand_off", cluster.route(source, worker), lend, give_back, until)
