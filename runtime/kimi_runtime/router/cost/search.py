"""The best plan without pricing all of them. Pure.

Workers are tried in the order of a floor under their costs, and the search ends where no later one
can be the best: what is left out provably is not chosen.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from kimi_runtime.router.cost.decode import DecodeLeg, decode_leg
from kimi_runtime.router.cost.floors import decode_floors, prefill_floors, whole_floors
from kimi_runtime.router.cost.hits import Found, Sources
from kimi_runtime.router.cost.join import Joiner
from kimi_runtime.router.cost.order import ROUNDING
from kimi_runtime.router.cost.prefill import floor, legs, read_bytes
from kimi_runtime.router.cost.seat import Seat
from kimi_runtime.router.cost.twins import Alike, Twins
from kimi_runtime.router.cost.ways import Ways
from kimi_runtime.router.plan import Mode
from kimi_runtime.router.view import KvSource, WorkerView

L = TypeVar("L")

_Left = tuple[float, WorkerView, Found]
"""A prefill worker in a search: its floor, and whom it can read from."""

_first = itemgetter(0)

FEW_WORKERS = 12
"""Up to here it is sooner done to seat every worker than to begin with arrays of them."""


_Right = tuple[float, WorkerView]
"""A decode worker in a search: what pairs with it cost beyond their prefill leg, at least."""


class _Decoding(NamedTuple):
    """Its leg, and the bytes that have to be handed over to it."""

    leg: DecodeLeg
    size: float


class Search:
    """One decision's search. `exhaustive`: price everything, to explain or to check."""

    def __init__(
        self, joiner: Joiner, peers: Sequence[KvSource], *, exhaustive: bool = False
    ) -> None:
        self.joiner, self.context, self._exhaustive = joiner, joiner.context, exhaustive
        self.left_out = 0
        """Workers that were not priced, and searches for a pair that ended early."""
        self._sources = Sources(joiner.context.request, peers)
        self._wholes: dict[str, tuple[Seat, DecodeLeg]] = {}
        self._prefills: dict[str, Seat] = {}
        self._decodings: dict[str, _Decoding] = {}
        self._twins = Twins(self.context)
        self._least_z = min(joiner.z[mode] for mode in (Mode.EXTEND, Mode.FETCH, Mode.SPLIT))

    def whole(self, workers: Sequence[WorkerView]) -> None:
        """Plans with one worker that does it all."""
        listed = self._by_floor(workers, whole=True)
        for number, (floor_s, worker, found) in enumerate(listed):
            if not self._exhaustive and self._too_late(floor_s):
                self.left_out += len(listed) - number
                return
            if self._hopeless(floor_s, worker):
                self.left_out += 1
                continue
            seat, decode = self._seated(worker)
            # of few workers the floor was the seat's already
            if len(listed) > FEW_WORKERS and self._hopeless(
                self._whole_floor_s(seat, found, decode), worker
            ):
                self.left_out += 1
                continue
            ways = legs(seat, found, fewer=self.joiner.fewer_ways)
            self.left_out += self.joiner.wholes(ways, decode)

    def pairs(self, prefills: Sequence[WorkerView], decodes: Sequence[WorkerView]) -> None:
        """Plans with a worker for each leg."""
        routes = self.context.routes
        # of a hand-off that overlaps in G layer groups, 1 / G is never hidden
        streams = max(worker.streams for worker in prefills)
        nodes = {worker.node for worker in prefills} - {""}
        near: dict[str, list[_Right]] = {}
        far: list[_Right] = []
        for floor_s, size, worker in self._decodes(decodes):
            far.append((floor_s + size * routes.far_per_byte_s / streams, worker))
            if worker.node in nodes:
                one = floor_s + size * routes.near_per_byte_s / streams, worker
                near.setdefault(worker.node, []).append(one)
        for some in (far, *near.values()):
            if len(some) > 1:
                some.sort(key=_first)
        nearest_s = min([some[0][0] for some in near.values()], default=math.inf)
        least_s = min(nearest_s, far[0][0])
        apart = _Lazily(self._twins_left_out(far, _first, self._decode_twin))
        left = self._by_floor(prefills, whole=False)
        for number, group in enumerate(_equal(left, _first)):
            if number and not self._exhaustive and self._too_late(group[0][0] + least_s):
                self.left_out += 1
                return
            alone = {id(leg) for leg in self._without_twins(group, self._prefill_twin)}
            on_node = self._without_twin_nodes(group, near)
            for leg in group:
                if id(leg) in on_node:
                    self._with(leg, near.get(leg[1].node, ()), near=True)
                if id(leg) in alone:
                    self._with(leg, apart, near=False)

    def _by_floor(self, listed: Sequence[WorkerView], *, whole: bool) -> list[_Left]:
        """Workers with the floors under their costs, lowest first, and whom each can read from."""
        if not listed:
            return []
        found = self._sources.each(listed)
        deepest = [some[0][0] if some else 0 for some in found]
        if len(listed) <= FEW_WORKERS:
            least = self._whole_floor_of if whole else self._prefill_floor_s
            least_s = [least(*one) for one in zip(listed, found, strict=True)]
        elif whole:
            least_s = whole_floors(self.context, listed, deepest, z=self._least_z)
        else:
            least_s = prefill_floors(self.context, listed, deepest, z=self.joiner.z[Mode.PD])
        return sorted(zip(least_s, listed, found, strict=True), key=_first)

    def _decodes(self, workers: Sequence[WorkerView]) -> Iterable[tuple[float, float, WorkerView]]:
        """Decode workers with what `decode_floors` tells of each."""
        if len(workers) > FEW_WORKERS:
            return zip(*decode_floors(self.context, workers), workers, strict=True)
        made = []
        for worker in workers:
            one = self._decode(worker)
            floor_s = one.leg.step_s + one.leg.stream_s + one.leg.shared_s
            made.append(((1 - ROUNDING) * floor_s, (1 - ROUNDING) * one.size, worker))
        return made

    def _prefill_twin(self, leg: _Left) -> tuple[WorkerView, Alike]:
        return leg[1], self._twins.prefill(leg[1], leg[2])

    def _decode_twin(self, one: _Right) -> tuple[WorkerView, Alike]:
        return one[1], self._twins.decode(one[1])

    def _seated(self, worker: WorkerView) -> tuple[Seat, DecodeLeg]:
        """A worker that does it all, priced once."""
        known = self._wholes.get(worker.name)
        if known is None:
            seat = Seat(self.context, worker, whole=True)
            known = self._wholes[worker.name] = seat, decode_leg(seat)
        return known

    def _prefill(self, worker: WorkerView) -> Seat:
        """A worker that prefills, seated once."""
        known = self._prefills.get(worker.name)
        if known is None:
            known = self._prefills[worker.name] = Seat(self.context, worker, whole=False)
        return known

    def _decode(self, worker: WorkerView) -> _Decoding:
        """A worker that decodes, priced once."""
        known = self._decodings.get(worker.name)
        if known is None:
            seat = Seat(self.context, worker, whole=False)
            size = read_bytes(seat, self.context.request.prompt_tokens)
            known = self._decodings[worker.name] = _Decoding(decode_leg(seat), size)
        return known

    def _twins_left_out(
        self,
        legs: Sequence[L],
        floor_s: Callable[[L], float],
        of: Callable[[L], tuple[WorkerView, Alike]],
    ) -> Iterator[L]:
        """Legs in the order of their floors, see `_without_twins`."""
        for group in _equal(legs, floor_s):
            yield from self._without_twins(group, of)

    def _without_twins(
        self, legs: Sequence[L], of: Callable[[L], tuple[WorkerView, Alike]]
    ) -> Iterable[L]:
        """Of legs that cost the same with anybody elsewhere, those that win by name.

        Two of different nodes are kept, so that whoever is on the one node has the other.
        """
        if len(legs) == 1 or self._exhaustive:
            return legs
        kept: dict[Alike, list[tuple[int, str, L]]] = {}
        for leg in legs:
            worker, alike = of(leg)
            twins = kept.setdefault(alike, [])
            twins.append((self.joiner.name(worker), worker.node, leg))
        first: list[L] = []
        for twins in kept.values():
            best = min(twins, key=_first)
            first.append(best[2])
            elsewhere = [twin for twin in twins if twin[1] != best[1]]
            first += [min(elsewhere, key=_first)[2]] if elsewhere else []
        return first

    def _without_twin_nodes(
        self, legs: Sequence[_Left], near: Mapping[str, Sequence[_Right]]
    ) -> set[int]:
        """Which legs (`id`) to pair with who decodes on their node: of nodes with one pair each
        that costs the same, the one that wins by name.
        """
        if len(legs) == 1 or self._exhaustive:
            return {id(leg) for leg in legs}
        kept: dict[object, tuple[tuple[int, int], _Left]] = {}
        for leg in legs:
            _, worker, found = leg
            rights = near.get(worker.node, ())
            if len(rights) != 1:
                kept[id(leg)] = (0, 0), leg
                continue
            least_s, other = rights[0]
            twin = least_s, self._twins.near(worker, found, other)
            names = self.joiner.name(worker), self.joiner.name(other)
            known = kept.get(twin)
            if known is None or names < known[0]:
                kept[twin] = names, leg
        self.left_out += len(legs) - len(kept)
        return {id(leg) for _, leg in kept.values()}

    def _with(self, leg: _Left, decodes: Iterable[_Right], *, near: bool) -> None:
        """All pairs of one prefill worker that can be the best: on its node, or elsewhere."""
        floor_s, worker, found = leg
        ways: Ways | None = None
        for right_s, other in decodes:
            least_s = floor_s + right_s
            if not self._exhaustive and self._too_late(least_s):
                self.left_out += 1
                return
            if not near and worker.node and other.node == worker.node:
                continue
            if self._hopeless(least_s, other, worker):
                self.left_out += 1
                continue
            if ways is None:
                seat, own_s = self._prefill(worker), self._prefill_floor_s(worker, found)
                ways = Ways(self.joiner, seat, found, floor_s=own_s)
            if self._hopeless(ways.least_s + right_s, other, worker):
                self.left_out += 1
                ways.pass_by(other)
                continue
            decoding = self._decode(other)
            self.left_out += self.joiner.pairs(
                ways.priced(), decoding.leg, decoding.size, alone_s=ways.least_s
            )

    def _too_late(self, floor_s: float) -> bool:
        """Whether neither this nor what comes later in the order of floors can be the best."""
        return floor_s >= self.joiner.best_end_s

    def _hopeless(
        self, floor_s: float, decode: WorkerView, prefill: WorkerView | None = None
    ) -> bool:
        return not self._exhaustive and self.joiner.cannot_win(floor_s, decode, prefill)

    def _whole_floor_of(self, worker: WorkerView, found: Found) -> float:
        seat, decode = self._seated(worker)
        return self._whole_floor_s(seat, found, decode)

    def _prefill_floor_s(self, worker: WorkerView, found: Found) -> float:
        """What a pair costs at least besides its decode leg, by the worker's own seat."""
        seat = self._prefill(worker)
        ready_s, compute_s, var = floor(seat, found, self.context.models.links.least_per_byte_s)
        delayed_s = self.context.prices.others * seat.delays_s(compute_s)
        risk_s = self.joiner.z[Mode.PD] * math.sqrt(var)
        cost_s = ready_s + delayed_s + risk_s - seat.replica_s(0.0)
        return cost_s - ROUNDING * abs(cost_s)

    def _whole_floor_s(self, seat: Seat, found: Found, decode: DecodeLeg) -> float:
        ready_s, compute_s, var = floor(seat, found, self.context.models.links.least_per_byte_s)
        fixed_s = decode.step_s + decode.stream_s + decode.shared_s + decode.e_evict
        delayed_s = self.context.prices.others * seat.delays_s(compute_s)
        others_s = delayed_s + decode.interrupted * compute_s
        risk_s = self._least_z * math.sqrt(var + decode.var)
        return ready_s + fixed_s + others_s + risk_s - seat.replica_s(0.0)


class _Lazily(Generic[L]):
    """Items of an iterator that is read as far as somebody looks, by several one after another."""

    def __init__(self, items: Iterator[L]) -> None:
        self._items, self._known = items, list[L]()

    def __iter__(self) -> Iterator[L]:
        yield from self._known
        for item in self._items:
            self._known.append(item)
            yield item


def _equal(legs: Sequence[L], floor_s: Callable[[L], float]) -> Iterator[list[L]]:
    """Legs that are sorted by their floors, those with equal floors together."""
    return (list(group) for _, group in groupby(legs, floor_s))
