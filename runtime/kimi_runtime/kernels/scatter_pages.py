"""Scatter contiguous rows into pages of a block pool, in place.

    pool[page_ids[n]][offset : offset + width] = rows[n]      the last n of a repeated id wins

The other half of `gather_pages`: what was fetched from the pool or handed over lands in blocks.
A padded slot writes nowhere. Repeated ids are decided in the kernel (the row looks for its id
further on), since whichever program happened to write last would otherwise tear the page.
"""

from torch import Tensor

from kimi_runtime.kernels.lang import cdiv, require_contiguous, require_device, tl, triton
from kimi_runtime.kernels.page_words import check_span, page_words
from kimi_runtime.kernels.tuning import tiles


def scatter_pages_ref(pool: Tensor, page_ids: Tensor, rows: Tensor, *, offset: int = 0) -> None:
    """Write rows [N, width] into `pool` [P, ...] at `offset` elements of each flattened page.

    `page_ids` [N] int32 or int64: an id outside [0, P), -1 for instance, is a padded slot and is
    skipped; of several rows with one id the last is what the page holds afterwards. Everything
    outside the spans is untouched. Raises ValueError for a span outside the page.
    """
    size = check_span(pool, page_ids, offset, _width_of(page_ids, rows))
    require_contiguous(pool=pool)  # else the flattened pool is a copy
    spans = pool.flatten(1)[:, offset : offset + size]
    for row, page in zip(rows, page_ids.tolist(), strict=True):
        if 0 <= page < pool.shape[0]:
            spans[page].copy_(row)


@triton.jit
def _scatter_pages(
    pool_ptr,
    ids_ptr,
    rows_ptr,
    pages,
    page_words,
    offset,
    width,
    n_rows,
    TILE: tl.constexpr,
    TILE_IDS: tl.constexpr,
):
    row = tl.program_id(0)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    page = tl.load(ids_ptr + row).to(tl.int64)
    later = 0  # rows after this one that write the same page
    for start in range(row + 1, n_rows, TILE_IDS):
        slots = start + tl.arange(0, TILE_IDS)  # [TILE_IDS]
        ids = tl.load(ids_ptr + slots, mask=slots < n_rows, other=-1).to(tl.int64)
        later += tl.sum((ids == page).to(tl.int32), axis=0)
    words = tl.load(rows_ptr + row.to(tl.int64) * width + cols, mask=cols < width)  # [TILE]
    writable = tl.where((page >= 0) & (page < pages) & (later == 0), width, 0)
    # int64 before the multiply: page id * page_words passes 2**31 in a full pool
    target = pool_ptr + page * page_words + offset
    tl.store(target + cols, words, mask=cols < writable)


def scatter_pages(pool: Tensor, page_ids: Tensor, rows: Tensor, *, offset: int = 0) -> None:
    """Same contract as `scatter_pages_ref`, one launch, no host sync."""
    check_span(pool, page_ids, offset, _width_of(page_ids, rows))
    device = require_device(pool=pool, page_ids=page_ids, rows=rows)
    if not rows.numel():
        return
    words = page_words(pool, rows, page_ids, offset)
    tile = tiles("scatter_pages", device, words.width)
    _scatter_pages[(page_ids.numel(), cdiv(words.width, tile["TILE"]))](
        words.pool,
        page_ids,
        words.rows,
        pool.shape[0],
        words.page_words,
        words.offset,
        words.width,
        page_ids.numel(),
        **tile,
    )


def _width_of(page_ids: Tensor, rows: Tensor) -> int:
    if rows.dim() != 2 or rows.shape[0] != page_ids.numel():
        raise ValueError(
            f"rows are [{page_ids.numel()}, width], one per page id, not {tuple(rows.shape)}"
        )
    return int(rows.shape[1])
