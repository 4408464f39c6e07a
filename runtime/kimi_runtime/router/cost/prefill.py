"""What it takes one worker to have a prompt's KV: waiting, reading, computing. Pure.

Every worker is priced alone, for every way to get at the prompt's front: from its own memory, from
one source as far as it goes, or from a part of that, where the rest is sooner computed than read.
"""

import math
from dataclasses import dataclass

from kimi_runtime.router.cost.hits import Found, usable_of
from kimi_runtime.router.cost.seat import Seat
from kimi_runtime.router.estimate.moments import Estimate
from kimi_runtime.router.plan import Fetch, Mode
from kimi_runtime.router.view import KvSource, WorkerView
from kimi_runtime.spec.umbp import TierName

NOTHING = Estimate(0.0)
BISECTIONS = 10


@dataclass(slots=True)
class PrefillLeg:
    """One worker and one way to the prompt's front. Seconds from now."""

    worker: WorkerView
    mode: Mode
    source: str | None
    """Who is read from."""
    local_tokens: int
    """Where the read begins."""
    resumed_tokens: int
    links: tuple[str, ...]
    size_bytes: float
    queue_s: float
    fetch_s: float
    compute_s: float
    var: float
    moved_s: float
    """What the read takes by itself, overlapped or not."""
    e_queue: float
    e_evict: float
    e_link: float
    replicate: float
    work_s: float
    """See `Seat.work_s`."""

    @property
    def start_s(self) -> float:
        """When computing begins."""
        return self.queue_s + self.fetch_s

    @property
    def ready_s(self) -> float:
        """When the prompt's KV is complete."""
        return self.queue_s + self.fetch_s + self.compute_s

    @property
    def fetch(self) -> Fetch | None:
        """What is read; None: nothing."""
        if self.source is None:
            return None
        start, size = self.local_tokens, int(self.size_bytes)
        return Fetch(self.source, start, self.resumed_tokens, self.links, size)

    @property
    def others_s(self) -> float:
        """What it does to others, its own replica's worth taken off."""
        return self.e_queue + self.e_evict + self.e_link - self.replicate


def legs(seat: Seat, found: Found, *, fewer: bool) -> list[PrefillLeg]:
    """All ways of one worker to the front that are worth a look.

    `fewer`: without those that read the same from somebody else, and no sooner, than one before
    them does who disturbs nobody. They cost as much, if not more, unless risk is worth something.
    """
    made = [_leg(seat, Mode.EXTEND, seat.local, None, (), NOTHING)]
    soonest: dict[tuple[int, TierName], Estimate] = {}
    for tokens, source in _deeper(seat, found):
        made += _reads(seat, source, tokens, soonest if fewer else None)
    return made


def read_from(seat: Seat, found: Found) -> list[KvSource]:
    """Whom `legs` looks at."""
    return [source for _, source in _deeper(seat, found)]


def _deeper(seat: Seat, found: Found) -> list[tuple[int, KvSource]]:
    local, name = seat.local, seat.worker.name
    return [one for one in found if one[0] > local and one[1].name != name]


def floor(seat: Seat, found: Found, per_byte_s: float) -> tuple[float, float, float]:
    """At least what any leg has as: seconds until ready, seconds of computing, their variance.

    Reads are taken to be alone on a link of `per_byte_s`. Between reading nothing, what comes for
    nothing during the wait, and everything, the time is concave in where one stops.
    """
    local_s, local_var = seat.compute(seat.local, seat.ratio)
    wait_s = seat.wait_s
    if not found or found[0][0] <= seat.local:
        return wait_s + local_s, local_s, seat.wait_var + local_var
    tokens = found[0][0]
    all_s, all_var = seat.compute(tokens, 1.0)
    least_s, var = min(local_s, all_s), min(local_var, all_var)
    read_s = read_bytes(seat, tokens) * per_byte_s
    if read_s <= wait_s or seat.worker.streams > 1:
        return wait_s + least_s, least_s, seat.wait_var + var
    ready_s = min(wait_s + local_s, read_s + all_s)
    if wait_s > 0:
        part = seat.local + int(wait_s / read_s * (tokens - seat.local))
        ready_s = min(ready_s, wait_s + seat.compute(part, 1.0)[0])
    return ready_s, least_s, seat.wait_var + var


