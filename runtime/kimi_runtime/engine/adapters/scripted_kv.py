"""The KV of an engine without a model: real block keys in an LRU, tickets with leases, no bytes."""

from collections import OrderedDict

from kimi_runtime.spec.request import GenerateRequest, HandOff, HandOffBlock, KvUsage, RegionRef
from kimi_runtime.spec.worker import WorkerInfo
from kimi_runtime.umbp.feed import FeedLog
from kimi_runtime.umbp.keys import block_keys, root_key


class ScriptedKv:
    """Claims to hold the last `info.total_blocks` blocks used, and tells `feed`."""

    def __init__(
        self, info: WorkerInfo, feed: FeedLog, *, pool_key: bytes, lease_s: float, release_url: str
    ) -> None:
        self._info, self._feed, self._pool_key = info, feed, pool_key
        self._lease_s, self._release_url = lease_s, release_url
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._tickets: dict[str, float] = {}
        self._offered = 0

    def usage(self, request: GenerateRequest) -> KvUsage:
        """Where the prompt's KV comes from; the last token is always computed."""
        info, most = self._info, len(request.ids) - 1
        held = next((n for n, key in enumerate(self._keys(request)) if key not in self._held), None)
        full = len(request.ids) // info.block_tokens if held is None else held
        hbm = min(full * info.block_tokens, most)
        taken, hand_off = request.kv.take, 0
        if taken is not None and taken.layout == info.layout:
            hand_off = max(0, min(taken.tokens, most) - hbm)
        return KvUsage(
            hbm_tokens=hbm,
            hand_off_tokens=hand_off,
            computed_tokens=len(request.ids) - hbm - hand_off,
            hand_off_bytes=hand_off * info.block_bytes // info.block_tokens,
        )

    def keep(self, request: GenerateRequest) -> None:
        """The prompt's full blocks are held now; the coldest others are forgotten for them."""
        keys = self._keys(request)
        for key in reversed(keys):  # a chain is forgotten from its end
            self._held[key] = None
            self._held.move_to_end(key)
        self._feed.add(keys)
        while len(self._held) > self._info.total_blocks:
            self._feed.remove([self._held.popitem(last=False)[0]])

    def offer(self, request: GenerateRequest, *, now_s: float) -> HandOff:
        """A ticket for the prompt's KV, and blocks without bytes."""
        info, size = self._info, len(request.ids)
        self._offered += 1
        ticket = f"{info.name}-{info.epoch}-{self._offered}"
        self._tickets[ticket] = now_s + self._lease_s
        starts = range(0, size, info.block_tokens)
        return HandOff(
            ticket=ticket,
            worker=info.name,
            release_url=self._release_url,
            layout=info.layout,
            region=RegionRef(
                transport="scripted",
                peer=info.name,
                address="",
                key=self._offered,
                size_bytes=len(starts) * info.block_bytes,
                epoch=info.epoch,
            ),
            tokens=size,
            blocks=tuple(
                HandOffBlock(
                    key=None,
                    offset=number * info.block_bytes,
                    size_bytes=info.block_bytes,
                    tokens=min(info.block_tokens, size - start),
                    tags=(),
                )
                for number, start in enumerate(starts)
            ),
            lease_s=self._lease_s,
        )

    def release(self, ticket: str, *, now_s: float) -> bool:
        """False if the ticket is unknown, ended or past its lease."""
        expires_s = self._tickets.pop(ticket, None)
        return expires_s is not None and expires_s >= now_s

    def clear(self) -> None:
        """Forget every block and ticket."""
        self._held.clear()
        self._tickets.clear()
        self._feed.clear()

    def _keys(self, request: GenerateRequest) -> list[bytes]:
        info = self._info
        root = root_key(
            self._pool_key,
            model_digest=info.model_digest,
            layout=info.layout,
            adapter=request.adapter,
            tenant=request.tenant,
        )
        return block_keys(self._pool_key, root, request.ids, info.block_tokens)
