"""What to compute next, and for whom: a pure function of integers.

A step closes the gap between tokens known and tokens computed, within a token budget: one token
for each request that generates, the rest of the budget for prompts in chunks. Lower ranks go first
(`request.rank_of`). When blocks run out, waiting requests give back what was fetched for them and
then the running request of the highest rank is preempted: its full blocks stay cached under their
keys, so that it recomputes only what others overwrote meanwhile.

Why nothing starves or livelocks: ranks are fixed and total. The running request of the lowest
rank can take blocks from everybody but short-lived pins, so it always advances and ends; then the
next one is the lowest. The queue is served strictly by rank.
"""

from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kimi_runtime.engine.blocks import KvBlocks
from kimi_runtime.engine.checkpoint_policy import CheckpointPolicy
from kimi_runtime.engine.plan import Row, Sampled, StepPlan
from kimi_runtime.engine.request import Request, order_of
from kimi_runtime.errors import CapacityError, Overloaded, RequestError


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How much is taken on at once; tokens and requests."""

    block_tokens: int
    step_tokens: int
    max_running: int
    max_waiting: int
    max_context_tokens: int
    checkpoints: CheckpointPolicy | None = None
    """Of a model with a state: where chunks end so that it can be kept. Such a model goes on from
    cached blocks only where the request brings the state with them."""


class SealedBlock(NamedTuple):
    """A block that a step filled and nobody held before."""

    key: bytes
    block: int
    tenant: str = "default"


class _Draft:
    """A plan in the making, and the token budget left for it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[int, Row] = {}

    def add(self, row: Row) -> None:
        self.rows[row.request] = row
        self.budget -= len(row.ids)

    def drop(self, request: int) -> None:
        row = self.rows.pop(request, None)
        if row is not None:
            self.budget += len(row.ids)


