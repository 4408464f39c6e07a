"""What this router has seen in its last minute, as `GET /signals` tells it.

Times come from this router's own requests; what workers have to do from their load reports, which
count the requests of every router.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kimi_runtime.router.admission import Admission
from kimi_runtime.router.discovery import Fleet, Member
from kimi_runtime.router.follow import Feeds
from kimi_runtime.router.job import Journey
from kimi_runtime.router.ledger import Ledger, Load
from kimi_runtime.router.parking import Parking
from kimi_runtime.router.session_gate import SessionGate
from kimi_runtime.router.window import Sum, Window
from kimi_runtime.spec.signals import (
    FORMER_S,
    RouterSignals,
    Spread,
    WorkerSignal,
    fleet_signals,
    quantile,
)
from kimi_runtime.spec.worker import Role

WINDOW_S = 60.0
READER_S = 0.1
"""Where the reader of an answer was slower than this, the gap before the next chunk is its own."""
RATE_TOKENS = 64
"""A shorter prefill takes as long as a step does, and says nothing of a rate."""


class Observations:
    """Collects samples while requests run; `signals` adds them up."""

    def __init__(self, router: str, *, started_s: float) -> None:
        self._router, self._started_s = router, started_s
        self._ttft, self._itl = Window(WINDOW_S), Window(WINDOW_S)
        self._hand_off, self._pace = Window(WINDOW_S), Window(WINDOW_S)
        self._computed = Sum(WINDOW_S)
        self._sampled: dict[str, Sum] = {}
        self._open: dict[int, tuple[Journey, float]] = {}
        self._numbers = 0

    @contextmanager
    def following(self, journey: Journey, *, now_s: float) -> Iterator[None]:
        """A request that is about to be planned, until it ends."""
        self._numbers += 1
        number = self._numbers
        self._open[number] = (journey, now_s)
        try:
            yield
        finally:
            del self._open[number]

    def began(self, journey: Journey, *, now_s: float) -> None:
        """The first output of a request came."""
        if journey.ttft_s is None:
            return
        self._ttft.add(journey.ttft_s, now_s=now_s)
        if journey.prefill_s is not None and not journey.retries:
            self._hand_off.add(max(journey.ttft_s - journey.prefill_s, 0.0), now_s=now_s)
        usage = journey.prefill_usage or journey.decode_usage
        if usage is None:
            return
        seconds = journey.ttft_s if journey.prefill_s is None else journey.prefill_s
        self._computed.add(usage.computed_tokens, now_s=now_s)
        if usage.computed_tokens >= RATE_TOKENS and not journey.retries:
            self._pace.add(seconds / usage.computed_tokens, now_s=now_s)

    def gap(self, gap_s: float, *, tokens: int, reader_s: float, now_s: float) -> None:
        """`tokens` came `gap_s` after those before, of which the reader took `reader_s`."""
        if tokens and reader_s < READER_S:
            self._itl.add(gap_s / tokens, now_s=now_s)

    def sampled(self, worker: str, tokens: int, *, now_s: float) -> None:
        """`tokens` of an answer came from the worker."""
        if tokens:
            self._sampled.setdefault(worker, Sum(WINDOW_S)).add(tokens, now_s=now_s)

    def signals(
        self,
        fleet: Fleet,
        ledger: Ledger,
        feeds: Feeds,
        parking: Parking,
        admission: Admission,
        gate: SessionGate,
        *,
        now_s: float,
    ) -> RouterSignals:
        """The document of now."""
        members = fleet.members
        loads = ledger.loads([member.name for member in members], now_s=now_s)
        blocks = feeds.keys_held()
        present = {member.name for member in members}
        self._sampled = {name: total for name, total in self._sampled.items() if name in present}
        workers = tuple(
            _worker(
                member,
                loads[member.name],
                blocks.get(member.name),
                self._tokens_per_s(member.name, now_s),
                now_s=now_s,
            )
            for member in members
        )
        told = RouterSignals(
            router=self._router,
            uptime_s=now_s - self._started_s,
            known_for_s=now_s - max(self._started_s, fleet.forgotten_s),
            window_s=WINDOW_S,
            in_flight=admission.in_flight,
            ttft=Spread.of(self._ttft.counts(now_s)),
            itl=Spread.of(self._itl.counts(now_s)),
            hand_off=Spread.of(self._hand_off.counts(now_s)),
            hand_off_pending_s=self._pending_s(now_s),
            prefill_tokens_per_s=self._rate(members, now_s),
            parked_requests=parking.requests,
            parked_tokens=parking.tokens,
            oldest_parked_s=parking.oldest_s(now_s),
            held_requests=gate.waiting,
            held_tokens=gate.waiting_tokens,
            session_tokens=gate.used_tokens,
            session_capacity_tokens=gate.capacity_tokens,
            workers=workers,
            former={
                name: now_s - at_s
                for name, at_s in fleet.answered.items()
                if name not in present and now_s - at_s < FORMER_S
            },
        )
        return told.model_copy(update={"fleet": fleet_signals([told])})

    def _tokens_per_s(self, worker: str, now_s: float) -> float:
        total = self._sampled.get(worker)
        seen_s = max(min(WINDOW_S, now_s - self._started_s), 1.0)
        return total.total(now_s) / seen_s if total is not None else 0.0

    def _pending_s(self, now_s: float) -> float:
        """For how long the oldest hand-off has waited for its first output."""
        waits = [
            now_s - began_s - journey.prefill_s
            for journey, began_s in self._open.values()
            if journey.prefill_s is not None and journey.ttft_s is None and not journey.retries
        ]
        return max([0.0, *waits])

    def _rate(self, members: Sequence[Member], now_s: float) -> float | None:
        """Tokens that one worker prefills in a second.

        Two lower bounds, of which the larger is nearer: what the quickest tenth of requests met,
        since the others also queued, and what all workers together have computed in the window.
        """
        quick_s = quantile(self._pace.counts(now_s), 0.1)
        prefill = [m for m in members if m.ready and m.endpoint.role is not Role.DECODE] or [
            m for m in members if m.ready
        ]
        seen_s = min(WINDOW_S, now_s - self._started_s)
        overall = self._computed.total(now_s) / max(seen_s, 1.0) / max(len(prefill), 1)
        if quick_s is None:
            return None
        return max(1.0 / quick_s, overall)


def _worker(
    member: Member, load: Load, blocks: int | None, tokens_per_s: float, *, now_s: float
) -> WorkerSignal:
    info, known = member.info, load.certain and member.ready
    return WorkerSignal(
        name=member.name,
        role=member.endpoint.role,
        ready=member.ready,
        draining=load.draining,
        left=member.left_s is not None,
        silent_s=None if member.answered_s is None else now_s - member.answered_s,
        in_flight=load.waiting + load.running if known else None,
        waiting=load.waiting if known else None,
        queued_tokens=load.queued_tokens if known else None,
        free_blocks=load.free_blocks if known else None,
        total_blocks=None if info is None else info.total_blocks,
        cached_tokens=None if info is None or blocks is None else blocks * info.block_tokens,
        tokens_per_s=tokens_per_s,
    )
