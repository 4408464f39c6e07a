"""What came of one request of a replay."""

from dataclasses import dataclass, field


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
    finish: str | None = None
    aborted: bool = False
    error: str | None = None
    chunk_s: list[float] = field(default_factory=list)
    """When each part of the answer came."""

    @property
    def ok(self) -> bool:
        """Whether it was answered to its end, or left by its client as planned."""
        return self.error is None and (self.finish is not None or self.aborted)

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first part of the answer; None if it never came."""
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds until the answer's end; None if it never came."""
        return None if self.ended_s is None else self.ended_s - self.asked_s
