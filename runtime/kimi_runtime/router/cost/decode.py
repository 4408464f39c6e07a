"""What it takes a worker to decode an answer: room, steps, and whom it shares them with. Pure."""

import math
from dataclasses import dataclass

from kimi_runtime.router.cost.seat import FASTEST_STEP_S, Seat
from kimi_runtime.router.view import WorkerView
from kimi_runtime.spec.worker import Role

MAX_UTILISATION = 0.9


@dataclass(slots=True)
class DecodeLeg:
    """One worker that decodes. Seconds; `stream_s` and what it does to others are weighted."""

    worker: WorkerView
    resident_tokens: int
    wait_s: float
    """Until it has room, counted from now; 0 for a whole request, which waited before prefill."""
    wait_var: float
    step_s: float
    stream_s: float
    var: float
    shared_s: float
    """What running answers lose to one more row in their steps."""
    interrupted: float
    """What they lose to every second of prefill here, in seconds."""
    e_evict: float


def decode_leg(seat: Seat) -> DecodeLeg:
    """Price decoding on the seat's worker."""
    context, worker = seat.context, seat.worker
    prices, tokens, rows = context.prices, context.output_tokens, worker.running
    length = context.request.prompt_tokens
    after_s = seat.step(rows + 1, seat.held_tokens + length + tokens / 2)
    between_s = after_s
    if worker.utilisation and worker.role is Role.BOTH:  # prefills lie between its steps
        between_s /= 1 - min(worker.utilisation, MAX_UTILISATION)
    stream_s = prices.stream * tokens * between_s
    wait_s = wait_var = 0.0
    if not seat.whole:
        each_s = tokens * max(seat.step_s, FASTEST_STEP_S)
        wait_s, wait_var = seat.room(length + context.room_tokens, each_s)
    need = math.ceil((length + context.room_tokens) / worker.block_tokens)
    slowed_s = rows * tokens * max(after_s - seat.step_s, 0.0)
    weight = prices.others * prices.stream
    return DecodeLeg(
        worker,
        seat.local,
        wait_s,
        wait_var,
        after_s,
        stream_s,
        # how long the answer gets is the same for every plan: no risk that a choice can change
        var=seat.kind.step_relative_var * stream_s * stream_s,
        shared_s=weight * slowed_s,
        interrupted=weight * rows,
        e_evict=prices.others * seat.eviction_s(max(need - seat.local // worker.block_tokens, 0)),
    )
