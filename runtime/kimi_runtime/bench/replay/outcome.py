"""What came of one request of a replay."""

from dataclasses import dataclass, field
from itertools import pairwise

REFUSED_FOR_NOW = (408, 409, 429)
"""Statuses below 500 after which OpenAI's own clients ask again."""


@dataclass(slots=True)
class Outcome:
    """Times are seconds since the replay began; tokens are what the endpoint said it used."""

    session: str
    turn: int
    asked_s: float
    first_s: float | None = None
    ended_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    """As far as it came."""
    finish: str | None = None
    aborted: bool = False
    error: str | None = None
    attempt: int = 0
    """Of the same turn, which was asked before if this is not 0."""
    status: int | None = None
    """None: there was no answer."""
    retry_after_s: float | None = None
    """When the endpoint says that asking again may help."""
    chunk_s: list[float] = field(default_factory=list)
    """When each part of the answer came."""

    @property
    def ok(self) -> bool:
        """Whether it was answered to its end, or left by its client as planned."""
        return self.error is None and (self.finish is not None or self.aborted)

    @property
    def passing(self) -> bool:
        """Whether it failed in a way that asking again may mend."""
        refused = self.status is not None and 400 <= self.status < 500
        return not self.ok and (not refused or self.status in REFUSED_FOR_NOW)

    @property
    def waits(self) -> list[tuple[float, float]]:
        """When the client waited: from when to when, between all that came of the request."""
        events = [self.asked_s, *self.chunk_s]
        if self.ended_s is not None:
            events.append(self.ended_s)
        return list(pairwise(events))

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first part of the answer; None if it never came."""
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds until the answer's end; None if it never came."""
        return None if self.ended_s is None else self.ended_s - self.asked_s
