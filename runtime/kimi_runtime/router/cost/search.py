"""The best plan without pricing all of them. Pure.

Workers are tried in the order of a floor under their costs, and the search ends where no later one
can be the best: what is left out provably is not chosen.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kimi_runtime.router.cost.decode import DecodeLeg, decode_leg
from kimi_runtime.router.cost.hits import Found, Sources
from kimi_runtime.router.cost.join import Joiner
from kimi_runtime.router.cost.prefill import floor, legs, read_bytes
from kimi_runtime.router.cost.seat import Seat
from kimi_runtime.router.plan import Mode
from kimi_runtime.router.view import KvSource, WorkerView

L = TypeVar("L")


@dataclass(slots=True)
class _Right:
    """A decode leg in a search; what pairs with it cost beyond their prefill leg, at least."""

    far_s: float
    """With a prefill worker on another node."""
    near_s: float
    """With one on the same node."""
    leg: DecodeLeg
    size: float

    def alike(self) -> tuple[object, ...]:
        """Equal for legs that cost the same with any prefill worker elsewhere."""
        leg = self.leg
        return (self.far_s, self.size, leg.wait_s, leg.wait_var, leg.var, leg.step_s, leg.e_evict)


class Search:
    """One decision's search. `exhaustive`: price everything, to explain or to check."""

    def __init__(
        self, joiner: Joiner, peers: Sequence[KvSource], *, exhaustive: bool = False
    ) -> None:
        self.joiner, self.context, self._exhaustive = joiner, joiner.context, exhaustive
        self.left_out = 0
        """Workers, or pairs, that were not priced."""
        self._sources = Sources(joiner.context.request, peers)
        self._least_z = min(joiner.z[mode] for mode in (Mode.EXTEND, Mode.FETCH, Mode.SPLIT))

    def whole(self, workers: Iterable[WorkerView]) -> None:
        """Plans with one worker that does it all."""
        floors = []
        for worker in workers:
            seat = Seat(self.context, worker, whole=True)
            found, decode = self._sources.of(worker), decode_leg(seat)
            floors.append((self._whole_floor_s(seat, found, decode), seat, found, decode))
        floors.sort(key=_first)
        for floor_s, seat, found, decode in floors:
            if self._hopeless(floor_s, seat.worker):
                self.left_out += 1
                continue
            for leg in legs(seat, found):
                self.joiner.whole(leg, decode)

    def pairs(self, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> None:
        """Plans with a worker for each leg."""
        right = self._rights(decodes, max(worker.streams for worker in prefills))
        near: dict[str, list[_Right]] = {}
        for one in right:
            if one.leg.worker.node:
                near.setdefault(one.leg.worker.node, []).append(one)
        left = []
        for worker in prefills:
            seat = Seat(self.context, worker, whole=False)
            found = self._sources.of(worker)
            left.append((self._prefill_floor_s(seat, found), seat, found))
        left.sort(key=_first)
        far = self._twins_left_out(
            right, lambda one: one.far_s, lambda one: (one.leg.worker, one.alike())
        )
        apart = {
            id(one)
            for one in self._twins_left_out(
                left, lambda one: one[0], lambda one: (one[1].worker, _alike(*one))
            )
        }
        for leg in left:
            floor_s, seat, found = leg
            others = far if id(leg) in apart else ()
            self._with(seat, found, floor_s, near.get(seat.worker.node, ()), others)

    def _twins_left_out(
        self,
        legs: Sequence[L],
        floor_s: Callable[[L], float],
        of: Callable[[L], tuple[WorkerView, tuple[object, ...]]],
    ) -> list[L]:
        """Of legs that cost the same with anybody elsewhere, those that win by name.

        Two of different nodes are kept, so that whoever is on the one node has the other.
        """
        equal: dict[float, list[L]] = {}
        for leg in legs:
            equal.setdefault(floor_s(leg), []).append(leg)
        if self._exhaustive or len(equal) == len(legs):
            return list(legs)
        return [leg for some in equal.values() for leg in self._firsts(some, of)]

    def _firsts(
        self, legs: Sequence[L], of: Callable[[L], tuple[WorkerView, tuple[object, ...]]]
    ) -> Iterable[L]:
        if len(legs) == 1:
            return legs
        kept: dict[tuple[object, ...], list[tuple[int, str, L]]] = {}
        for leg in legs:
            worker, alike = of(leg)
            links = (f"{worker.name}/in", f"{worker.name}/out")
            busy = any(self.context.flows.busy(link) for link in links)
            unlike = worker.name if busy or worker.name in self.context.request.owners else ""
            load = worker.running + worker.waiting
            twins = kept.setdefault((unlike, worker.certain, worker.age_s, load, *alike), [])
            twins.append((self.joiner.name(worker), worker.node, leg))
        first: list[L] = []
        for twins in kept.values():
            best = min(twins, key=_first)
            first.append(best[2])
            elsewhere = [twin for twin in twins if twin[1] != best[1]]
            first += [min(elsewhere, key=_first)[2]] if elsewhere else []
        return first

    def _rights(self, decodes: Sequence[WorkerView], streams: int) -> "list[_Right]":
        context, least_s = self.context, self.context.models.links.least_per_byte_s
        right = []
        for worker in decodes:
            seat = Seat(context, worker, whole=False)
            leg = decode_leg(seat)
            size = read_bytes(seat, context.request.prompt_tokens)
            alone_s = leg.step_s + leg.stream_s + leg.shared_s + leg.e_evict
            # of a hand-off in G layer groups no more than 1 - 1/G is hidden
            took = context.flows.seconds(context.routes.inbound(worker), size)
            far_s = alone_s + (math.inf if took is None else took.mean / streams)
            right.append(_Right(far_s, alone_s + size * least_s / streams, leg, size))
        right.sort(key=lambda one: one.far_s)
        return right

    def _with(
        self,
        seat: Seat,
        found: Found,
        floor_s: float,
        near: "Sequence[_Right]",
        far: "Sequence[_Right]",
    ) -> None:
        """All pairs of one prefill worker that can be the best, on its node and elsewhere."""
        made = None
        for others, beyond in ((near, False), (far, True)):
            for one in others:
                least_s = floor_s + (one.far_s if beyond else one.near_s)
                if beyond and least_s >= self.joiner.best_end_s and not self._exhaustive:
                    break
                if self._hopeless(least_s, one.leg.worker, seat.worker):
                    self.left_out += 1
                    continue
                made = legs(seat, found) if made is None else made
                for leg in made:
                    self.joiner.pair(leg, one.leg, one.size)

    def _hopeless(
        self, floor_s: float, decode: WorkerView, prefill: WorkerView | None = None
    ) -> bool:
        return not self._exhaustive and self.joiner.cannot_win(floor_s, decode, prefill)

    def _whole_floor_s(self, seat: Seat, found: Found, decode: DecodeLeg) -> float:
        ready_s, compute_s, var = floor(seat, found, self.context.models.links.least_per_byte_s)
        fixed_s = decode.step_s + decode.stream_s + decode.shared_s + decode.e_evict
        weight = self.context.prices.others * seat.queue_ratio + decode.interrupted
        risk_s = self._least_z * math.sqrt(var + decode.var)
        return ready_s + fixed_s + compute_s * weight + risk_s - seat.replica_s(0.0)

    def _prefill_floor_s(self, seat: Seat, found: Found) -> float:
        ready_s, compute_s, var = floor(seat, found, self.context.models.links.least_per_byte_s)
        delays_s = compute_s * self.context.prices.others * seat.queue_ratio
        return ready_s + delays_s + self.joiner.z[Mode.PD] * math.sqrt(var) - seat.replica_s(0.0)


def _alike(floor_s: float, seat: Seat, found: Found) -> tuple[object, ...]:
    """Equal for prefill workers that cost the same with any decode worker elsewhere."""
    worker = seat.worker
    where = worker.node if found else ""  # what is read comes over other links
    named = worker.name if any(source.name == worker.name for _, source in found) else ""
    fixed = (seat.wait_s, seat.wait_var, seat.bias, seat.local, seat.ratio, seat.queue_ratio)
    return (floor_s, where, named, worker.streams, worker.cached_tokens, id(found), *fixed)


def _first(one: Sequence[Any]) -> float:
    return float(one[0])
