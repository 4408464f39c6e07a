"""Blocks that are read where they lie, under a pin that their reader gives back."""

from collections.abc import Callable, Sequence

from kimi_connect import payloads
from kimi_connect.wire import Op, Outcome

OfPin = Callable[[Op, bytes, float], bool]
"""(UNPIN or RENEW, payload, seconds) -> whether the pin still held."""


class Borrowed:
    """The leading run of what was asked for, block by block the parts it lies in, read-only.

    `outcome` says why the run ended. The pin lasts `lease_s` after each `renew`. Call `give_back`
    once nothing reads the parts any more: only if it returns True is what was read from them the
    blocks' content. As a context manager it is given back at the end.
    """

    def __init__(
        self,
        of_pin: "OfPin | None",
        pin: int,
        parts: "list[list[memoryview]]",
        outcome: Outcome,
        lease_s: float,
    ) -> None:
        self.parts: Sequence[Sequence[memoryview]] = parts
        self.outcome, self.lease_s = outcome, lease_s
        self._of_pin, self._pin = of_pin, pin

    def __enter__(self) -> "Borrowed":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def renew(self, *, within_s: float = 0.25) -> bool:
        """Let the pin last for another lease from now; False if it has ended."""
        if self._of_pin is None:
            return False
        return self._of_pin(Op.RENEW, payloads.pack_number(self._pin), within_s)

    def give_back(self, *, within_s: float = 0.25) -> bool:
        """End the pin; False if it ended before, or where the daemon can't be asked."""
        of_pin, self._of_pin = self._of_pin, None
        if of_pin is None:
            return not self.parts
        corrupt = self.outcome is Outcome.CORRUPT
        payload = payloads.pack_unpin(self._pin, len(self.parts), corrupt=corrupt)
        return of_pin(Op.UNPIN, payload, within_s)
