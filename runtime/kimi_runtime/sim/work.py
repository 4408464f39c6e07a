"""One request at one simulated worker, and what is to be read for it first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kimi_runtime.engine.request import Fetched, Request
from kimi_runtime.engine.room import Place
from kimi_runtime.sim.links import Transfer
from kimi_runtime.sim.timeline import Timer


@dataclass(slots=True)
class Read:
    """Blocks to bring in before computing: those after the ones that are here.

    `hold` says how many of the keys the source still has and keeps them there until `release`;
    it may be asked again after that. `tail`: the partial block after the last full one comes too (a
    hand-off, which is held until all is read).
    """

    source: Fetched
    links: tuple[str, ...]
    hold: Callable[[Sequence[bytes]], int]
    release: Callable[[], None]
    until: int = 1 << 30
    """Block of the prompt at which to stop."""
    tail: bool = False
    count: int = 0
    """What the source has of it."""


@dataclass(slots=True, eq=False)
class Work:
    """`output_tokens` 0: only the prompt is computed, and held until `leave`.

    `began` is called when the first token, or the computed prompt, is there; `ended` with the last
    token.
    """

    request: Request
    output_tokens: int
    began: Callable[[], None]
    ended: Callable[[], None]
    read: Read | None = None
    made: int = 0
    scheduled_s: float | None = None
    computing_s: float | None = None
    """When the first step with it began."""
    left: bool = False
    place: Place | None = None
    """In the line for room to read into."""
    room_until_s: float | None = None
    """Until when it waits for room, all its reads together."""
    blocks: list[int] = field(default_factory=list)
    """Reserved for what is being read."""
    transfer: Transfer | None = None
    deadline: Timer | None = None
    read_s: float = 0.0
    """How long reads took."""
    ssd_until_s: float | None = None
    """Until when it waits for what the pool has on SSD."""