class Scheduler:
    """Requests waiting and running over `blocks`.

    Call `plan`, run it, then `commit`; never two plans at once. Any method may be
    called while a plan runs: what the plan touches is given back only after it. Without `tables`
    rows have no block tables, which nobody but a runner reads.
    """

    def __init__(self, blocks: KvBlocks, limits: SchedulerLimits, *, tables: bool = True) -> None:
        self.blocks, self.limits, self._tables = blocks, limits, tables
        self.preemptions = 0
        self._waiting: list[Request] = []
        self._running: dict[int, Request] = {}
        self._completed: list[Request] = []
        self._preempted: list[Request] = []
        self._in_flight: dict[int, Request] = {}
        self._leaving: list[Request] = []

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Tokens known and not computed, over everybody; without those just sampled."""
        total = 0
        for request in (*self._waiting, *self._running.values()):
            known = len(request.tokens)
            lacking = known - request.computed
            if lacking != 1 or known <= request.prompt_tokens:  # else it is `generating`
                total += lacking
        return total

    @property
    def lacking(self) -> int:
        """Blocks that those in the queue do not have yet."""
        return sum(self.lacks(request) for request in self._waiting)

    def lacks(self, request: Request) -> int:
        """Blocks it takes to hold all that is known of it, beside those it has."""
        return max(self._blocks_for(len(request.tokens)) - len(request.blocks), 0)

    def check(
        self, prompt_tokens: int, max_tokens: int, *, fetching: int = 0, retry_after_s: float = 1.0
    ) -> None:
        """Refuse what can never fit and what is too much now.

        `fetching` requests are on their way into the queue. Raises RequestError for a prompt that
        fills the context, CapacityError for one that the blocks can't hold, Overloaded with
        `retry_after_s` when the queue is full.
        """
        context = self.limits.max_context_tokens
        if prompt_tokens + (max_tokens > 0) > context:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, but the context holds {context} with "
                "what is generated; shorten the prompt",
                param="ids",
                code="context_length_exceeded",
            )
        most = min(prompt_tokens + max_tokens, context)
        need = self._blocks_for(most - (max_tokens > 0))  # the last id needs no KV
        if need > self.blocks.total:
            size = self.limits.block_tokens
            raise CapacityError(
                f"KV cache for {most} tokens",
                need=f"{need} blocks of {size} tokens",
                have=f"{self.blocks.total}",
                where="this worker",
                fix="lower max_tokens, shorten the prompt or raise kv_bytes",
            )
        if len(self._waiting) + fetching >= self.limits.max_waiting:
            raise Overloaded(
                f"{self.running} requests run and {len(self._waiting) + fetching} wait, as many "
                "as this worker takes; try again later",
                retry_after_s=retry_after_s,
            )

    def add(self, request: Request) -> None:
        """Queue a request. Blocks it already has belong to the scheduler from now on."""
        insort(self._waiting, request, key=order_of)

    def remove(self, request: Request) -> None:
        """The request is done or not wanted any more; its blocks are given back.

        A block that the step now running writes to is given back after that step.
        """
        self._running.pop(request.number, None)
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._completed:
            self._completed.remove(request)
        if request.number in self._in_flight:
            if request not in self._leaving:
                self._leaving.append(request)
        else:
            self._strip(request)

    def make_room(self, request: Request, needed: Callable[[], int], *, total: int) -> bool:
        """Whether a request that is to be read for may have `needed()` of the available blocks now.
        It is asked again after blocks were taken from others: some may be those it shares.

        With them it holds `total`. It may have what `plan` would let it start with: all that its
        tokens take, beside a block of growth for each of the running and what those lack who wait
        before it. Between plans it takes blocks from those behind it as if it were queued; alone it
        needs no more than it reads.
        """
        before, beside = self._beside(request, total)
        draft = _Draft(0)
        while self.blocks.available < needed() + beside + self.running:
            if self._in_flight or not (
                self._strip_waiting(behind=request) or self._preempt_background(request, draft)
            ):
                break
        else:
            return True
        return not self.running and not before and self.blocks.available >= needed()

    def has_room(self, request: Request, needed: int, *, total: int) -> bool:
        """Whether `make_room` would say yes and take nothing from anybody for it."""
        _, beside = self._beside(request, total)
        return self.blocks.available >= needed + beside + self.running

    def take_completed(self) -> list[Request]:
        """Requests that do not sample and whose prompt is computed; each is told once.

        Their blocks stay until `remove`.
        """
        completed, self._completed = self._completed, []
        return completed

    def take_preempted(self) -> list[Request]:
        """Requests that were preempted since the last call: what else holds their blocks should
        let go, or who they were preempted for gets none.
        """
        preempted, self._preempted = self._preempted, []
        return preempted

    def plan(self) -> StepPlan:
        """The next step; empty if nothing can be computed now."""
        assert not self._in_flight, "a plan is running"
        draft = _Draft(self.limits.step_tokens)
        for request in sorted(self._running.values(), key=_generating_first):
            if request.number in self._running:  # else preempted for one before it
                self._plan_row(request, draft)
        while self._waiting and draft.budget:
            if not self._start(self._waiting[0], draft):
                break
        self._in_flight = {number: self._running[number] for number in draft.rows}
        return StepPlan(tuple(draft.rows.values()))

    def commit(
        self, plan: StepPlan, sampled: Sequence[Sampled], failed: Collection[int] = ()
    ) -> list[SealedBlock]:
        """The plan ran: take its tokens and ids in, seal the blocks it filled.

        The rows of `failed` requests broke off; those requests are removed and nobody else is
        touched: what they wrote went into blocks of their own that are not sealed.
        """
        sealed: list[SealedBlock] = []
        size = self.limits.block_tokens
        for row in plan.rows:
            request = self._in_flight[row.request]
            if row.request in failed:
                self.remove(request)
                continue
            request.computed += len(row.ids)
            if request.computed // size > row.start // size:
                sealed.extend(self._seal(request, row.start))
        for drawn in sampled:
            request = self._in_flight[drawn.request]
            request.tokens.append(drawn.id)
            request.chain.extend(request.tokens)
        for request in self._in_flight.values():
            if not request.samples and request not in self._leaving:
                self._complete_if_done(request)
        leaving, self._leaving, self._in_flight = self._leaving, [], {}
        for request in leaving:
            self._strip(request)
        return sealed

    def begin_decodes(self) -> None:
        """A step runs in which all who run compute the one token they lack, in blocks they have.

        It is what `plan` would find, where nobody waits. The caller does what `commit` would do for
        them; then comes `end_decodes`.
        """
        assert not self._in_flight, "a plan is running"
        self._in_flight = dict(self._running)

    def end_decodes(self) -> None:
        """That step is over."""
        leaving, self._leaving, self._in_flight = self._leaving, [], {}
        for request in leaving:
            self._strip(request)

    def requests(self) -> list[Request]:
        """Everybody whose blocks are counted here, those on their way out included."""
        everybody = (*self._waiting, *self._running.values(), *self._completed, *self._leaving)
        return list(dict.fromkeys(everybody))

    def _beside(self, request: Request, total: int) -> tuple[list[Request], int]:
        """Who waits before a request that is to be read for, and what they and it lack besides."""
        before = [one for one in self._waiting if order_of(one) < order_of(request)]
        beyond = max(self._blocks_for(len(request.tokens)) - total, 0)
        return before, beyond + sum(self.lacks(one) for one in before)

    def _plan_row(self, request: Request, draft: _Draft) -> None:
        """Add the request's row: as many tokens as budget and blocks allow, maybe none."""
        start, known, policy = request.computed, len(request.tokens), self.limits.checkpoints
        count = min(known - start, draft.budget)
        if policy is not None:
            count = min(count, policy.stop(start, known, request.refused) - start)
        if start + count > len(request.blocks) * self.limits.block_tokens:
            count = self._fit(request, count, draft)
        if count <= 0:
            return
        end = start + count
        draft.add(
            Row(
                request.number,
                start,
                (request.tokens[start],) if count == 1 else tuple(request.tokens[start:end]),
                _front(request.blocks, self._blocks_for(end)) if self._tables else (),
                request.samples and end == known,
                policy is not None and policy.wanted(end, known, request.refused),
            )
        )

    def _start(self, request: Request, draft: _Draft) -> bool:
        """Move the head of the queue into the step; False if it has to wait."""
        if self.running >= self.limits.max_running and not self._preempt_background(request, draft):
            return False
        self._take_cached(request)
        if not self._make_room_to_start(request, draft):
            return False  # what it took it keeps, unless somebody who runs needs it
        self._waiting.remove(request)
        self._running[request.number] = request
        request.settle_usage()
        self._complete_if_done(request)
        if request.number in self._running:
            self._plan_row(request, draft)
        return True

    def _make_room_to_start(self, request: Request, draft: _Draft) -> bool:
        """Whether what is known fits beside the running, with a block of growth for each of them.

        Alone, a request may start with less: it advances as pins end.
        """
        lacking = self.lacks(request)
        while self.blocks.available < lacking + self.running:
            if self._strip_waiting(behind=request) or self._preempt_background(request, draft):
                continue
            return self.running == 0 and (self.blocks.available > 0 or lacking <= 0)
        return True

    def _take_cached(self, request: Request) -> None:
        """Continue the request's blocks with cached ones."""
        size = self.limits.block_tokens
        if request.computed % size or self.limits.checkpoints is not None:
            return  # it ends in a private tail, or its state does not belong to what is cached
        more = self.blocks.acquire(request.reusable_keys[len(request.blocks) :])
        request.blocks.extend(more)
        request.computed = len(request.blocks) * size

    def _fit(self, request: Request, count: int, draft: _Draft) -> int:
        """Give the request blocks for `count` more tokens; returns for how many it has some."""
        need = self._blocks_for(request.computed + count) - len(request.blocks)
        while need > self.blocks.available:
            if not (self._strip_waiting() or self._preempt_after(request, draft)):
                break
        if need > 0:
            more = self.blocks.allocate(min(need, self.blocks.available))
            assert more is not None
            request.blocks.extend(more)
        have = len(request.blocks) * self.limits.block_tokens
        return min(count, have - request.computed)

    def _strip_waiting(self, *, behind: Request | None = None) -> bool:
        """Take the blocks of the last waiting request that has some; its cached KV may survive."""
        for request in reversed(self._waiting):
            if behind is not None and order_of(request) <= order_of(behind):
                return False
            if request.blocks:
                self._strip(request)
                return True
        return False

    def _preempt_after(self, request: Request, draft: _Draft) -> bool:
        """Preempt the running request of the highest rank, unless it is `request` itself."""
        last = max(self._running.values(), key=order_of, default=request)
        if last is request:
            return False
        self._preempt(last, draft)
        return True

    def _preempt_background(self, request: Request, draft: _Draft) -> bool:
        """Preempt for a waiting request, but only across classes: equals wait for each other."""
        others = (r for r in self._running.values() if r.priority is not request.priority)
        last = max(others, key=order_of, default=None)
        if last is None or order_of(last) < order_of(request):
            return False
        self._preempt(last, draft)
        return True

    def _preempt(self, request: Request, draft: _Draft) -> None:
        draft.drop(request.number)
        del self._running[request.number]
        self._strip(request)
        self.add(request)
        self._preempted.append(request)
        self.preemptions += 1

    def _strip(self, request: Request) -> None:
        blocks, request.blocks, request.computed = request.blocks, [], 0
        self.blocks.release(blocks)

    def _seal(self, request: Request, start: int) -> list[SealedBlock]:
        """Seal the blocks that were filled since position `start`."""
        size = self.limits.block_tokens
        filled = slice(start // size, request.computed // size)
        blocks, keys, tenant = request.blocks[filled], request.chain.keys[filled], request.tenant
        held = request.blocks[filled] = self.blocks.seal_run(blocks, keys)
        return [
            SealedBlock(key, own, tenant)
            for key, own, kept in zip(keys, blocks, held, strict=True)
            if own == kept
        ]

    def _complete_if_done(self, request: Request) -> None:
        if not request.samples and not request.lacking:
            del self._running[request.number]
            self._completed.append(request)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)


def _front(blocks: list[int], count: int) -> tuple[int, ...]:
    """The first `count` of a block table; all of a long one, as usual, is copied once."""
    return tuple(blocks) if count == len(blocks) else tuple(blocks[:count])


def _generating_first(request: Request) -> tuple[bool, float, int]:
    return len(request.tokens) - request.computed > 1, request.rank, request.number
