"""Coding agents drawn from published quantiles: contexts that grow, tools, people, subagents. Pure.

Sources of the defaults: TraceLab (4,265 sessions, 357k steps), vLLM's statistics of AgentX traces
(vllm#57103), and for P/D benchmarks their fixed lengths. Every session, and every kind of draw in
it, has its own stream of chance: another seed is another workload, another option changes only what
it names.
"""

from typing import Annotated

from annotated_types import Ge, Gt
from pydantic import Field, PositiveInt

from kimi_runtime.sim.chance import Chance, log_normal, log_uniform, stream
from kimi_runtime.sim.sessions import Pause, Session, Turn, Workload
from kimi_runtime.spec.base import SpecModel

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Gt(0)]
_TEXTS_PER_SESSION = 1 << 16
_PREFIXES = 1 << 40
"""Texts from here on are system prompts."""


class AgentMix(SpecModel):
    """What the sessions of coding agents are like. Tokens and seconds; log-normals by median."""

    turns_median: Positive = 33.0
    turns_sigma: float = 0.75
    turns_cap: PositiveInt = 150
    turns: PositiveInt | None = Field(None, description="Exactly so many; None: drawn.")
    prefix_tokens: Annotated[int, Ge(0)] = Field(20_000, description="System prompt and tools.")
    prefixes: PositiveInt = Field(1, description="Different system prompts, used by Zipf's law.")
    tenants: PositiveInt = 1
    first_median: Positive = 18_000.0
    first_sigma: float = 0.6
    append_median: Positive = 870.0
    append_sigma: float = 0.9
    long_share: Share = 0.07
    long_median: Positive = 9_000.0
    long_sigma: float = 0.8
    output_median: Positive = 220.0
    output_sigma: float = 1.1
    output_cap: PositiveInt = 16_384
    context_cap: PositiveInt = 200_000
    gap_cap_s: Positive | None = Field(None, description="Tool gaps are no longer; None: as is.")
    start_over_s: Annotated[float, Ge(0)] = Field(60.0, description="Starts are uniform over it.")
    human_share: Share = Field(0.0, description="Of turns, those a person answers.")
    human_median_s: Positive = 86.0
    human_sigma: float = 2.08
    subagent_share: Share = Field(0.0, description="Of sessions, those that start subagents.")
    subagents: PositiveInt = Field(4, description="In one burst, at most.")
    subagent_turns: PositiveInt = 6
    compaction_share: Share = Field(0.0, description="Of sessions, those that compact once.")
    compaction_keep: Share = 0.3
    parallel_share: Share = Field(0.0, description="Of turns, those that call several tools.")
    abort_share: Share = Field(0.0, description="Of turns, those whose client leaves.")

    def everything(self) -> "AgentMix":
        """The same with people, subagents, compaction, parallel calls, aborts and tenants."""
        more = {
            "human_share": 0.04,
            "subagent_share": 0.44,
            "compaction_share": 0.097,
            "parallel_share": 0.15,
            "abort_share": 0.03,
            "tenants": 8,
            "prefixes": 16,
        }
        return self.model_copy(update=more)


def agents(sessions: int, seed: int, mix: AgentMix, *, lanes: int | None = None) -> Workload:
    """So many sessions. With `lanes`, that many run at a time and start as others end."""
    made = tuple(_Drawing(seed, number, mix).session() for number in range(sessions))
    return Workload(f"agents-{sessions}-{seed}", made, lanes)


