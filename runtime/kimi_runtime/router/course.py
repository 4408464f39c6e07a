"""One decision being carried out: what workers tell of it goes to those who learn. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kimi_runtime.router.cost.learn import FirstToken, Learning
from kimi_runtime.router.insight import Insight
from kimi_runtime.router.plan import Fetch, Mode
from kimi_runtime.router.view import WorkerView
from kimi_runtime.spec.request import FinishReason, GenerateChunk, KvUsage, Timing

if TYPE_CHECKING:
    from kimi_runtime.router.cost.planner import Decided
    from kimi_runtime.router.decisions import Decision

MOST_OF_IT = 0.9
"""A read that brought less than this share of what was planned says nothing of its links."""

Ended = Literal["finished", "left", "failed", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a decision. Seconds from the decision on; None where nobody told.

    `left`: its reader went away, or another part of the stack ended it; `refused`: it was deferred
    for longer than anybody waits. The tokens are the prefilling worker's.
    """

    ended: Ended
    total_s: float
    why: str | None = None
    """The kind of failure; no message, which may quote a request."""
    first_token_s: float | None = None
    prepared_s: float | None = None
    queued_s: float | None = None
    prefill_s: float | None = None
    hbm_tokens: int | None = None
    pool_tokens: int | None = None
    computed_tokens: int | None = None
    hand_off_bytes: int | None = None
    output_tokens: int = 0


class Course:
    """Told of chunks in the order in which they come. `name` is the one that was committed."""

    def __init__(self, name: str, decision: "Decision", insight: Insight) -> None:
        self.name, self.decision, self._insight = name, decision, insight
        self.prefill_keys: Sequence[bytes] = ()
        """Of the prompt's full blocks, in the geometry of who prefills it."""
        self.streamed = False
        """Whether KV was handed over while the prompt was computed: then reading it took as long
        as that did, and says nothing of the links."""
        self._usage: KvUsage | None = None
        self._timing: Timing | None = None
        self._hand_off_bytes: int | None = None
        self._first_s: float | None = None
        self._output_tokens = 0
        self._finish: FinishReason | None = None

    @property
    def first_token_s(self) -> float | None:
        """Until the first token came, from the decision on."""
        return self._first_s

    def prefilled(self, chunk: GenerateChunk) -> None:
        """The prefill leg of a pair ended with `chunk`."""
        self._usage, self._timing = chunk.usage, chunk.timing

    def came(self, chunk: GenerateChunk, *, now_s: float) -> None:
        """A chunk of the answer came."""
        self.sampled(len(chunk.ids))
        self._finish = chunk.finish or self._finish
        if self._first_s is None and chunk.finish is not FinishReason.CANCELLED:
            self._first_s = now_s - self.decision.now_s
            self._began(chunk, now_s=now_s)

    def sampled(self, tokens: int) -> None:
        """The answer has so many tokens more."""
        self._output_tokens += tokens
        self._insight.answers.sampled(self.decision.plan.decode, self.name, tokens)

    def close(self, failure: BaseException | None, *, now_s: float) -> Outcome:
        """It is over. What is left without a finish and without an Exception was left by others."""
        finished = self._finish is not None and self._finish is not FinishReason.CANCELLED
        learning, decided = self._insight.learning, self.decision.decided
        if learning is not None and decided is not None and self._output_tokens:
            cut = not finished or self._finish is FinishReason.LENGTH
            learning.finished(decided, self._output_tokens, cut=cut)
        failed = isinstance(failure, Exception)
        usage, timing = self._usage, self._timing
        return Outcome(
            ended="finished" if finished else "failed" if failed else "left",
            total_s=now_s - self.decision.now_s,
            why=type(_cause(failure)).__name__ if failed and not finished else None,
            first_token_s=self._first_s,
            prepared_s=None if timing is None else timing.prepared_s,
            queued_s=None if timing is None else timing.queued_s,
            prefill_s=None if timing is None else timing.prefill_s,
            hbm_tokens=None if usage is None else usage.hbm_tokens,
            pool_tokens=None if usage is None else usage.pool_tokens,
            computed_tokens=None if usage is None else usage.computed_tokens,
            hand_off_bytes=self._hand_off_bytes,
            output_tokens=self._output_tokens,
        )

    def _began(self, chunk: GenerateChunk, *, now_s: float) -> None:
        plan = self.decision.plan
        if plan.prefill is None:
            self._usage, self._timing = chunk.usage, chunk.timing
        elif chunk.usage is not None:
            self._hand_off_bytes = chunk.usage.hand_off_bytes
        learning, decided = self._insight.learning, self.decision.decided
        if learning is None or decided is None:
            return
        worker = self.decision.workers[plan.prefill or plan.decode]
        learning.first_token(decided, self._first_token(decided, worker), now_s=now_s)
        self._learn_reads(learning, chunk, now_s=now_s)
        self._learn_space(worker, now_s=now_s)

    def _first_token(self, decided: "Decided", worker: WorkerView) -> FirstToken:
        assert self._first_s is not None
        usage, timing, chosen = self._usage, self._timing, decided.explanation.chosen
        queued_s = prefill_s = None
        if timing is not None:
            queued_s, prefill_s = timing.queued_s, timing.prefill_s
        elif chosen.mode is Mode.EXTEND and not (worker.waiting or worker.queued_tokens):
            prefill_s = self._first_s  # nobody was before us, and nothing was read
        tier = next(
            (one.tier for one in self.decision.asked.sources if one.name == chosen.source),
            "hbm" if chosen.source is None or chosen.source in self.decision.workers else "dram",
        )
        found = None
        if usage is not None:
            found = usage.hbm_tokens + (usage.pool_tokens if chosen.source is not None else 0)
        return FirstToken(
            after_s=self._first_s,
            queued_s=queued_s,
            prefill_s=prefill_s,
            new_tokens=None if usage is None else usage.computed_tokens,
            cached_tokens=0 if usage is None else usage.hbm_tokens + usage.pool_tokens,
            found_tokens=found,
            tier=tier,
            kind=worker.kind,
        )

    def _learn_reads(self, learning: Learning, chunk: GenerateChunk, *, now_s: float) -> None:
        plan, usage, timing = self.decision.plan, self._usage, self._timing
        if plan.fetches and usage is not None and timing is not None:
            fetch = plan.fetches[0]
            if usage.pool_tokens >= MOST_OF_IT * (fetch.end - fetch.start):
                learning.transferred(f"{self.name}.fetch", fetch, timing.prepared_s, now_s=now_s)
        hand_off, taken, took = plan.hand_off, chunk.usage, chunk.timing
        if hand_off is None or taken is None or took is None or self.streamed:
            return
        if taken.hand_off_bytes and taken.hand_off_failure is None:
            real: Fetch = replace(hand_off, size_bytes=taken.hand_off_bytes)
            learning.transferred(f"{self.name}.hand_off", real, took.prepared_s, now_s=now_s)

    def _learn_space(self, worker: WorkerView, *, now_s: float) -> None:
        usage, timing = self._usage, self._timing
        if usage is None or timing is None or not usage.computed_tokens:
            return
        held = usage.hbm_tokens + usage.pool_tokens + usage.hand_off_tokens
        keys = self.prefill_keys[held // worker.block_tokens :]
        self._insight.space.computed(worker.name, keys, seconds=timing.prefill_s, now_s=now_s)


def _cause(failure: BaseException | None) -> BaseException | None:
    """What failed: a leg's failure carries the error it stands for."""
    return getattr(failure, "error", failure)
