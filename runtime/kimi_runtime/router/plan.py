"""Who could serve a request and who does: candidates, their prices joined, ties broken.

A policy prices one worker for one leg of the work, in tokens of prefill. Legs are independent here
(the price of a pair is the sum), so the best pair of a revision is the best of each leg. Pure.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from kimi_runtime.errors import Overloaded, Unavailable
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.worker import Role

T = TypeVar("T")

TIE_BAND = 0.03
"""Prices within 3 % of the best are equal: the estimates are no better than that."""


class Mode(StrEnum):
    """How a request is served."""

    EXTEND = "extend"
    """On one worker, from what is in its memory (and in its own pool)."""
    PD = "pd"
    """One worker prefills, another decodes; `fetches` are the first one's."""
    FETCH = "fetch"
    """On one worker, once it has read the whole front that a source has."""
    SPLIT = "split"
    """On one worker, which reads a part of that front and computes the rest."""
    DEFER = "defer"
    """Not now: ask again after `wait_s`. Only for requests that start a session."""


class Leg(StrEnum):
    """A part of the work that one worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


Terms = Mapping[str, float]
"""The summands of a price, by name; in what unit, its policy says."""

Pricing = Callable[[RequestView, WorkerView, Leg], Terms]

Pick = Callable[[RequestView, Sequence[WorkerView], Leg], tuple[WorkerView, Terms]]
"""Who of several (never none) does a leg, and its price."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """The prefilling worker reads tokens `start` to `end` of the prompt's KV from `source`."""

    source: str
    start: int
    end: int
    links: tuple[str, ...] = ()
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision with the figures that made it. `prefill` is None when `decode` does it all."""

    mode: Mode
    prefill: str | None
    decode: str
    terms: Terms = field(default_factory=dict)
    considered: int = 1
    fetches: tuple[Fetch, ...] = ()
    hand_off: Fetch | None = None
    """What the decoding worker reads from the prefilling one; None: unknown, or nothing."""
    wait_s: float = 0.0

    @property
    def workers(self) -> tuple[str, ...]:
        """Everybody the plan uses, in the order they are asked."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class NobodyNow(Unavailable):
    """Nobody can serve the request as things are, but a worker that comes or goes may change it."""


@dataclass(frozen=True, slots=True)
class _Priced(Generic[T]):
    option: T
    names: tuple[str, ...]
    total: float


def obstacle(request: RequestView, worker: WorkerView) -> str | None:
    """Why this worker can't take the request now; None if it can."""
    return _absence(worker) or _misfit(request, worker)


def _absence(worker: WorkerView) -> str | None:
    if not worker.ready:
        return "is not ready"
    if worker.draining:
        return "is draining"
    return None


def _misfit(request: RequestView, worker: WorkerView) -> str | None:
    if request.prompt_tokens + 1 > worker.max_context_tokens:
        return f"has a context of {worker.max_context_tokens} tokens"
    if request.prompt_tokens + 1 > worker.total_blocks * worker.block_tokens:
        return f"has KV space for {worker.total_blocks * worker.block_tokens} tokens"
    if request.grammar and not worker.grammar:
        return "cannot constrain its output"
    if request.logprobs and not worker.logprobs:
        return "gives no logprobs"
    return None


