"""The service that other daemons call."""

from collections.abc import Callable

from kimi_runtime.errors import RequestError, Unavailable
from kimi_runtime.umbp.proto import peers_pb2 as wire
from kimi_runtime.umbp.remote.messages import (
    give_back_request,
    lend_request,
    lent_message,
    offer_request,
)
from kimi_runtime.umbp.remote.service import Remote
from kimi_runtime.umbp.rpc.methods import GIVE_BACK, LEND, OFFER
from kimi_runtime.umbp.rpc.server import RpcServer


class PeerService:
    """Lends, takes back and considers offers. `remote` is asked for at every call.

    It raises Unavailable as long as the daemon can't answer, and returns None where it never will.
    """

    def __init__(self, remote: Callable[[], Remote | None]) -> None:
        self._remote = remote

    def add_to(self, server: RpcServer) -> None:
        """Answer through `server`."""
        server.unary(LEND, self.lend)
        server.unary(GIVE_BACK, self.give_back)
        server.unary(OFFER, self.offer)

    async def lend(self, message: wire.LendRequest) -> wire.LendAnswer:
        """Pin blocks for a peer that copies them."""
        remote = self._known()
        try:
            asked = lend_request(message)
        except ValueError as exc:
            raise RequestError(f"no loan can be made of this: {exc}") from exc
        return lent_message(await remote.lender.lend(asked))

    async def give_back(self, message: wire.GiveBackRequest) -> wire.GiveBackAnswer:
        """End such a pin."""
        answer = await self._known().lender.give_back(give_back_request(message))
        return wire.GiveBackAnswer(held=answer.held)

    async def offer(self, message: wire.OfferRequest) -> wire.OfferAnswer:
        """Take blocks of a peer, if they are worth it."""
        taker = self._known().taker
        if taker is None:
            raise Unavailable("this daemon takes no offers")
        try:
            asked = offer_request(message)
        except ValueError as exc:
            raise RequestError(f"this is no offer: {exc}") from exc
        return wire.OfferAnswer(fates=(await taker.offer(asked)).fates)

    def _known(self) -> Remote:
        remote = self._remote()
        if remote is None:
            raise Unavailable("this daemon lends nothing: it has no peers (peers, peers_file)")
        return remote
