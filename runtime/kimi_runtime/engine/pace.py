"""How fast this engine computes prompts, from the steps it has computed. Pure.

A step's prompt rows of n tokens after m take `token * n + pair * n * (m + n/2)` seconds together,
fitted by least squares with exponentially fading weights. What other rows of the same step cost is
in it: that is how fast a prompt is computed beside them.
"""

from collections.abc import Iterable

FADING = 0.95
MIN_TOKENS = 64
"""Smaller steps say more about a step's fixed cost than about prompts."""


class PrefillPace:
    """Unknown until a step was seen that is mostly prompt."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def step(self, rows: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step computed rows (tokens before, new tokens) in so long."""
        tokens = prompt = 0
        pairs = 0.0
        for before, new in rows:
            tokens += new
            prompt += new if new > 1 else 0
            pairs += new * (before + new / 2)
        if prompt < MIN_TOKENS or 2 * prompt < tokens or seconds <= 0:
            return
        # relative errors count: a short step says as much as a long one
        x, y = 1.0, pairs / tokens
        per_token_s = seconds / tokens
        new_sums = (x, y, y * y, per_token_s, y * per_token_s)
        scale = 1 / per_token_s**2
        self._sums = [
            FADING * one + scale * more for one, more in zip(self._sums, new_sums, strict=True)
        ]

    def seconds(self, tokens: int, before: int) -> float | None:
        """To compute so many tokens after `before`; None: no prompt was computed yet."""
        weight, y, yy, s, ys = self._sums
        if not weight:
            return None
        spread = weight * yy - y * y
        pair_s = (weight * ys - y * s) / spread if spread > 1e-6 * weight * yy else 0.0
        token_s = (s - pair_s * y) / weight
        if token_s < 0:  # what is left of a bad fit is the better half of it
            token_s, pair_s = 0.0, ys / yy
        elif pair_s < 0:
            token_s, pair_s = s / weight, 0.0
        return token_s * tokens + pair_s * tokens * (before + tokens / 2)
