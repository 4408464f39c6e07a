"""How the engine's parts fit together, whatever they compute on and move bytes with."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kimi_runtime.engine.adapters.reference import Model, ReferenceAdapter
from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.checkpoint_policy import CheckpointPolicy
from kimi_runtime.engine.counters import EngineCounters
from kimi_runtime.engine.fetch import Fetcher, Pool
from kimi_runtime.engine.follow import SILENCE_S, HttpProgress, ProgressSource
from kimi_runtime.engine.freed import Freed
from kimi_runtime.engine.geometry import KvGeometry
from kimi_runtime.engine.handoff import HandOffs, TicketUrls
from kimi_runtime.engine.landing import Landing
from kimi_runtime.engine.loop import Parts
from kimi_runtime.engine.plan import Runner
from kimi_runtime.engine.pull import BlockReader
from kimi_runtime.engine.releases import Releaser
from kimi_runtime.engine.scheduler import Scheduler, SchedulerLimits
from kimi_runtime.engine.states import StateMemory
from kimi_runtime.engine.store import PoolWriter
from kimi_runtime.engine.take import HandOffReader
from kimi_runtime.spec.worker import EngineLimits, WorkerInfo
from kimi_runtime.transfer.base import Transport
from kimi_runtime.transfer.memory import Memory
from kimi_runtime.umbp.checkpoints import Checkpoints
from kimi_runtime.umbp.feed import FeedLog


@dataclass(frozen=True, slots=True)
class Backing:
    """What an engine works with. `memory` begins with the runner's KV blocks, one after another.

    Without `transports` (best first) nothing is handed off, without `pool` nothing is kept
    elsewhere, without `call_key` the owners of hand-offs are not told and their leases end them.
    `progress` is how hand-offs are followed; None: over HTTP, if there is a call key.
    """

    runner: Runner
    memory: Memory
    transports: Sequence[Transport] = ()
    pool: Pool | None = None
    call_key: bytes | None = None
    progress: ProgressSource | None = None
    transfer_faults: Counter[str] | None = None
    """Where `transports` count the faults they inject, if they do."""
    states: StateMemory | None = None
    """Of a runner whose model has a recurrent state; `checkpoints` keeps them in `pool`."""
    checkpoints: Checkpoints | None = None


def assemble(
    info: WorkerInfo,
    model: Model,
    backing: Backing,
    limits: EngineLimits,
    *,
    lease_s: float,
    deadline_s: float,
    urls: TicketUrls,
) -> ReferenceAdapter:
    """An engine of `info.total_blocks` blocks.

    `lease_s` is how long its hand-offs stay pinned, `deadline_s` how long any one transfer may
    take, `urls` where a hand-off of its own is given back and followed.
    """
    freed, counters = Freed(), EngineCounters()
    if backing.transfer_faults is not None:
        counters.transfer_faults = backing.transfer_faults
    feed = FeedLog(info.name, epoch=info.epoch, tier="hbm", block_tokens=info.block_tokens)
    blocks = KvBlocks(info.total_blocks, feed)
    view = backing.runner.block
    geometry = KvGeometry(
        identity=f"{info.layout}/{info.model_digest}",
        block_tokens=info.block_tokens,
        layer_group_bytes=backing.runner.layer_group_bytes,
    )
    scheduler = Scheduler(
        blocks,
        SchedulerLimits(
            block_tokens=info.block_tokens,
            step_tokens=limits.step_tokens,
            max_running=limits.max_running,
            max_waiting=limits.max_waiting,
            max_context_tokens=info.max_context_tokens,
            checkpoints=None if backing.states is None else CheckpointPolicy(info.block_tokens),
        ),
    )
    reader = hand_offs = progress = releaser = writer = None
    if backing.call_key is not None:
        releaser = Releaser(backing.call_key, counters, deadline_s=deadline_s)
        progress = HttpProgress(backing.call_key, silence_s=max(SILENCE_S, deadline_s))
    if backing.transports:
        counters.hand_off_transports.update({one.name: 0 for one in backing.transports})
        pulls = BlockReader(backing.transports, backing.memory.view, view, geometry)
        reader = HandOffReader(pulls, backing.progress or progress, deadline_s=deadline_s)
        hand_offs = HandOffs(
            info.name,
            [one.register(backing.memory) for one in backing.transports],
            geometry,
            blocks,
            view,
            counters,
            lease_s=lease_s,
            urls=urls,
            freed=freed,
        )
    if backing.pool is not None:
        writer = PoolWriter(
            backing.pool,
            blocks,
            view,
            counters,
            max_pinned=max(1, info.total_blocks // 8),
            deadline_s=deadline_s,
            freed=freed,
            checkpoints=backing.checkpoints,
        )
    landing = Landing(scheduler, counters, freed, keep=None if writer is None else writer.offer)
    fetcher = Fetcher(
        blocks,
        view,
        counters,
        landing=landing,
        reader=reader,
        pool=backing.pool,
        deadline_s=deadline_s,
        states=backing.states,
        checkpoints=backing.checkpoints,
    )
    parts = Parts(
        runner=backing.runner,
        scheduler=scheduler,
        fetcher=fetcher,
        landing=landing,
        freed=freed,
        counters=counters,
        hand_offs=hand_offs,
        progress=progress,
        releaser=releaser,
        writer=writer,
        states=backing.states,
    )
    return ReferenceAdapter(info, model, feed, parts)
