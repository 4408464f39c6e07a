"""The decisions of a log made again by another policy, from the same views of the same workers.

What a different choice would have led to cannot be known from a log: later views would differ too.
What can be said is how often the choices differ and what the record's own prices say of both. A
policy that learns starts from its priors and learns from the outcomes of the choices it shares.
Pure.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from kimi_runtime.errors import KimistackError
from kimi_runtime.router.cost.learn import FirstToken, Learning
from kimi_runtime.router.cost.planner import Decided
from kimi_runtime.router.explain.record import CandidateRecord, Record
from kimi_runtime.router.plan import Plan
from kimi_runtime.router.policies import open_policy
from kimi_runtime.router.policies.base import Policy
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.spec.router import PolicySpec


@dataclass(slots=True)
class Replayed:
    """Counts of decisions; mean seconds over those where the record priced both choices.

    `refused`: the policy finds nobody, or defers. `not_priced`: it chose a plan that the record
    left out since it could not be the best.
    """

    policy: str
    decisions: int = 0
    skipped: int = 0
    """Not all workers were written down."""
    same: int = 0
    refused: int = 0
    not_priced: int = 0
    priced: int = 0
    recorded_first_token_s: float = 0.0
    replayed_first_token_s: float = 0.0
    recorded_cost_s: float = 0.0
    replayed_cost_s: float = 0.0
    workers: dict[str, int] = field(default_factory=dict)
    """How often each worker was chosen, for prefill or all."""

    def as_json(self) -> dict[str, Any]:
        """With means in place of sums."""
        told = asdict(self)
        for name in [name for name in told if name.endswith("_s")]:
            told[name] = told[name] / self.priced if self.priced else None
        return told


def replay(records: Iterable[Record], spec: PolicySpec) -> Replayed:
    """Make every decision again by the policy of `spec`."""
    policy = open_policy(spec)
    learning = Learning(policy.planner) if isinstance(policy, CostPolicy) else None
    replayed = Replayed(spec.kind)
    for record in records:
        if record.workers_left_out:
            replayed.skipped += 1
            continue
        replayed.decisions += 1
        try:
            plan, decided = _choose(policy, record)
        except KimistackError:
            replayed.refused += 1
            continue
        _count(replayed, record, plan)
        shared = plan.workers == record.chosen.workers
        if shared and decided is not None and learning is not None:
            _learn(learning, decided, record)
    return replayed


def _choose(policy: Policy, record: Record) -> tuple[Plan, Decided | None]:
    if isinstance(policy, CostPolicy):
        decided = policy.planner.plan(record.asked, record.workers, now_s=record.now_s)
        return decided.plan, decided
    return policy.choose(record.asked, record.workers, now_s=record.now_s), None


def _count(replayed: Replayed, record: Record, plan: Plan) -> None:
    first = plan.prefill or plan.decode
    replayed.workers[first] = replayed.workers.get(first, 0) + 1
    replayed.same += plan.workers == record.chosen.workers
    ours, theirs = _priced(record, record.chosen.workers), _priced(record, plan.workers)
    if ours is None or theirs is None:
        replayed.not_priced += 1
        return
    replayed.priced += 1
    replayed.recorded_first_token_s += ours.first_token_s or 0.0
    replayed.replayed_first_token_s += theirs.first_token_s or 0.0
    replayed.recorded_cost_s += ours.cost_s or 0.0
    replayed.replayed_cost_s += theirs.cost_s or 0.0


def _priced(record: Record, workers: tuple[str, ...]) -> CandidateRecord | None:
    """The cheapest way with these workers."""
    known = [one for one in record.candidates if one.workers == workers]
    return min(known, key=lambda one: one.cost_s or 0.0, default=None)


def _learn(learning: Learning, decided: Decided, record: Record) -> None:
    outcome, now_s = record.outcome, record.now_s
    if outcome.first_token_s is not None:
        kinds = {worker.name: worker.kind for worker in record.workers}
        real = FirstToken(
            after_s=outcome.first_token_s,
            queued_s=outcome.queued_s,
            prefill_s=outcome.prefill_s,
            new_tokens=outcome.computed_tokens,
            cached_tokens=(outcome.hbm_tokens or 0) + (outcome.pool_tokens or 0),
            kind=kinds.get(record.chosen.workers[0], ""),
        )
        learning.first_token(decided, real, now_s=now_s)
    if outcome.output_tokens:
        learning.finished(decided, outcome.output_tokens, cut=outcome.ended != "finished")
