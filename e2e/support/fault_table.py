"""What a fault cost, as rows of a table: requests, errors by kind, waits, wrong answers, leaks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kimi_runtime.bench.replay.outcome import Outcome

Turn = tuple[str, int]
Answer = tuple[str, str | None, int]
"""Its text, why it ended, and how many tokens the endpoint says it has."""


def answer_of(outcome: Outcome) -> Answer:
    """What is compared: whole answers are equal in all of it."""
    return outcome.text, outcome.finish, outcome.output_tokens


def answers_of(outcomes: Sequence[Outcome]) -> dict[Turn, Answer]:
    """Of turns that were answered to their end."""
    return {(one.session, one.turn): answer_of(one) for one in outcomes if one.ok}


def wrong_of(outcomes: Sequence[Outcome], expected: Mapping[Turn, Answer]) -> list[Turn]:
    """Turns with a token that is not the expected one: also of answers that were cut."""
    return [
        (one.session, one.turn)
        for one in outcomes
        if (
            expected[one.session, one.turn] != answer_of(one)
            if one.ok
            else not _front(one, expected)
        )
    ]


def _front(cut: Outcome, expected: Mapping[Turn, Answer]) -> bool:
    return expected[cut.session, cut.turn][0].startswith(cut.text)


def kind_of(outcome: Outcome) -> str:
    """How a request failed."""
    if outcome.status is None:
        return "no connection"
    if outcome.status != 200:
        return f"HTTP {outcome.status}"
    after = "before its first token" if outcome.first_s is None else "after its first token"
    if "within the stream" in (outcome.error or ""):
        return f"error told {after}"
    if "without a finish" in (outcome.error or ""):
        return f"ended without a word {after}"
    return f"connection cut {after}"


def awaited(outcome: Outcome, wait: int) -> str:
    """What came at the end of one of its waits."""
    if wait == len(outcome.chunk_s):
        return "to the end" if outcome.ok else "to the error"
    return "between tokens" if wait else "to the first token"


@dataclass
class Row:
    """One fault."""

    fault: str
    outcomes: list[Outcome] = field(default_factory=list)
    """While it happened. Times are seconds of this play."""
    later: list[Outcome] = field(default_factory=list)
    """Of the turns after it, with times of their own."""
    in_flight: float = 0
    """Requests at the process when it happened."""
    away_s: float = 0.0
    """From the fault until the process was ready again."""
    retried: float = 0
    """Attempts of the router after its first ones."""
    wrong: list[Turn] = field(default_factory=list)
    leaks: dict[str, float] = field(default_factory=dict)
    unanswered: int = 0
    """Turns that were never answered, though asked again."""
    quiet_s: float = 0.0
    """From the last answer until nothing was held for it any more."""

    @property
    def all(self) -> list[Outcome]:
        """Every request."""
        return [*self.outcomes, *self.later]

    @property
    def errors(self) -> Counter[str]:
        """Failed attempts by kind."""
        return Counter(kind_of(one) for one in self.all if not one.ok)

    @property
    def worst_wait(self) -> tuple[float, str]:
        """The longest time in seconds for which nothing came of a request, and what came then."""
        waits = [
            (end - start, awaited(one, number))
            for one in self.all
            for number, (start, end) in enumerate(one.waits)
        ]
        return max(waits, default=(0.0, ""))

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table has it."""
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(self.errors.items()))
        asked_again = sum(one.attempt > 0 for one in self.all)
        leaks = ", ".join(f"{what} {count:g}" for what, count in self.leaks.items())
        wait_s, came = self.worst_wait
        return (
            *(self.fault, f"{self.in_flight:g}", f"{self.away_s:.1f} s"),
            *(str(len(self.all)), told or "none", f"{self.retried:g}", str(asked_again)),
            *(f"{wait_s:.1f} s {came}", str(len(self.wrong))),
            *(leaks or "none", f"{self.quiet_s:.1f} s"),
        )


HEAD = (
    *("fault", "in flight", "away", "requests", "failed", "retried by the router"),
    *("asked again", "longest wait", "wrong tokens", "leaked", "quiet after"),
)


def table(rows: Sequence[Row]) -> str:
    """All of them, in markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