def able(request: RequestView, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Those without an `obstacle`."""
    need, grammar, logprobs = request.prompt_tokens + 1, request.grammar, request.logprobs
    return [
        one
        for one in workers
        if one.ready
        and not one.draining
        and need <= one.max_context_tokens
        and need <= one.total_blocks * one.block_tokens
        and (one.grammar or not grammar)
        and (one.logprobs or not logprobs)
    ]


def best(request: RequestView, workers: Sequence[WorkerView], price: Pricing) -> Plan:
    """The cheapest plan.

    A prefill worker is paired only with a decode worker of its own revision and layout that has a
    transport in common with it: KV could not be handed over otherwise. When no such pair and no
    whole-request worker is left, whoever is able to do whole requests serves alone, whatever its
    role. Raises Unavailable with each worker's obstacle when nobody is left, NobodyNow if that may
    pass.
    """

    def cheapest(
        asked: RequestView, able: Sequence[WorkerView], leg: Leg
    ) -> tuple[WorkerView, Terms]:
        return _pick(asked, able, price, leg)

    return assembled(request, workers, cheapest)


def assembled(request: RequestView, workers: Sequence[WorkerView], pick: Pick) -> Plan:
    """Like `best`, with whom `pick` picks for each leg; of several plans the cheapest."""
    fit = able(request, workers)
    plans = [*_pairs(request, fit, pick), *_alone(request, fit, pick, planned=True)]
    if not plans:
        plans = list(_alone(request, fit, pick, planned=False))
    if not plans:
        raise nobody(request, workers)
    return _cheapest(request, [_Priced(p, p.workers, sum(p.terms.values())) for p in plans])


def nobody(request: RequestView, workers: Sequence[WorkerView]) -> Unavailable:
    """The error for a request that no worker can serve; NobodyNow if that may pass."""
    passing = not workers or any(_misfit(request, worker) is None for worker in workers)
    kind = NobodyNow if passing else Unavailable
    return kind(f"no worker can serve this request now: {_why(request, workers)}")


def refusal(plan: Plan) -> Overloaded:
    """What a DEFER means to a client, where nobody holds its request back."""
    return Overloaded(
        f"a new session would wait {plan.wait_s:.1f} s longer for its first token than this "
        f"deployment promises; send the request again after {plan.wait_s:.0f} s",
        retry_after_s=plan.wait_s,
    )


def pairings(fit: Sequence[WorkerView]) -> Iterable[tuple[list[WorkerView], list[WorkerView]]]:
    """Prefill workers and the decode workers that they can hand KV over to; both are many."""
    both, first = Role.BOTH, Role.PREFILL
    groups: dict[tuple[str, str, str], tuple[list[WorkerView], list[WorkerView]]] = {}
    for worker in fit:
        role = worker.role
        if role is not both:
            for transport in worker.transports or ("",):
                kind = worker.revision, worker.layout, transport
                group = groups.get(kind)
                if group is None:
                    group = groups[kind] = [], []
                group[role is not first].append(worker)
    for prefills, decodes in groups.values():
        if prefills and decodes:
            yield prefills, decodes


def lowest(
    request: RequestView, workers: Sequence[WorkerView], score: Callable[[WorkerView], float]
) -> WorkerView:
    """The worker with the lowest score; equal ones by rendezvous, whoever owned the session."""
    return min(workers, key=lambda one: (score(one), _rendezvous(request, (one.name,))))


def _pairs(request: RequestView, fit: Sequence[WorkerView], pick: Pick) -> Iterable[Plan]:
    for prefills, decodes in pairings(fit):
        first, first_terms = pick(request, prefills, Leg.PREFILL)
        second, second_terms = pick(request, decodes, Leg.DECODE)
        terms = {f"prefill.{name}": price for name, price in first_terms.items()}
        terms |= {f"decode.{name}": price for name, price in second_terms.items()}
        yield Plan(
            mode=Mode.PD,
            prefill=first.name,
            decode=second.name,
            terms=terms,
            considered=len(prefills) * len(decodes),
        )


def _alone(
    request: RequestView, fit: Sequence[WorkerView], pick: Pick, *, planned: bool
) -> Iterable[Plan]:
    if planned:
        whole = [worker for worker in fit if worker.role is Role.BOTH]
    else:
        whole = [worker for worker in fit if Role.BOTH in worker.roles]
    if whole:
        chosen, priced = pick(request, whole, Leg.WHOLE)
        yield Plan(
            mode=Mode.EXTEND,
            prefill=None,
            decode=chosen.name,
            terms={f"whole.{name}": price for name, price in priced.items()},
            considered=len(whole),
        )


def _pick(
    request: RequestView, workers: Sequence[WorkerView], price: Pricing, leg: Leg
) -> tuple[WorkerView, Terms]:
    priced = []
    for worker in workers:
        terms = price(request, worker, leg)
        priced.append(_Priced((worker, terms), (worker.name,), sum(terms.values())))
    return _cheapest(request, priced)


def _cheapest(request: RequestView, priced: Sequence[_Priced[T]]) -> T:
    """The last owner if it is within the tie band, else the lowest; ties by rendezvous hash.

    Nothing depends on positions in a list, and leaving out an option that is not chosen never
    changes the choice.
    """
    lowest = min(one.total for one in priced)
    owners = set(request.owners)
    owned = [
        one for one in priced if one.total <= lowest * (1 + TIE_BAND) and owners & {*one.names}
    ]
    ties = owned or [one for one in priced if one.total == lowest]
    return min(ties, key=lambda one: (one.total, _rendezvous(request, one.names))).option


def _rendezvous(request: RequestView, names: Sequence[str]) -> bytes:
    text = "\0".join(names).encode()
    return hashlib.blake2b(text, key=request.session[:64], digest_size=8).digest()


def _why(request: RequestView, workers: Sequence[WorkerView]) -> str:
    if not workers:
        return "no worker is known; check that the workers run and use this router's call key"
    reasons = [
        f"{worker.name} {obstacle(request, worker) or f'has no {_missing(worker)} to pair with'}"
        for worker in workers
    ]
    return "; ".join(reasons)


def _missing(worker: WorkerView) -> str:
    other = Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL
    return f"{other.value} worker of its revision, layout and transport"
