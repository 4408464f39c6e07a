"""What plans cost, and which of two is better. Pure.

Plans are ordered by what each of them is by itself (`Key`), so leaving one out never reorders the
others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kimi_runtime.router.cost.decode import DecodeLeg
from kimi_runtime.router.cost.order import ROUNDING, Rendezvous
from kimi_runtime.router.cost.prefill import PrefillLeg
from kimi_runtime.router.cost.prices import Context
from kimi_runtime.router.cost.terms import Candidate, Terms
from kimi_runtime.router.estimate.moments import Estimate
from kimi_runtime.router.plan import Fetch, Mode
from kimi_runtime.router.view import WorkerView

PRICED = (Mode.EXTEND, Mode.FETCH, Mode.SPLIT, Mode.PD)
MOVE_AGAIN_S = 2.0
"""What moving a session again at once costs; it falls to 0 over `move_again_s`."""


class Key(NamedTuple):
    """What plans are ordered by."""

    step: int
    """Of the cost, on the tie grid; one more for leaving the owner."""
    leaves: bool
    uncertain: bool
    load: int
    names: tuple[int, int]
    """By rendezvous: even over sessions, the same for one session."""
    resumed: int = 0
    """Between two ways on the same workers: the one that computes less. Negative tokens."""


class _HandOff(NamedTuple):
    """From one worker to another: `e_link` is what it does to other transfers, `leaves` whether
    the session leaves its owner by that.
    """

    links: tuple[str, ...]
    size: float
    took: Estimate
    e_link: float
    leaves: bool


@dataclass(slots=True)
class Joined:
    """A priced plan."""

    key: Key
    candidate: Candidate
    fetch: Fetch | None
    hand_off: Fetch | None
    work_s: float


class Joiner:
    """One decision's prices. Every plan it prices is in `priced`, the first in order is `best`."""

    def __init__(self, context: Context, *, exhaustive: bool = False) -> None:
        self.context, self._exhaustive = context, exhaustive
        self.best: Joined | None = None
        self.priced: list[Candidate] = []
        self.best_end_s = math.inf
        """No plan that costs this much or more can be better."""
        self._earlier_s = -math.inf
        """What costs less is better, even if it leaves the session's owner."""
        self._floor_s, self._floor_step = math.nan, 0
        """The last floor that was looked at, and its step."""
        self._names: dict[str, int] = {}
        self._rendezvous = Rendezvous(context.request.session)
        request, prices = context.request, context.prices
        quantile = prices.quantile(request.urgency)
        self.z = {mode: context.models.z(mode, quantile) for mode in PRICED}
        self.fewer_ways = not exhaustive and min(self.z.values()) >= 0
        """See `legs`: whether risk is never worth anything."""
        self._again_s = 0.0
        if request.moved_ago_s is not None and request.moved_ago_s < prices.move_again_s:
            self._again_s = MOVE_AGAIN_S * (1 - request.moved_ago_s / prices.move_again_s)

    def cannot_win(
        self, floor_s: float, decode: WorkerView, prefill: WorkerView | None = None
    ) -> bool:
        """Whether a plan that costs at least `floor_s` is later in the order than the best."""
        if self.best is None:
            return False
        if floor_s >= self.best_end_s:
            return True
        key = self.best.key
        if floor_s < self._earlier_s:
            return False
        if floor_s != self._floor_s:  # many workers of an idle fleet have the same one
            self._floor_s, self._floor_step = floor_s, self.context.prices.grid.step(floor_s)
        static = self._static(decode, prefill)
        step = self._floor_step + static[0]
        if step != key.step:
            return step > key.step
        if static != key[1:4]:
            return static > key[1:4]
        return self._pair_names(decode, prefill) > key.names

    def wholes(self, ways: Sequence[PrefillLeg], decode: DecodeLeg) -> int:
        """One worker does it all, in one of several ways; how many were not priced."""
        fixed_s = decode.step_s + decode.stream_s + decode.shared_s + decode.e_evict
        left_out = 0
        for leg in ways:
            risk_s = self.z[leg.mode] * math.sqrt(leg.var + decode.var)
            interrupted_s = decode.interrupted * leg.compute_s
            if self.too_dear(leg.ready_s + fixed_s + leg.others_s + interrupted_s + risk_s):
                left_out += 1
            else:
                self._whole(leg, decode, risk_s)
        return left_out

    def _whole(self, leg: PrefillLeg, decode: DecodeLeg, risk_s: float) -> None:
        leaves = self.context.leaves_owner(leg.worker.name)
        terms = Terms(
            leg.queue_s,
            leg.fetch_s,
            leg.compute_s,
            0.0,
            0.0,
            decode.step_s,
            decode.stream_s,
            leg.e_queue,
            decode.shared_s + decode.interrupted * leg.compute_s,
            decode.e_evict,
            leg.e_link,
            -leg.replicate,
            risk_s,
            self._move_s(leg.moved_s) if leaves else 0.0,
        )
        self._take(leg.mode, terms, leg, decode, None, leg.var)

    def alone_s(self, ways: Sequence[PrefillLeg]) -> float:
        """What the ways of one worker cost in a pair at least, besides its decode leg."""
        z = self.z[Mode.PD]
        return min([leg.ready_s + leg.others_s + z * math.sqrt(leg.var) for leg in ways])

    def pairs(
        self, ways: Sequence[PrefillLeg], decode: DecodeLeg, size: float, *, alone_s: float
    ) -> int:
        """One worker prefills in one of several ways and hands `size` bytes over, another decodes.

        How many of the ways were not priced, since they cannot be the best. `alone_s` is theirs.
        """
        context, prefill = self.context, ways[0].worker
        links = context.routes.between(prefill, decode.worker)
        fixed_s = decode.step_s + decode.stream_s + decode.shared_s + decode.e_evict
        if self.too_dear(alone_s + fixed_s):
            context.flows.look(links)
            return len(ways)
        took = context.flows.seconds(links, size)
        if took is None:
            return 0
        e_link = context.prices.others * context.flows.delay_s(links, size)
        leaves = context.leaves_owner(prefill.name, decode.worker.name)
        fixed_s += e_link
        hand_off = _HandOff(links, size, took, e_link, leaves)
        left_out = 0
        for leg in ways:
            begins_s, together_s = _handed_over(leg, decode, took.mean)
            var = leg.var + took.var + decode.wait_var
            risk_s = self.z[Mode.PD] * math.sqrt(var + decode.var)
            if self.too_dear(begins_s + together_s + fixed_s + leg.others_s + risk_s):
                left_out += 1
                continue
            self._pair(leg, decode, hand_off, begins_s, together_s, risk_s, var)
        return left_out

    def _pair(
        self,
        leg: PrefillLeg,
        decode: DecodeLeg,
        hand_off: "_HandOff",
        begins_s: float,
        together_s: float,
        risk_s: float,
        var: float,
    ) -> None:
        ready_s = leg.ready_s
        room_s = max(decode.wait_s - ready_s, 0.0)
        moved_s = leg.moved_s + hand_off.took.mean
        terms = Terms(
            leg.queue_s,
            leg.fetch_s,
            leg.compute_s,
            room_s,
            begins_s + together_s - ready_s - room_s,
            decode.step_s,
            decode.stream_s,
            leg.e_queue,
            decode.shared_s,
            leg.e_evict + decode.e_evict,
            leg.e_link + hand_off.e_link,
            -leg.replicate,
            risk_s,
            self._move_s(moved_s) if hand_off.leaves else 0.0,
        )
        self._take(Mode.PD, terms, leg, decode, hand_off, var)

    def too_dear(self, least_s: float) -> bool:
        """Whether what costs this at least, up to rounding, need not be priced."""
        return not self._exhaustive and least_s - ROUNDING * abs(least_s) >= self.best_end_s

    def _move_s(self, copied_s: float) -> float:
        return self.context.prices.move_share * copied_s + self._again_s

    def _take(
        self,
        mode: Mode,
        terms: Terms,
        leg: PrefillLeg,
        decode: DecodeLeg,
        hand_off: "_HandOff | None",
        var: float,
    ) -> None:
        prefill = leg.worker if mode is Mode.PD else None
        cost_s = sum(terms)
        candidate = Candidate(
            mode,
            None if prefill is None else prefill.name,
            decode.worker.name,
            leg.source,
            leg.resumed_tokens,
            cost_s,
            terms,
            var,
        )
        self.priced.append(candidate)
        if cost_s >= self.best_end_s:
            return
        static = self._static(decode.worker, prefill)
        step = self.context.prices.grid.step(cost_s) + static[0]
        if self.best is not None and (step, *static) > self.best.key[:4]:
            return  # whatever the names
        key = Key(step, *static, self._pair_names(decode.worker, prefill), -leg.resumed_tokens)
        if self.best is None or key < self.best.key:
            handed_over = None
            if hand_off is not None:
                until = self.context.request.prompt_tokens
                handed_over = Fetch(
                    *(leg.worker.name, decode.resident_tokens, until),
                    *(hand_off.links, int(hand_off.size)),
                )
            self.best = Joined(key, candidate, leg.fetch, handed_over, leg.work_s)
            grid = self.context.prices.grid
            self.best_end_s, self._earlier_s = grid.end(step), (1 - ROUNDING) * grid.end(step - 2)

    def _static(
        self, decode: WorkerView, prefill: WorkerView | None = None
    ) -> tuple[bool, bool, int]:
        """The part of a plan's key that is known before its price, up to the names."""
        owners = self.context.request.owners
        leaves = bool(owners) and decode.name not in owners
        uncertain = not decode.certain or decode.age_s > 0
        load = decode.running + decode.waiting
        if prefill is not None:
            leaves = leaves and prefill.name not in owners
            uncertain = uncertain or not prefill.certain or prefill.age_s > 0
            load += prefill.running + prefill.waiting
        return leaves, uncertain, load

    def _pair_names(self, decode: WorkerView, prefill: WorkerView | None) -> tuple[int, int]:
        return (0 if prefill is None else self.name(prefill)), self.name(decode)

    def name(self, worker: WorkerView) -> int:
        """The worker's place in the session's rendezvous order."""
        known = self._names.get(worker.name)
        if known is None:
            known = self._names[worker.name] = self._rendezvous(worker.name)
        return known


def _handed_over(leg: PrefillLeg, decode: DecodeLeg, took_s: float) -> tuple[float, float]:
    """When the hand-off begins, and how long it and what is still to be computed then take.

    It begins once prefill runs and the decode worker has space; in G layer groups it overlaps.
    """
    begins_s = max(leg.start_s, decode.wait_s)
    computing_s = max(leg.ready_s - begins_s, 0.0)
    overlapped_s = min(computing_s, took_s) / leg.worker.streams
    return begins_s, max(computing_s, took_s) + overlapped_s
