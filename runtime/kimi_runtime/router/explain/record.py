"""One line of an explain log: a decision, what it was made from, and what came of it.

No prompt, no token id and no key is in it: a session is a pseudonym that only this deployment's
call key leads to. Lines are written when a decision has come to its end. Pure.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, NonNegativeInt, ValidationError

from kimi_runtime.errors import ConfigError
from kimi_runtime.router.cost.terms import Candidate
from kimi_runtime.router.course import Outcome
from kimi_runtime.router.decisions import Decision, without_tenant
from kimi_runtime.router.plan import Mode
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.base import ReportModel
from kimi_runtime.spec.router import PolicySpec

MAX_CANDIDATES = 64
MAX_WORKERS = 128
DIGITS = 7
"""Of a second, after the point."""


class CandidateRecord(ReportModel):
    """One plan that was priced, in seconds; `terms` by the names of docs/routing.md."""

    mode: Mode
    prefill: str | None = None
    decode: str
    source: str | None = None
    cached_tokens: NonNegativeInt = 0
    cost_s: float | None = None
    first_token_s: float | None = Field(None, description="None: the policy does not predict it.")
    sd_s: float | None = None
    terms: Mapping[str, float] = {}

    @property
    def workers(self) -> tuple[str, ...]:
        """Everybody it uses."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class Record(ReportModel):
    """A decision."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    version: Literal[1] = 1
    request: str
    attempt: NonNegativeInt = 0
    router: str
    unix_s: float
    now_s: float = Field(description="When it was made, on the router's own clock.")
    policy: PolicySpec
    asked: RequestView
    workers: tuple[WorkerView, ...]
    workers_left_out: NonNegativeInt = Field(
        0, description="More were there than are written; such a decision cannot be replayed."
    )
    chosen: CandidateRecord
    candidates: tuple[CandidateRecord, ...] = Field((), description="The cheapest ones.")
    considered: NonNegativeInt = 0
    outcome: Outcome


def record_of(
    decision: Decision, outcome: Outcome, *, router: str, policy: PolicySpec, unix_s: float
) -> Record:
    """The line of a decision that has come to its end."""
    plan = decision.plan
    candidates: tuple[CandidateRecord, ...] = ()
    if decision.decided is None:
        chosen = CandidateRecord(
            mode=plan.mode, prefill=plan.prefill, decode=plan.decode, terms=plan.terms
        )
    else:
        explanation = decision.decided.explanation
        chosen = _candidate(explanation.chosen)
        if plan.mode is Mode.DEFER:
            chosen = chosen.model_copy(update={"mode": Mode.DEFER})
        cheapest = sorted(explanation.candidates, key=lambda one: one.cost_s)[:MAX_CANDIDATES]
        candidates = tuple(map(_candidate, cheapest))
    workers = _written(decision, candidates)
    return Record(
        request=decision.request,
        attempt=decision.attempt,
        router=router,
        unix_s=round(unix_s, 3),
        now_s=decision.now_s,
        policy=policy,
        asked=without_tenant(decision.asked),
        workers=workers,
        workers_left_out=len(decision.workers) - len(workers),
        chosen=chosen,
        candidates=candidates,
        considered=plan.considered,
        outcome=_rounded(outcome),
    )


def line_of(record: Record) -> bytes:
    """The line, newline included."""
    told = record.model_dump(mode="json", exclude_defaults=True)
    # what tells the format and the policy is written whatever the defaults are
    whole = {"version": record.version, **told, "policy": record.policy.model_dump(mode="json")}
    return json.dumps(whole, separators=(",", ":")).encode() + b"\n"


def read_records(path: Path) -> Iterator[Record]:
    """The records of a log; ConfigError naming file, line and field of what is none."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parsed(path, number, line)
    except OSError as exc:
        raise ConfigError(f"the explain log {path} cannot be read: {exc.strerror}") from exc


def older(path: Path) -> Path:
    """Where what no longer fits under `path` is."""
    return path.with_name(f"{path.name}.1")


def _parsed(path: Path, number: int, line: bytes) -> Record:
    try:
        return Record.model_validate_json(line)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise ConfigError(f"{path}, line {number}: {where}: {first['msg']}") from exc


def _candidate(one: Candidate) -> CandidateRecord:
    terms = {name: round(value, DIGITS) for name, value in one.terms._asdict().items() if value}
    return CandidateRecord(
        mode=one.mode,
        prefill=one.prefill,
        decode=one.decode,
        source=one.source,
        cached_tokens=one.cached_tokens,
        cost_s=round(one.cost_s, DIGITS),
        first_token_s=round(one.terms.first_token_s, DIGITS),
        sd_s=round(max(one.first_token_var, 0.0) ** 0.5, DIGITS),
        terms=terms,
    )


def _written(decision: Decision, candidates: tuple[CandidateRecord, ...]) -> tuple[WorkerView, ...]:
    """All workers, or of too many those of the chosen and the cheapest plans."""
    if len(decision.workers) <= MAX_WORKERS:
        return tuple(decision.workers.values())
    named = dict.fromkeys(decision.plan.workers)
    for one in candidates:
        named.update(dict.fromkeys(one.workers))
    return tuple(decision.workers[name] for name in list(named)[:MAX_WORKERS])


def _rounded(outcome: Outcome) -> Outcome:
    def short(value: float | None) -> float | None:
        return None if value is None else round(value, DIGITS)

    return replace(
        outcome,
        total_s=round(outcome.total_s, DIGITS),
        first_token_s=short(outcome.first_token_s),
        prepared_s=short(outcome.prepared_s),
        queued_s=short(outcome.queued_s),
        prefill_s=short(outcome.prefill_s),
    )
