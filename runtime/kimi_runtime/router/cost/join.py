"""What plans cost, and which of two is better. Pure.

Plans are ordered by what each of them is by itself (`Key`), so leaving one out never reorders the
others.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from kimi_runtime.router.cost.decode import DecodeLeg
from kimi_runtime.router.cost.order import Rendezvous
from kimi_runtime.router.cost.prefill import PrefillLeg
from kimi_runtime.router.cost.prices import Context
from kimi_runtime.router.cost.terms import Candidate, Terms
from kimi_runtime.router.plan import Fetch, Mode
from kimi_runtime.router.view import WorkerView

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

    def __init__(self, context: Context) -> None:
        self.context = context
        self.best: Joined | None = None
        self.priced: list[Candidate] = []
        self.best_end_s = math.inf
        """No plan that costs this much or more can be better."""
        self._names: dict[str, int] = {}
        self._rendezvous = Rendezvous(context.request.session)
        request, prices = context.request, context.prices
        quantile = prices.quantile(request.urgency)
        self.z = {mode: context.models.z(mode, quantile) for mode in Mode}
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
        key, step = self.best.key, self.context.prices.grid.step(floor_s)
        if step + 1 < key.step:
            return False
        static = self._static(decode, prefill)
        step += static[0]
        if step != key.step or static != key[1:4]:
            return (step, *static) > key[:4]
        return self._pair_names(decode, prefill) > key.names

    def whole(self, leg: PrefillLeg, decode: DecodeLeg) -> None:
        """One worker does it all."""
        risk = self.z[leg.mode] * math.sqrt(leg.var + decode.var)
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
            risk,
            self._move_s(leg.moved_s) if leaves else 0.0,
        )
        self._take(leg.mode, terms, leg, decode, None, leg.var)

    def pair(self, leg: PrefillLeg, decode: DecodeLeg, size: float) -> None:
        """One prefills and hands `size` bytes over, the other decodes."""
        context = self.context
        links = context.routes.between(leg.worker, decode.worker)
        took = context.flows.seconds(links, size)
        if took is None:
            return
        # the hand-off begins once prefill runs and the decode worker has space; in G layer groups
        # it then overlaps with what is still to be computed
        ready_s = leg.ready_s
        begins_s = max(leg.start_s, decode.wait_s)
        computing_s = max(ready_s - begins_s, 0.0)
        together_s = max(computing_s, took.mean) + min(computing_s, took.mean) / leg.worker.streams
        room_s = max(decode.wait_s - ready_s, 0.0)
        var = leg.var + took.var + decode.wait_var
        leaves = context.leaves_owner(leg.worker.name, decode.worker.name)
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
            leg.e_link + context.prices.others * context.flows.delay_s(links, size),
            -leg.replicate,
            self.z[Mode.PD] * math.sqrt(var + decode.var),
            self._move_s(leg.moved_s + took.mean) if leaves else 0.0,
        )
        hand_off = Fetch(
            leg.worker.name,
            decode.resident_tokens,
            context.request.prompt_tokens,
            links,
            int(size),
        )
        self._take(Mode.PD, terms, leg, decode, hand_off, var)

    def _move_s(self, copied_s: float) -> float:
        return self.context.prices.move_share * copied_s + self._again_s

    def _take(
        self,
        mode: Mode,
        terms: Terms,
        leg: PrefillLeg,
        decode: DecodeLeg,
        hand_off: Fetch | None,
        var: float,
    ) -> None:
        prefill = leg.worker if mode is Mode.PD else None
        cost_s = sum(terms)
        candidate = Candidate(
            mode,
            None if prefill is None else prefill.name,
            decode.worker.name,
            None if leg.fetch is None else leg.fetch.source,
            leg.resumed_tokens,
            cost_s,
            terms,
            var,
        )
        self.priced.append(candidate)
        static = self._static(decode.worker, prefill)
        step = self.context.prices.grid.step(cost_s) + static[0]
        if self.best is not None and (step, *static) > self.best.key[:4]:
            return  # whatever the names
        key = Key(step, *static, self._pair_names(decode.worker, prefill), -leg.resumed_tokens)
        if self.best is None or key < self.best.key:
            self.best = Joined(key, candidate, leg.fetch, hand_off, leg.work_s)
            self.best_end_s = self.context.prices.grid.end(step)

    def _static(
        self, decode: WorkerView, prefill: WorkerView | None = None
    ) -> tuple[bool, bool, int]:
        """The part of a plan's key that is known before its price, up to the names."""
        uncertain = not decode.certain or decode.age_s > 0
        load = decode.running + decode.waiting
        if prefill is None:
            return self.context.leaves_owner(decode.name), uncertain, load
        uncertain = uncertain or not prefill.certain or prefill.age_s > 0
        load += prefill.running + prefill.waiting
        return self.context.leaves_owner(decode.name, prefill.name), uncertain, load

    def _pair_names(self, decode: WorkerView, prefill: WorkerView | None) -> tuple[int, int]:
        return (0 if prefill is None else self.name(prefill)), self.name(decode)

    def name(self, worker: WorkerView) -> int:
        """The worker's place in the session's rendezvous order."""
        known = self._names.get(worker.name)
        if known is None:
            known = self._names[worker.name] = self._rendezvous(worker.name)
        return known
