import mmap

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need Triton: pip install kimistack[kernels]")

from kimi_runtime.kernels.gather_pages import gather_pages, gather_pages_ref
from kimi_runtime.kernels.tolerance import mismatch

POOL_SHAPE = (7, 3, 50)  # a page of 150 elements: no multiple of any tile or vector

CASES = {
    "every page once": [0, 1, 2, 3, 4, 5, 6],
    "repeats": [4, 4, 0, 4, 6, 0],
    "single row": [6],
    "padded slots": [2, -1, 5, -1, -1],
    "only padding": [-1, -1],
    "ids beyond the pool": [7, 1000, 2**31 - 1, 1],
    "empty": [],
}
SPANS = {"whole page": (0, None), "layer group": (50, 50), "odd span": (13, 31), "tail": (149, 1)}
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.float16)


def pool_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    elements = torch.randint(0, 256, (*POOL_SHAPE, dtype.itemsize), generator=generator)
    return elements.to(torch.uint8).view(dtype).squeeze(-1).to(device)


def poisoned(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Every byte 0xFF: NaN in the float dtypes, so that a row left unwritten shows."""
    out = torch.full((rows, width * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device)
    return out.view(dtype)


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gathers_what_the_reference_says(case, span, device):
    pool = pool_of(torch.bfloat16, device)
    page_ids = torch.tensor(CASES[case], dtype=torch.int32, device=device)
    offset, width = SPANS[span]
    expected = gather_pages_ref(pool, page_ids, offset=offset, width=width)
    out = poisoned(*expected.shape, pool.dtype, device)
    assert gather_pages(pool, page_ids, offset=offset, width=width, out=out) is out
    assert mismatch(out.view(torch.uint8), expected.view(torch.uint8)) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_dtype_are_moved_bit_by_bit(dtype, device):
    pool = pool_of(dtype, device)
    page_ids = torch.tensor([3, -1, 0, 3], dtype=torch.int64, device=device)
    rows = gather_pages(pool, page_ids, offset=5, width=99).view(torch.uint8)
    bytes_of_pool = pool.view(7, 150).view(torch.uint8)
    span = slice(5 * dtype.itemsize, 104 * dtype.itemsize)
    for row, page in zip(rows, [3, None, 0, 3], strict=True):
        expected = torch.zeros_like(row) if page is None else bytes_of_pool[page, span]
        assert torch.equal(row, expected)


def test_a_page_past_two_gib_is_found():
    page_bytes, pages = 2**20 + 1, 2100  # odd, so that the kernel counts single bytes
    memory = mmap.mmap(-1, page_bytes * pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = torch.frombuffer(memory, dtype=torch.uint8).view(pages, page_bytes)  # untouched: no RAM
    page_ids = torch.tensor([2099, 2, 2050], dtype=torch.int32)
    assert 2050 * page_bytes > 2**31
    for page in page_ids.tolist():
        pool[page, 1000:1010] = page % 251
    if torch.cuda.is_available():
        pool, page_ids = pool.cuda(), page_ids.cuda()
    rows = gather_pages(pool, page_ids, offset=1000, width=10)
    assert torch.equal(rows, (page_ids % 251).to(torch.uint8)[:, None].expand(3, 10))


def test_a_pool_without_pages_gives_zeros(device):
    pool = torch.empty(0, 3, 4, device=device)
    page_ids = torch.tensor([0, -1], device=device)
    for gather in (gather_pages, gather_pages_ref):
        assert torch.equal(gather(pool, page_ids), torch.zeros(2, 12, device=device))


def test_a_view_that_starts_at_an_odd_byte_is_gathered(device):
    pool = torch.arange(64 * 5 + 1, device=device).to(torch.uint8)[1:].view(5, 64)
    page_ids = torch.tensor([4, 1], dtype=torch.int32, device=device)
    assert torch.equal(gather_pages(pool, page_ids), pool[page_ids.long()])


def test_a_span_outside_the_page_is_refused(device):
    pool, page_ids = pool_of(torch.uint8, device), torch.tensor([0], device=device)
    for offset, width in ((-1, 4), (148, 3), (151, None)):
        for gather in (gather_pages, gather_pages_ref):
            with pytest.raises(ValueError, match="not inside a page of 150 elements"):
                gather(pool, page_ids, offset=offset, width=width)


def test_arguments_the_kernel_cannot_read_are_refused(device):
    pool = pool_of(torch.float32, device)
    page_ids = torch.tensor([0, 1], device=device)
    with pytest.raises(ValueError, match="int32 or int64"):
        gather_pages(pool, page_ids.float())
    with pytest.raises(ValueError, match="contiguous"):
        gather_pages(pool.transpose(1, 2), page_ids)
    with pytest.raises(ValueError, match="dtype"):
        gather_pages(pool, page_ids, out=torch.empty(2, 150, device=device, dtype=torch.float16))
    with pytest.raises(ValueError, match="out is"):
        gather_pages(pool, page_ids, out=torch.empty(3, 150, device=device))
