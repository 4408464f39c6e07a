"""What came of every simulated request. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request. Times are on the timeline; tokens of its prompt by where their KV came from.

    `cached_ideally` is what all sessions together had computed before: no cache could bring more.
    """

    session: str
    turn: int
    asked_s: float
    prompt_tokens: int
    appended_tokens: int
    tenant: str = "default"
    child: bool = False
    cached_ideally: int = 0
    mode: str = ""
    workers: tuple[str, ...] = ()
    scheduled_s: float | None = None
    """When the first worker's scheduler got it, all reads done."""
    computing_s: float | None = None
    """When the first step with it began."""
    first_s: float | None = None
    ended_s: float | None = None
    output_tokens: int = 0
    hbm_tokens: int = 0
    pool_tokens: int = 0
    peer_tokens: int = 0
    computed_tokens: int = 0
    hand_off_bytes: int = 0
    expected_s: float | None = None
    """What the policy expected until the first token."""
    terms: dict[str, float] = field(default_factory=dict)
    retries: int = 0
    deferred_s: float = 0.0
    aborted: bool = False
    refused: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds until the first token; None if it never came."""
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds until the last token; None if it never came."""
        return None if self.ended_s is None else self.ended_s - self.asked_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds between its tokens; None for one token or none."""
        if self.first_s is None or self.ended_s is None or self.output_tokens < 2:
            return None
        return (self.ended_s - self.first_s) / (self.output_tokens - 1)
