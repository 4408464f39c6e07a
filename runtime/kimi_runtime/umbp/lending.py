"""Reading blocks where they lie: pinned, checked in place, given back by who reads them.

For who would only copy once more: a device that reads host memory, or a peer's transport. The pin
is renewed until it is given back, and giving it back says whether it held all the time.
"""

import asyncio

from kimi_connect import payloads
from kimi_connect.wire import Op, Outcome, WireError
from kimi_runtime.umbp.link import Link, LinkLost


class Lent:
    """The leading run of what was asked for, block by block the parts it lies in, read-only.

    `outcome` says why the run ended. Call `give_back` once nothing reads the parts any more: only
    if it returns True is what was read from them the blocks' content.
    """

    def __init__(
        self, link: Link | None, pin: int, parts: list[list[memoryview]], outcome: Outcome
    ) -> None:
        self.parts, self.outcome = parts, outcome
        self._link, self._pin = link, pin
        self._corrupt = outcome is Outcome.CORRUPT
        self._renewal: asyncio.TimerHandle | None = None
        self._renew_later()

    async def give_back(self, *, within_s: float = 0.25) -> bool:
        """End the pin; False also where the daemon can't be asked."""
        if self._renewal is not None:
            self._renewal.cancel()
        link, self._link = self._link, None
        if link is None:
            return not self.parts
        payload = payloads.pack_unpin(self._pin, len(self.parts), corrupt=self._corrupt)
        try:
            answer = await link.call(Op.UNPIN, payload, within_s=within_s)
            return answer.op is Op.COUNT and payloads.unpack_number(answer.payload) == 1
        except (LinkLost, TimeoutError, WireError):
            return False

    def _renew_later(self) -> None:
        if self._link is None or self._link.lost:
            return
        every_s = self._link.pin_lease_s / 3
        self._renewal = asyncio.get_running_loop().call_later(every_s, self._renew)

    def _renew(self) -> None:
        if self._link is not None:
            self._link.tell(Op.RENEW, payloads.pack_number(self._pin))
            self._renew_later()
