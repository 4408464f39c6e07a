"""What each worker has to do, as far as this router can know: its own sends plus load reports.

A send is entered before anything is awaited, so that the next decision sees it. A report says what
the worker had seen of ours (`last_request`); what was sent after that is added on top, and what was
computed since is taken off: workers compute prompts in the order in which they get them. A report
that is old or missing makes a worker uncertain: it then counts as an average one plus a penalty,
never as idle. Pure: time is an argument.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kimi_runtime.spec.worker import LoadReport

UNCERTAIN_PENALTY_REQUESTS = 1
REMEMBERED_SENDS = 4096


class Load(NamedTuple):
    """A worker's load now; the fields are `WorkerView`'s."""

    waiting: int
    running: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    certain: bool
    draining: bool
    short_blocks: int | None = None
    """As in its report; None: not told, or a guess."""
    unreported: int = 0
    """Sends of this router that the report does not count yet."""
    queued_depth: float | None = None
    """Where in their contexts queued tokens are, on average; None: of none is it known."""


@dataclass(slots=True)
class _Entry:
    order: int
    new_tokens: int
    prompt_tokens: int
    left: int
    """Of `new_tokens`, those that are not computed as far as is known."""
    computed: bool = False


@dataclass(slots=True)
class _Worker:
    entries: dict[str, _Entry]
    orders: OrderedDict[str, int]
    """The newest sends' order by wire id, finished ones included: a report may name one."""
    report: LoadReport | None = None
    reported_at_s: float = 0.0
    sent: int = 0
    seen: int = 0
    others_tokens: int = 0
    """Of the report's queued tokens, those that are of none of `entries`."""
    load: Load | None = None
    """As far as it was asked for since anything here changed: decisions ask of every worker."""


