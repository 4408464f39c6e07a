"""Workers as a decision sees them, for tests and benchmarks of routing."""

from typing import Any

from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.worker import Role


def worker(name: str, **fields: Any) -> WorkerView:
    """An idle worker with room for a million tokens, changed by `fields`."""
    usual: dict[str, Any] = {
        "role": Role.BOTH,
        "roles": tuple(Role),
        "revision": "r1",
        "layout": "fp8",
        "ready": True,
        "draining": False,
        "certain": True,
        "waiting": 0,
        "running": 0,
        "queued_tokens": 0,
        "free_blocks": 16_384,
        "total_blocks": 16_384,
        "block_tokens": 64,
        "max_context_tokens": 262_144,
        "grammar": True,
        "logprobs": True,
    }
    return WorkerView(**{"name": name, **usual, **fields})


def turn(**fields: Any) -> RequestView:
    """A turn in the middle of a session: 71k tokens of prompt."""
    usual: dict[str, Any] = {"prompt_tokens": 71_000, "max_tokens": 4096, "session": b"session"}
    return RequestView(**{**usual, **fields})
