"""What a decision sees: workers and requests as plain values at one moment."""

from dataclasses import dataclass

from kimi_runtime.spec.worker import Role


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, for one request, now.

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
    cached_tokens: int = 0
    pool_tokens: int = 0

    @property
    def usable(self) -> bool:
        """Whether new work may go there at all."""
        return self.ready and not self.draining


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request. `session` names the conversation for rendezvous hashing, `owners` who had it."""

    prompt_tokens: int
    max_tokens: int
    session: bytes
    owners: tuple[str, ...] = ()
    grammar: bool = False
    logprobs: bool = False