class _Drawing:
    """One session's streams."""

    def __init__(self, seed: int, number: int, mix: AgentMix) -> None:
        self._seed, self._number, self._mix = seed, number, mix
        self._text = (number + 1) * _TEXTS_PER_SESSION * 16
        self._appends, self._outputs = self._stream("append"), self._stream("output")
        self._gaps, self._events = self._stream("gap"), self._stream("event")
        self._children = 0

    def session(self) -> Session:
        mix, shape = self._mix, self._stream("shape")
        turns = mix.turns or min(
            max(round(log_normal(shape, mix.turns_median, mix.turns_sigma)), 1), mix.turns_cap
        )
        start_s = shape.uniform(0.0, mix.start_over_s)
        prefix = _zipf(shape, mix.prefixes)
        tenant = _zipf(shape, mix.tenants)
        first = round(log_normal(shape, mix.first_median, mix.first_sigma))
        bursts = shape.random() < mix.subagent_share
        bursts_at = shape.randrange(max(turns // 2, 1)) if bursts else None
        compacts = shape.random() < mix.compaction_share
        return Session(
            name=f"s{self._number}",
            text=self._text,
            turns=self._turns(turns, first, bursts_at, compacts=compacts),
            start_s=start_s,
            tenant=f"tenant-{tenant}" if mix.tenants > 1 else "default",
            prefix=_PREFIXES + prefix + 1024 * tenant,
            prefix_tokens=mix.prefix_tokens,
        )

    def _turns(
        self, count: int, first: int, bursts_at: int | None, *, compacts: bool
    ) -> tuple[Turn, ...]:
        mix, made = self._mix, []
        length = mix.prefix_tokens
        for number in range(count):
            append = max(first, 1) if number == 0 else self._append()
            output, keep = self._output(), None
            if length + append + output > mix.context_cap or (
                compacts and number and length > 64_000
            ):
                if not compacts and number:
                    break
                keep = max(round(mix.compaction_keep * length), mix.prefix_tokens)
                length, compacts = keep, False
                append = max(min(append, mix.context_cap - length - output), 1)
            children = self._burst(number) if number == bursts_at else ()
            made.append(self._turn(append, output, keep, children, last=number == count - 1))
            length += append + output
        if made:
            made[-1] = _last(made[-1])
        return tuple(made)

    def _turn(
        self,
        append: int,
        output: int,
        keep: int | None,
        children: tuple[Session, ...],
        *,
        last: bool,
    ) -> Turn:
        mix, chance = self._mix, self._events
        human = chance.random() < mix.human_share
        calls = chance.randint(2, 5) if chance.random() < mix.parallel_share else 1
        aborts = chance.random() < mix.abort_share
        cut = chance.randint(1, max(output - 1, 1))
        gaps = [self._gap() for _ in range(calls)]
        pause_s = max(gaps)
        if human:
            pause_s = log_normal(self._gaps, mix.human_median_s, mix.human_sigma)
        if mix.gap_cap_s is not None:
            pause_s = min(pause_s, mix.gap_cap_s)
        return Turn(
            append,
            output,
            Pause.END if last else Pause.HUMAN if human else Pause.TOOL,
            0.0 if last else pause_s,
            calls=calls,
            keep_tokens=keep,
            aborted_after=cut if aborts and output > 1 else None,
            children=children,
        )

    def _burst(self, turn: int) -> tuple[Session, ...]:
        mix, made = self._mix, []
        for number in range(self._events.randint(1, mix.subagents)):
            self._children += 1
            count = self._events.randint(1, mix.subagent_turns)
            first = round(log_normal(self._appends, 1_500.0, 0.5))
            made.append(
                Session(
                    name=f"s{self._number}.{turn}.{number}",
                    text=self._text + self._children * _TEXTS_PER_SESSION,
                    turns=self._turns(count, first, None, compacts=False),
                    child=True,
                )
            )
        return tuple(made)

    def _append(self) -> int:
        mix, chance = self._mix, self._appends
        long = chance.random() < mix.long_share
        median, sigma = mix.append_median, mix.append_sigma
        if long:
            median, sigma = mix.long_median, mix.long_sigma
        return max(round(log_normal(chance, median, sigma)), 1)

    def _output(self) -> int:
        mix = self._mix
        drawn = round(log_normal(self._outputs, mix.output_median, mix.output_sigma))
        return min(max(drawn, 1), mix.output_cap)

    def _gap(self) -> float:
        """TraceLab's bins: 61 % below 1 s, 27 % to 10 s, 8 % to 60 s, 4 % beyond."""
        chance = self._gaps
        draw = chance.random()
        if draw < 0.61:
            return chance.uniform(0.05, 1.0)
        if draw < 0.88:
            return log_uniform(chance, 1.0, 10.0)
        if draw < 0.96:
            return log_uniform(chance, 10.0, 60.0)
        return log_uniform(chance, 60.0, 420.0)

    def _stream(self, name: str) -> Chance:
        return stream(self._seed, "session", self._number, name)


def closed_loop(
    lanes: int, requests: int, seed: int, *, inputs: tuple[int, int], outputs: tuple[int, int]
) -> Workload:
    """Single requests of uniform lengths, `lanes` at a time: what serving benchmarks do.

    Lengths are spread evenly over their ranges and shuffled: few requests have the means of many.
    """
    chance = stream(seed, "closed loop")
    prompts = _spread(chance, requests, *inputs)
    answers = _spread(chance, requests, *outputs)
    sessions = tuple(
        Session(
            name=f"r{number}",
            text=(number + 1) * _TEXTS_PER_SESSION,
            turns=(Turn(prompts[number], answers[number], Pause.END),),
        )
        for number in range(requests)
    )
    return Workload(f"closed-{lanes}", sessions, lanes)


def _spread(chance: Chance, count: int, low: int, high: int) -> list[int]:
    values = [low + int((high - low + 1) * (number + 0.5) / count) for number in range(count)]
    chance.shuffle(values)
    return values


def _last(turn: Turn) -> Turn:
    """A session's last turn: nothing comes after it, so it waits for nobody."""
    return Turn(
        turn.append_tokens,
        turn.output_tokens,
        Pause.END,
        calls=turn.calls,
        keep_tokens=turn.keep_tokens,
        aborted_after=turn.aborted_after,
    )


def _zipf(chance: Chance, count: int) -> int:
    """A rank from 0, drawn by 1/rank."""
    draw = chance.random() * sum(1 / rank for rank in range(1, count + 1))
    for rank in range(1, count + 1):
        draw -= 1 / rank
        if draw <= 0:
            return rank - 1
    return count - 1
