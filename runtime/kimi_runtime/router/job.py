"""A prompt on its way to workers, and what happens to it there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kimi_runtime.router.estimate.outputs import Phase
from kimi_runtime.router.insight import Front
from kimi_runtime.router.plan import Plan
from kimi_runtime.router.sessions import Geometry
from kimi_runtime.router.view import RequestClass, RequestView, WorkerView
from kimi_runtime.spec.request import Grammar, KvUsage, Sampling


@dataclass(slots=True)
class Journey:
    """What happened to a request, filled in as it happens; for its log line, metrics and usage."""

    plan: Plan | None = None
    prefill_usage: KvUsage | None = None
    decode_usage: KvUsage | None = None
    retries: int = 0
    prefill_s: float | None = None
    ttft_s: float | None = None
    expected_s: float | None = None
    """Of the last decision: what it predicted of `served_s`; None if it predicts nothing."""
    served_s: float | None = None
    """From the last decision to the first token."""
    tried: list[str] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was there before: neither computed nor handed over from there."""
        usage = self.prefill_usage or self.decode_usage
        return 0 if usage is None else usage.hbm_tokens + usage.pool_tokens


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt on its way to workers."""

    trace_id: str
    tenant: str
    ids: tuple[int, ...]
    sampling: Sampling
    grammar: Grammar | None
    grammar_required: bool
    """False: the grammar is a help, and a worker that knows none may serve without it."""
    session: bytes
    owners: tuple[str, ...]
    keys: Mapping[Geometry, Sequence[bytes]]
    deadline_s: float
    """On our clock."""
    retry_window_s: float = 0.0
    """How long to wait for a worker where none can take it but one may come."""
    starts_session: bool = False
    urgency: RequestClass = RequestClass.INTERACTIVE
    phase: Phase = Phase.TOOL
    moved_s: float | None = None
    """When its session last left an owner, on our clock."""
    fronts: tuple[Front, ...] = ()
    """What other sessions may have in common with it, shortest first."""
    journey: Journey = field(default_factory=Journey)

    def view(self, *, now_s: float) -> RequestView:
        """The job as a decision sees it."""
        return RequestView(
            prompt_tokens=len(self.ids),
            max_tokens=self.sampling.max_tokens,
            session=self.session,
            owners=self.owners,
            grammar=self.grammar_required,
            logprobs=self.sampling.logprobs is not None,
            tenant=self.tenant,
            urgency=self.urgency,
            starts_session=self.starts_session,
            phase=self.phase,
            moved_ago_s=None if self.moved_s is None else max(now_s - self.moved_s, 0.0),
        )


Look = Callable[[Job, float], tuple[RequestView, list[WorkerView]]]
"""A job and the workers as of now."""
