"""What came of a decision, told to the estimators it was made with. Pure.

The router and the simulator report the same things: when a prefill ran and how long, what was found
of what was predicted, when transfers ended, how long answers became. What a worker does not tell is
left None and teaches nothing.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kimi_runtime.router.plan import Fetch
from kimi_runtime.spec.umbp import TierName

if TYPE_CHECKING:
    from kimi_runtime.router.cost.planner import Decided, Planner


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request up to its first token, in seconds since it was decided on.

    `queued_s` is until its prefill began, `prefill_s` how long that ran, `new_tokens` what it
    computed after `cached_tokens` that it did not. Of what was predicted to be there,
    `found_tokens` were.
    """

    after_s: float
    queued_s: float | None = None
    prefill_s: float | None = None
    new_tokens: int | None = None
    cached_tokens: int = 0
    found_tokens: int | None = None
    tier: TierName = "hbm"
    kind: str = ""
    """Of the worker that prefilled."""


class Learning:
    """Teaches a planner's models."""

    def __init__(self, planner: "Planner") -> None:
        self._planner = planner

    def first_token(self, decided: "Decided", real: FirstToken, *, now_s: float) -> None:
        """A decided request gave its first token."""
        models, chosen = self._planner.models, decided.explanation.chosen
        worker = chosen.prefill or chosen.decode
        models.came_true(
            chosen.mode,
            expected_s=chosen.terms.first_token_s,
            sd_s=math.sqrt(chosen.first_token_var),
            actual_s=real.after_s,
        )
        models.usual.observe(chosen.terms.prefill)
        if real.queued_s is not None:
            # steps are shared: what its own steps took longer than expected is of who was before it
            shared_s = 0.0 if real.prefill_s is None else real.prefill_s - chosen.terms.prefill
            waited_s = max(real.queued_s + shared_s, 0.0)
            models.queues.observe(worker, expected_s=decided.work_s, waited_s=waited_s)
        if real.found_tokens is not None:
            models.hits.observe(
                worker, real.tier, predicted=chosen.cached_tokens, found=real.found_tokens
            )
        if real.prefill_s is not None and real.new_tokens:
            models.speeds(real.kind).prefilled(
                worker, real.new_tokens, real.cached_tokens, real.prefill_s, now_s=now_s
            )

    def transferred(self, name: str, transfer: Fetch, seconds: float, *, now_s: float) -> None:
        """A committed plan's transfer ended: `name` as in `Planner.commit`, with its suffix."""
        planner = self._planner
        flow = planner.flows.end(name, now_s=now_s)
        sharing = 1.0 if flow is None else planner.flows.sharing(flow, now_s=now_s)
        rates = planner.models.links
        spans = [(link, rates.of(link, now_s=now_s)) for link in transfer.links]
        known = [(rate.per_byte_s, link) for link, rate in spans if rate is not None]
        if known:  # the slowest link set the pace, and only of it was anything learned
            rates.observe(max(known)[1], transfer.size_bytes, seconds, sharing=sharing, now_s=now_s)

    def stepped(
        self, kind: str, worker: str, *, rows: int, kv_tokens: int, seconds: float, now_s: float
    ) -> None:
        """A worker ran a decode step without prefill."""
        speeds = self._planner.models.speeds(kind)
        speeds.stepped(worker, rows, kv_tokens, seconds, now_s=now_s)

    def finished(self, decided: "Decided", output_tokens: int, *, cut: bool = False) -> None:
        """The answer is complete; `cut`: by a limit or its reader, so it would have gone on."""
        request = decided.explanation.request
        self._planner.models.outputs.observe(request.session, request.phase, output_tokens, cut=cut)

    def given_up(self, name: str, *, now_s: float) -> None:
        """The request failed or was cancelled: its transfers take no share any more."""
        for suffix in ("fetch", "hand_off"):
            self._planner.flows.end(f"{name}.{suffix}", now_s=now_s)