def _reads(
    seat: Seat,
    source: KvSource,
    tokens: int,
    soonest: dict[tuple[int, TierName], Estimate] | None,
) -> list[PrefillLeg]:
    flows = seat.context.flows
    links = seat.context.routes.to_worker(source, seat.worker)
    took = flows.seconds(links, read_bytes(seat, tokens))
    if took is None:
        return []
    made = []
    like = tokens, source.tier
    before = None if soonest is None else soonest.get(like)
    if before is None or took.mean < before.mean or took.var < before.var:
        made.append(_leg(seat, Mode.FETCH, tokens, source, links, took))
        if soonest is not None and not flows.any_busy(links):
            soonest[like] = took
    for part in _parts(seat, source, tokens, took.mean):
        some = flows.seconds(links, read_bytes(seat, part))
        if some is not None:
            made.append(_leg(seat, Mode.SPLIT, part, source, links, some))
    return made


def _parts(seat: Seat, source: KvSource, tokens: int, whole_s: float) -> list[int]:
    """Where else to stop reading: at what comes for nothing during the wait, and, where reading and
    computing overlap, where both end together.
    """
    if whole_s <= seat.wait_s:
        return []
    per_token_s = whole_s / (tokens - seat.local)
    ends = [seat.local + int(seat.wait_s / per_token_s)]
    if seat.worker.streams > 1:
        low, high = ends[0], tokens
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            reads_s = (middle - seat.local) * per_token_s - seat.wait_s
            if reads_s < seat.compute(middle, 1.0)[0]:
                low = middle
            else:
                high = middle
        ends.append(low)
    request = seat.context.request
    parts = {usable_of(source, end, request, seat.worker) for end in ends}
    return sorted(part for part in parts if seat.local < part < tokens)


def read_bytes(seat: Seat, tokens: int) -> float:
    """What the worker lacks to resume from `tokens`: KV, and the state there for hybrid models."""
    prior = seat.kind.prior
    state = prior.state_bytes if seat.worker.checkpoints is not None else 0
    return (tokens - seat.local) * prior.kv_token_bytes + state


def _leg(
    seat: Seat,
    mode: Mode,
    resumed: int,
    source: KvSource | None,
    links: tuple[str, ...],
    took: Estimate,
) -> PrefillLeg:
    context, worker = seat.context, seat.worker
    size, ratio = 0.0, seat.ratio
    if source is not None:
        ratio = context.models.hits.ratio(worker.name, source.tier)
        size = read_bytes(seat, resumed)
    compute_s, var = seat.compute(resumed, ratio)
    left_s = max(took.mean - seat.wait_s, 0.0)
    # reading and computing in G layer groups: the longer one, and one group of the other
    together_s = max(left_s, compute_s) + min(left_s, compute_s) / worker.streams
    evict_s = 0.0
    if not seat.whole:
        taken = math.ceil((context.request.prompt_tokens - seat.local) / worker.block_tokens)
        evict_s = seat.eviction_s(taken)
    others = context.prices.others
    return PrefillLeg(
        worker,
        mode,
        None if source is None else source.name,
        seat.local,
        resumed,
        links,
        size,
        seat.wait_s,
        together_s - compute_s,
        compute_s,
        seat.wait_var + var + took.var,
        took.mean,
        others * seat.delays_s(compute_s),
        others * evict_s,
        others * context.flows.delay_s(links, size) if size else 0.0,
        seat.replica_s(took.mean),
        seat.work_s,
    )
