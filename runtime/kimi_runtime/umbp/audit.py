"""The pool's books: every page, block, pin and byte is accounted for once. Pure."""

from typing import TYPE_CHECKING

from kimi_connect.wire import Extent

if TYPE_CHECKING:
    from kimi_runtime.umbp.pool import Pool


def check(pool: "Pool") -> None:
    """AssertionError with what does not add up."""
    _pages(pool)
    _counts(pool)
    _tenants(pool)
    pool.retention.check_integrity()


def _pages(pool: "Pool") -> None:
    owner: dict[int, str] = {}
    gone = {id(b): b for p in pool._readers.pins.values() for b in p.blocks if b.gone}
    runs = [(Extent(*run), "free") for run in pool._shelf.pages.free_runs().items()]
    runs += [(e, "block") for b in pool._shelf.blocks.values() for e in b.extents]
    runs += [(e, "gone") for b in gone.values() for e in b.extents]
    runs += [(e, "reserved") for r in pool._reservations for e in r.extents]
    for (first, count), kind in runs:
        for page in range(first, first + count):
            assert page not in owner, f"page {page} is {owner[page]} and {kind}"
            owner[page] = kind
    assert len(owner) == pool.total_pages, f"{pool.total_pages - len(owner)} pages are lost"
    pins = sum(block.pins for block in (*pool._shelf.blocks.values(), *gone.values()))
    assert pins == sum(len(pinned.blocks) for pinned in pool._readers.pins.values())


def _counts(pool: "Pool") -> None:
    c = pool.counters
    assert c.put + c.adopted == len(pool._shelf.blocks) + c.evicted + c.corrupt + c.cleared
    assert pool.live_bytes == sum(block.size for block in pool._shelf.blocks.values())
    ended = c.put + c.duplicate + c.aborted + c.expired + c.writer_gone + c.revoked
    assert c.reserved + c.adopted_reservations == ended + len(pool._reservations)
    idle = list(pool._shelf.idle)
    assert pool._shelf.idle.pages == sum(block.pages for block in idle)
    assert all(not b.pins and pool._shelf.blocks[b.key] is b for b in idle)
    assert len(idle) == sum(not block.pins for block in pool._shelf.blocks.values())
    assert len(pool.feed) == len(pool._shelf.blocks)


def _tenants(pool: "Pool") -> None:
    used: dict[str, int] = {}
    gone = {id(b): b for p in pool._readers.pins.values() for b in p.blocks if b.gone}
    for block in (*pool._shelf.blocks.values(), *gone.values()):
        used[block.account.name] = used.get(block.account.name, 0) + block.pages
    for reservation in pool._reservations:
        name = reservation.account.name
        used[name] = used.get(name, 0) + reservation.pages
    assert used == {account.name: account.used_pages for account in pool.accounts}
    for account in pool.accounts:
        own = [b for b in pool._shelf.idle if b.account is account]
        assert account.idle_pages == sum(b.pages for b in own)
        quota = account.terms.quota_pages
        assert quota is None or account.used_pages <= quota
