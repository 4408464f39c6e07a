"""One admitted request on its way: session, sampling, job, answer; timed and noted."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from kimi_runtime import clock
from kimi_runtime.protocol.chat import Rendered
from kimi_runtime.router.admission import Slot
from kimi_runtime.router.estimate.outputs import Phase
from kimi_runtime.router.service import Router
from kimi_runtime.server.answer import Answer, OutputParser, Part
from kimi_runtime.server.asgi import Trace
from kimi_runtime.server.metrics import RouterMetrics
from kimi_runtime.server.openai_request import SharedFields
from kimi_runtime.server.prepare import (
    THINKING_TEMPERATURE,
    Limits,
    sampling_of,
    stops_of,
    urgency_of,
)
from kimi_runtime.spec.request import Grammar


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the tenant of its API key, its word for the conversation, the slot it holds."""

    tenant: str
    hint: str | None
    trace: Trace
    slot: Slot


@dataclass(frozen=True, slots=True)
class Ask:
    """A rendered prompt, and how its output is constrained and read."""

    rendered: Rendered
    parser: OutputParser
    grammar: Grammar | None = None
    grammar_required: bool = False
    banned_ids: tuple[int, ...] = ()
    temperature: float = THINKING_TEMPERATURE
    one_call: bool = False
    phase: Phase = Phase.FINAL


class Generations:
    """Opens answers for every endpoint. `stop_ids` end an output."""

    def __init__(self, router: Router, metrics: RouterMetrics, stop_ids: Sequence[int]) -> None:
        self._router, self._metrics, self._stop_ids = router, metrics, tuple(stop_ids)

    @asynccontextmanager
    async def open(self, wanted: SharedFields, caller: Caller, ask: Ask) -> AsyncIterator[Answer]:
        """An answer about to be planned; noted in log and metrics when the block ends."""
        router = self._router
        started_s = clock.now_s()
        turn = router.sessions.begin(caller.tenant, caller.hint, ask.rendered)
        if not turn.continues:
            caller.slot.starts_session()
        await router.parking.wait(tokens=len(turn.ids))
        sampling = sampling_of(
            wanted,
            default_temperature=ask.temperature,
            stop_ids=self._stop_ids,
            banned_ids=ask.banned_ids,
            prompt_tokens=len(turn.ids),
            limits=Limits(router.fleet.max_context_tokens, router.spec.default_max_tokens),
            vocabulary_size=router.vocabulary.size,
        )
        deadline_s = started_s + router.spec.request_deadline
        urgency, limit = urgency_of(wanted), sampling.max_tokens
        stops = stops_of(wanted)
        async with router.turns.taken(
            turn, max_tokens=limit, deadline_s=deadline_s, urgency=urgency, phase=ask.phase
        ) as place:
            job = router.job(
                turn,
                trace_id=caller.trace.id,
                sampling=sampling,
                grammar=ask.grammar,
                grammar_required=ask.grammar_required,
                urgency=urgency,
                phase=ask.phase,
                deadline_s=deadline_s,
            )
            answer = Answer(
                router=router,
                turn=turn,
                job=job,
                parser=ask.parser,
                stops=stops,
                pending=ask.rendered.pending,
                one_call=ask.one_call,
            )
            caller.trace.fields["admission_s"] = place.waited_s
            outcome = "left"
            try:
                yield answer
                outcome = "finished"
            except Exception:
                outcome = "failed"
                raise
            finally:
                if answer.completion_tokens:
                    first_s = job.journey.ttft_s
                    place.answered(answer.tools, outcome=outcome, first_token_s=first_s)
                self._note(answer, caller)
        router.admission.served(clock.now_s() - started_s)

    async def parts(self, answer: Answer) -> AsyncGenerator[Part, None]:
        """The answer's parts, timed."""
        last_s: float | None = None
        async with aclosing(answer.parts()) as parts:
            async for part in parts:
                now_s = clock.now_s()
                if last_s is not None:
                    self._metrics.chunk(now_s - last_s)
                last_s = now_s
                yield part

    def _note(self, answer: Answer, caller: Caller) -> None:
        journey, usage = answer.job.journey, answer.usage
        self._metrics.ended(journey, usage)
        caller.trace.fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "finish": answer.finish,
            "retries": journey.retries,
            "ttft_s": journey.ttft_s,
            "prefill_s": journey.prefill_s,
            "expected_s": journey.expected_s,
            "session": answer.turn.session.id.hex()[:12],
            "continues": answer.turn.continues,
        }
        if journey.plan is not None:
            caller.trace.fields |= {
                "mode": journey.plan.mode,
                "hand_off_failure": journey.decode_usage and journey.decode_usage.hand_off_failure,
                "workers": journey.tried,
                "terms": dict(journey.plan.terms),
                "considered": journey.plan.considered,
            }
