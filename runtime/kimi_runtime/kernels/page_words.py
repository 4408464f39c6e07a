"""The view of a block pool that the page kernels copy: words as wide as alignment allows.

A page is bytes to these kernels: bf16, fp8 and byte pools are all copied as 8, 4, 2 or 1 byte
words, so there is one kernel and no dtype it does not know.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_runtime.kernels.lang import require_contiguous, require_dtype

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MOST_WORDS = 2**31 - 1  # columns are counted in int32 by the kernels


class PageWords(NamedTuple):
    """A pool and the rows beside it as words."""

    pool: Tensor  # [P, page_words]
    rows: Tensor  # [N, width]
    page_words: int
    offset: int
    width: int


def page_width(pool: Tensor) -> int:
    """Elements of one page of `pool` [P, ...]."""
    return math.prod(pool.shape[1:])


def check_span(pool: Tensor, page_ids: Tensor, offset: int, width: int | None) -> int:
    """The width of the span in elements, checked.

    Raises ValueError for a span outside the page, a pool that is not [P, ...], or page ids that
    are not a vector of int32 or int64.
    """
    if pool.dim() < 2 or page_ids.dim() != 1:
        raise ValueError(
            f"a pool [P, ...] and page ids [N] are wanted, not shapes {tuple(pool.shape)} "
            f"and {tuple(page_ids.shape)}"
        )
    if page_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"page ids are int32 or int64, not {page_ids.dtype}")
    whole = page_width(pool)
    size = whole - offset if width is None else width
    if offset < 0 or size < 0 or offset + size > whole:
        raise ValueError(
            f"the span of {size} elements at {offset} is not inside a page of {whole} elements"
        )
    return size


def page_words(pool: Tensor, rows: Tensor, page_ids: Tensor, offset: int) -> PageWords:
    """`pool` [P, ...] and `rows` [N, width] as words; `offset` in elements of the pool.

    The word is the widest that divides the page, the span and both addresses. Raises ValueError
    where memory is not contiguous or the dtypes differ.
    """
    require_contiguous(pool=pool, rows=rows, page_ids=page_ids)
    require_dtype(pool.dtype, rows=rows)
    size = pool.element_size()
    page_bytes, offset_bytes, width_bytes = (
        count * size for count in (page_width(pool), offset, rows.shape[1])
    )
    divisors = (page_bytes, offset_bytes, width_bytes, *_addresses(pool), *_addresses(rows))
    word_bytes, dtype = next(
        (word, dtype) for word, dtype in _WORDS if all(value % word == 0 for value in divisors)
    )
    if page_bytes // word_bytes > _MOST_WORDS:
        raise ValueError(f"a page of {page_bytes} bytes is larger than the kernel's int32 columns")
    return PageWords(
        pool=pool.flatten(1).view(torch.uint8).view(dtype),
        rows=rows.view(torch.uint8).view(dtype),
        page_words=page_bytes // word_bytes,
        offset=offset_bytes // word_bytes,
        width=width_bytes // word_bytes,
    )


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """What a word must divide: the address, and (torch's own rule) the offset in the storage."""
    return tensor.data_ptr(), int(tensor.storage_offset()) * tensor.element_size()
