"""What a decision sees: workers and requests as plain values at one moment."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kimi_runtime.router.estimate.outputs import Phase
from kimi_runtime.spec.umbp import TierName
from kimi_runtime.spec.worker import Role


class RequestClass(StrEnum):
    """How urgent a request is."""

    INTERACTIVE = "interactive"
    BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class KvSource:
    """Somebody whose memory a worker can read a front of this request's KV from.

    `checkpoints` are the positions (tokens, ascending) of state checkpoints there; None for models
    whose hits need none.
    """

    name: str
    node: str
    tier: TierName
    tokens: int
    checkpoints: tuple[int, ...] | None = None


class Line(NamedTuple):
    """Who has a worker's blocks, and who waits for them."""

    blocks: int
    """What there is for `waits`, and for whoever comes after them; below 0: others come first."""
    waits: tuple[tuple[int, float], ...] = ()
    """Blocks that a request takes when its turn comes, and for how many seconds; in their order."""
    releases: tuple[tuple[float, int], ...] = ()
    """In how many seconds, on average, how many blocks of those who run become free."""
    share: float = 1.0
    """Of a request's blocks, those that it does not share with one that runs."""


@dataclass(slots=True)
class WorkerView:
    """One worker, for one request, now. Nobody changes one: it is kept while nothing changes.

    It is not frozen, since a decision may make one of every worker: that would take 4 us each.

    `waiting`, `running` (requests) and `queued_tokens` (prompt tokens admitted, not yet computed)
    include what this router has sent and the worker has not reported yet. `cached_tokens` is the
    leading part of the request's prompt in the worker's own memory, `pool_tokens` the part its pool
    could bring; each is 0 where nothing is known.
    """

    name: str
    role: Role
    roles: tuple[Role, ...]
    """Everything its engine is able to do; `role` is what it is planned for."""
    revision: str
    layout: str
    ready: bool
    draining: bool
    certain: bool
    """False: the load is a guess, since the newest report is old or missing."""
    waiting: int
    running: int
    queued_tokens: int
    free_blocks: int
    total_blocks: int
    block_tokens: int
    max_context_tokens: int
    grammar: bool
    logprobs: bool
    transports: tuple[str, ...] = ()
    """Ways it hands KV over; empty: it does not say, and its like can."""
    cached_tokens: int = 0
    pool_tokens: int = 0
    kind: str = ""
    """Names the speeds of its model, GPUs and parallelism; "" is the deployment's default."""
    node: str = ""
    """The machine it is on; "" where nobody said."""
    age_s: float = 0.0
    """How old the newest report of its load is; 0 while it is as new as reports get."""
    max_running: int | None = None
    """Sequences it runs at once; None: as many as there is space for."""
    releases: tuple[tuple[float, int], ...] = ()
    """When (seconds from now, expected) how many blocks become free; ascending. Empty: unknown."""
    line: Line | None = None
    """Takes the place of `releases`. None: not told, or nobody waits and there is room."""
    utilisation: float | None = None
    """Share of its time that recent prefills took."""
    unused_blocks: int | None = None
    """Of `free_blocks`, those that hold nothing; None: unknown, so none is counted on."""
    space_price_s: float = 0.0
    """Seconds that taking one block which holds something costs others (`estimate.price`)."""
    checkpoints: tuple[int, ...] | None = None
    """Like `KvSource.checkpoints`, in its own memory."""
    fetches: bool = False
    """Whether it can be told which peer to read KV from; its own pool it always uses."""
    reads_pools: bool = True
    """Whether the pools of other nodes are within its reach, by itself or through its own pool."""
    streams: int = 1
    """Layer groups that reading and computing, or computing and hand-off, overlap in; 1: none."""
    queued_depth: float | None = None
    """Where in their contexts the queued tokens are, on average; None: nobody knows."""

    @property
    def usable(self) -> bool:
        """Whether new work may go there at all."""
        return self.ready and not self.draining


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request. `session` names the conversation for rendezvous hashing, `owners` who had it.

    `sources` are places outside the workers' own memories to fetch KV from; where there are none,
    or a worker cannot reach them, its `pool_tokens` stand for one.
    """

    prompt_tokens: int
    max_tokens: int
    session: bytes
    owners: tuple[str, ...] = ()
    grammar: bool = False
    logprobs: bool = False
    tenant: str = ""
    urgency: RequestClass = RequestClass.INTERACTIVE
    starts_session: bool = False
    phase: Phase = Phase.TOOL
    moved_ago_s: float | None = None
    """Seconds since its session last left an owner; None: never."""
    sources: tuple[KvSource, ...] = ()
    shared_tokens: int = 0
    """The front of the prompt that other sessions have too."""
    shared_per_s: float = 0.0
    """Requests per second that start with it."""
    shared_holders: int = 0
    """Workers that hold it."""
    shared_busy: float = 0.0
    """Share of their time that those are busy: what they could not serve at once."""
