"""The summands of a plan's cost, in seconds; names as the routing literature and the docs use them.

`J = T_first + stream + e_queue + e_decode + e_evict + e_link - replicate`, then `risk` and `move`.
"""

from typing import NamedTuple

from kimi_runtime.router.plan import Mode


class Terms(NamedTuple):
    """T_first is the sum of `queue` to `first_step`; `e_*` are the delays of others."""

    queue: float = 0.0
    """Until the prefilling worker begins: work before us, or no room for us."""
    fetch: float = 0.0
    """Beyond the queue, until what is read from elsewhere is there; what overlaps is left out."""
    prefill: float = 0.0
    """Computing, decode steps of others in between included."""
    room: float = 0.0
    """Beyond all that, until the decoding worker has space and a slot."""
    hand_off: float = 0.0
    """What remains of it after prefill and that wait."""
    first_step: float = 0.0
    stream: float = 0.0
    """The answer's tokens times the time between them, weighted."""
    e_queue: float = 0.0
    """Requests that come later wait for this one."""
    e_decode: float = 0.0
    """Running answers that prefill interrupts, or that share their steps with one more."""
    e_evict: float = 0.0
    """Reloads of what has to make room."""
    e_link: float = 0.0
    """Transfers that share their links with one more."""
    replicate: float = 0.0
    """Minus what a further copy of a shared prefix will save."""
    risk: float = 0.0
    """From the mean to the quantile that the request's urgency asks for."""
    move: float = 0.0
    """Leaving the session's owner."""

    @property
    def first_token_s(self) -> float:
        """Until the first token."""
        return self.queue + self.fetch + self.prefill + self.room + self.hand_off + self.first_step


class Candidate(NamedTuple):
    """One plan that was priced: enough to see why it won or lost."""

    mode: Mode
    prefill: str | None
    decode: str
    source: str | None
    cached_tokens: int
    """Of the prompt, those that the prefilling worker does not compute."""
    cost_s: float
    terms: Terms
    first_token_var: float
