"""What is offered to peers, to whom, and in which order. Pure.

What a block saves is told in seconds a byte, as in `retention`; an offered block is priced as lost
everywhere, so that to have it again is to compute it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kimi_runtime.spec.peers import MAX_LEND_KEYS, OfferedBlock, OfferFate
from kimi_runtime.umbp.records import Block
from kimi_runtime.umbp.retention import Retention

BATCH_BYTES = 16 << 20
FAILURES = 2
"""So many offers in a row that fail, and a peer is offered nothing more."""

LISTED_IDLE_S = 600.0
LISTED_USES = 2
"""What blocks on SSD alone count as, of which nobody knows: they were worth writing once."""


def offered(
    block: Block, retention: Retention, seconds_per_byte: float, now_s: float
) -> OfferedBlock:
    """A block in memory, at what it saves wherever it goes."""
    wanted = retention.wanted(
        *(block.key,),
        uses=block.uses,
        used_s=block.used_s,
        priority=block.priority,
        now_s=now_s,
    )
    return OfferedBlock(
        key=block.key.hex(),
        size=block.size,
        worth=wanted * seconds_per_byte,
        uses=block.uses,
        idle_ms=max(0, int(1e3 * (now_s - block.used_s))),
        tenant=block.account.name,
        priority=int(block.priority),
    )


def offered_listed(
    key: bytes, size: int, retention: Retention, seconds_per_byte: float, now_s: float
) -> OfferedBlock:
    """A block on SSD alone, of which only its sessions are known."""
    used_s = now_s - LISTED_IDLE_S
    wanted = retention.wanted(key, uses=LISTED_USES, used_s=used_s, priority=1, now_s=now_s)
    return OfferedBlock(
        key=key.hex(),
        size=size,
        worth=wanted * seconds_per_byte,
        uses=LISTED_USES,
        idle_ms=int(1e3 * LISTED_IDLE_S),
    )


@dataclass(slots=True)
class _Peer:
    refused: set[str] = field(default_factory=set)
    """Keys."""
    failures: int = 0
    gone: bool = False


class OfferQueue:
    """Blocks waiting to be offered, best first: each to one peer at a time, to every peer once."""

    def __init__(self, blocks: Iterable[OfferedBlock], peers: Iterable[str]) -> None:
        """Of equal worth the order of `blocks` stays: give a run's head before its end."""
        ordered = sorted(blocks, key=lambda block: -block.worth)
        worthy = ((block.key, block) for block in ordered if block.worth > 0)
        self._waiting = OrderedDict[str, OfferedBlock](worthy)
        self.kept: dict[str, OfferedBlock] = {}
        self.kept_bytes = 0
        """Bytes that peers took; what they had already is kept without."""
        self.gone = len(ordered) - len(self._waiting)
        """Blocks that are worth nothing, or that were evicted before anybody took them."""
        self._offered: dict[str, OfferedBlock] = {}
        self._peers = {name: _Peer() for name in peers}

    def batch(self, peer: str) -> list[OfferedBlock]:
        """What to offer a peer next; none: nothing is left for it now."""
        told, batch, size = self._peers[peer], list[OfferedBlock](), 0
        if told.gone:
            return batch
        for block in self._waiting.values():
            if block.key in told.refused:
                continue
            size += block.size
            if batch and (size > BATCH_BYTES or len(batch) == MAX_LEND_KEYS):
                break
            batch.append(block)
        for block in batch:
            self._offered[block.key] = self._waiting.pop(block.key)
        return batch

    def answered(
        self, peer: str, batch: Sequence[OfferedBlock], fates: Sequence[OfferFate]
    ) -> bool:
        """What became of a batch; False: the peer is busy, offer it something later.

        ValueError unless each block has a fate. A peer that had no room for any of it is offered
        nothing more: what follows is worth less.
        """
        told = self._peers[peer]
        if len(fates) != len(batch):
            raise ValueError(f"{peer} was offered {len(batch)} blocks and answers {len(fates)}")
        for block, fate in list(zip(batch, fates, strict=True))[::-1]:
            del self._offered[block.key]
            if fate in ("taken", "held"):
                self.kept[block.key] = block
                self.kept_bytes += block.size if fate == "taken" else 0
            elif fate == "absent":
                self.gone += 1
            else:
                self._wait(block)
                if fate != "busy":
                    told.refused.add(block.key)
        told.failures = 0
        told.gone |= set(fates) in ({"no_room"}, {"closed"})
        return "busy" not in fates

    def failed(self, peer: str, batch: Sequence[OfferedBlock]) -> None:
        """A batch came back without an answer: perhaps the peer has it, perhaps not."""
        told = self._peers[peer]
        for block in reversed(batch):
            del self._offered[block.key]
            self._wait(block)
        told.failures += 1
        told.gone |= told.failures >= FAILURES

    def wanted_by(self) -> Iterator[str]:
        """Peers for which something is left."""
        for name, told in self._peers.items():
            if not told.gone and any(key not in told.refused for key in self._waiting):
                yield name

    def refused(self) -> int:
        """Blocks that every peer has said no to."""
        return sum(
            all(told.gone or key in told.refused for told in self._peers.values())
            for key in self._waiting
        )

    def left(self) -> int:
        """Blocks that have no place yet, offers under way included."""
        return len(self._waiting) + len(self._offered)

    def _wait(self, block: OfferedBlock) -> None:
        """Back to the front, where it was."""
        self._waiting[block.key] = block
        self._waiting.move_to_end(block.key, last=False)