class Ledger:
    """In-flight work per worker. `router` is this replica's name in the workers' reports."""

    def __init__(self, router: str, *, stale_after_s: float) -> None:
        self._router, self._stale_after_s = router, stale_after_s
        self._workers: dict[str, _Worker] = {}

    def start(self, worker: str, wire_id: str, *, new_tokens: int, prompt_tokens: int = 0) -> None:
        """A request goes to `worker`, which has to compute the last `new_tokens` of its prompt."""
        state = self._state(worker)
        state.sent += 1
        length = max(prompt_tokens, new_tokens)
        state.entries[wire_id] = _Entry(state.sent, new_tokens, length, new_tokens)
        state.orders[wire_id] = state.sent
        if len(state.orders) > REMEMBERED_SENDS:
            state.orders.popitem(last=False)
        state.load = None

    def computed(self, worker: str, wire_id: str) -> None:
        """Its prompt is done: the first output came."""
        state = self._state(worker)
        entry = state.entries.get(wire_id)
        if entry is not None:
            entry.computed, state.load = True, None

    def finish(self, worker: str, wire_id: str) -> None:
        """It left the worker, well or not. Finishing twice changes nothing."""
        state = self._state(worker)
        state.entries.pop(wire_id, None)
        state.load = None

    def report(self, worker: str, report: LoadReport, *, now_s: float) -> bool:
        """Take a load report in; False if a newer one of the same epoch is already here."""
        state = self._state(worker)
        last = state.report
        if last is not None and last.epoch == report.epoch and report.seq <= last.seq:
            return False
        if last is not None and last.epoch != report.epoch:
            state.seen = 0
        state.report, state.reported_at_s = report, now_s
        newest = report.last_request.get(self._router)
        if newest is not None:
            state.seen = max(state.seen, state.orders.get(newest, 0))
        state.others_tokens = _shared_out(state, report.queued_tokens)
        self._load(state, report)  # now, and not when somebody decides
        return True

    def lost(self, worker: str) -> None:
        """The worker is gone: what it reported no longer holds."""
        self._state(worker).report = None

    def forget(self, worker: str) -> None:
        """The worker is of this router no more."""
        self._workers.pop(worker, None)

    def in_flight(self, worker: str) -> int:
        """Requests of this router at `worker` now."""
        return len(self._state(worker).entries)

    @property
    def total_in_flight(self) -> int:
        """Requests of this router at all workers now, each leg counted."""
        return sum(len(state.entries) for state in self._workers.values())

    def share(self, workers: Iterable[str]) -> float:
        """The part of the workers' memory that this replica's sessions may use; above 0, at most 1.

        Replicas don't know each other, but each worker reports whose requests it has. With `own`
        of n requests from k replicas it is (own + 1) / (n + k): all of it for a single replica.
        """
        own, others = 0, 0
        replicas = {self._router}
        for name in workers:
            state = self._state(name)
            own += len(state.entries)
            if state.report is not None:
                theirs = {r: n for r, n in state.report.in_flight.items() if r != self._router}
                replicas |= theirs.keys()
                others += sum(theirs.values())
        return (own + 1) / (own + others + len(replicas))

    def loads(self, workers: Iterable[str], *, now_s: float) -> dict[str, Load]:
        """The load of each worker; uncertain ones by the average of the others."""
        states, stale_s = self._workers, self._stale_after_s
        loads: dict[str, Load] = {}
        unknown = []
        for name in workers:
            state = states.get(name)
            if state is None or state.report is None or now_s - state.reported_at_s > stale_s:
                unknown.append(name)
            else:
                loads[name] = state.load or self._load(state, state.report)
        if not unknown:
            return loads
        certain = list(loads.values())
        count = max(len(certain), 1)
        requests = sum(load.waiting + load.running for load in certain) // count
        running = sum(load.running for load in certain) // count
        queued = sum(load.queued_tokens for load in certain) // count
        for name in unknown:
            loads[name] = self._guess(name, requests=requests, running=running, queued=queued)
        return loads

    def _load(self, state: _Worker, report: LoadReport) -> Load:
        waiting, running, entries = report.waiting, report.running, state.entries
        requests = max(waiting + running - report.in_flight.get(self._router, 0), 0) + len(entries)
        running = min(running, requests)
        unreported = own = 0
        pairs = 0.0
        for entry in entries.values():
            unreported += entry.order > state.seen
            if not entry.computed and (left := entry.left):
                own += left
                pairs += left * (entry.prompt_tokens - left / 2)
        state.load = load = Load(
            requests - running,
            running,
            state.others_tokens + own,
            report.free_blocks,
            report.total_blocks,
            True,
            report.draining,
            report.short_blocks,
            unreported,
            pairs / own if own else None,
        )
        return load

    def _guess(self, name: str, *, requests: int, running: int, queued: int) -> Load:
        state = self._state(name)
        own = list(state.entries.values())
        old = state.report
        if old is not None:  # an old report is a floor under the guess
            requests = max(requests, old.waiting + old.running)
            running = max(running, old.running)
            queued = max(queued, old.queued_tokens)
        return Load(
            waiting=max(requests - running, len(own) - running, 0) + UNCERTAIN_PENALTY_REQUESTS,
            running=running,
            queued_tokens=max(queued, _open_tokens(own)),
            free_blocks=old.free_blocks if old is not None else 0,
            total_blocks=old.total_blocks if old is not None else 0,
            certain=False,
            draining=old is not None and old.draining,
        )

    def _state(self, worker: str) -> _Worker:
        state = self._workers.get(worker)
        if state is None:
            state = self._workers[worker] = _Worker({}, OrderedDict())
        return state


def _shared_out(state: _Worker, queued: int) -> int:
    """Note what of `queued` tokens is left of each prompt of ours; what remains is of others.

    The oldest prompt is the one that is being computed: the newest still have all of theirs.
    """
    for entry in reversed(state.entries.values()):
        if entry.order <= state.seen and not entry.computed:
            entry.left = min(entry.new_tokens, queued)
            queued -= entry.left
    return queued


def _open_tokens(entries: Iterable[_Entry]) -> int:
    return sum(entry.new_tokens for entry in entries if not entry.computed)
