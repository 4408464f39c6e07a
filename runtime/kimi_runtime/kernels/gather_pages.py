"""Gather pages of a block pool into contiguous memory.

    out[n] = pool[page_ids[n]][offset : offset + width]      0 where page_ids[n] names no page

Used to stage blocks for the pool and for hand-off: a layer group of a block is a span of its page.
Offsets are int64 (int32 ones overflow once a pool passes 2 GiB: aiter#4774), and rows of padded
slots are written, not left as they were (ATOM#1719).
"""

from torch import Tensor

from kimi_runtime.kernels.lang import cdiv, require_device, tl, triton
from kimi_runtime.kernels.page_words import check_span, page_words
from kimi_runtime.kernels.tuning import tiles


def gather_pages_ref(
    pool: Tensor,
    page_ids: Tensor,
    *,
    offset: int = 0,
    width: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The spans of pages, one after another.

    pool [P, ...] of any dtype, contiguous; page_ids [N] int32 or int64; the span is `width`
    elements (the rest of the page if None) at `offset` of each flattened page. Returns [N, width]
    of the pool's dtype (`out`, if given). Ids may repeat; an id outside [0, P), -1 for instance,
    is a padded slot and its row is zero bytes. Raises ValueError for a span outside the page.
    """
    size = check_span(pool, page_ids, offset, width)
    rows = pool.new_empty((page_ids.numel(), size)) if out is None else out
    spans = pool.flatten(1)[:, offset : offset + size]
    for row, page in zip(rows, page_ids.tolist(), strict=True):
        if 0 <= page < pool.shape[0]:
            row.copy_(spans[page])
        else:
            row.zero_()
    return rows


@triton.jit
def _gather_pages(pool_ptr, ids_ptr, out_ptr, pages, page_words, offset, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    page = tl.load(ids_ptr + row).to(tl.int64)
    readable = tl.where((page >= 0) & (page < pages), width, 0)
    # int64 before the multiply: page id * page_words passes 2**31 in a full pool
    source = pool_ptr + page * page_words + offset
    words = tl.load(source + cols, mask=cols < readable, other=0)  # [TILE]
    tl.store(out_ptr + row * width + cols, words, mask=cols < width)


def gather_pages(
    pool: Tensor,
    page_ids: Tensor,
    *,
    offset: int = 0,
    width: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Same contract as `gather_pages_ref`, one pass over memory, no host sync."""
    size = check_span(pool, page_ids, offset, width)
    rows = pool.new_empty((page_ids.numel(), size)) if out is None else out
    if rows.shape != (page_ids.numel(), size):
        raise ValueError(f"out is [{page_ids.numel()}, {size}], not {tuple(rows.shape)}")
    device = require_device(pool=pool, page_ids=page_ids, out=rows)
    if not rows.numel():
        return rows
    words = page_words(pool, rows, page_ids, offset)
    tile = tiles("gather_pages", device, words.width)
    _gather_pages[(page_ids.numel(), cdiv(words.width, tile["TILE"]))](
        words.pool,
        page_ids,
        words.rows,
        pool.shape[0],
        words.page_words,
        words.offset,
        words.width,
        **tile,
    )
    return rows
