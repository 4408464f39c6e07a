import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need Triton: pip install kimistack[kernels]")

from kimi_runtime.kernels.gather_pages import gather_pages
from kimi_runtime.kernels.scatter_pages import scatter_pages, scatter_pages_ref
from kimi_runtime.kernels.tolerance import mismatch

PAGES, WIDTH = 7, 150

CASES = {
    "every page once": [0, 1, 2, 3, 4, 5, 6],
    "repeats": [4, 4, 0, 4, 6, 0],
    "single row": [6],
    "padded slots": [2, -1, 5, -1, -1],
    "only padding": [-1, -1],
    "ids beyond the pool": [7, 1000, 2**31 - 1, 1],
    "empty": [],
}
SPANS = {"whole page": (0, 150), "layer group": (50, 50), "odd span": (13, 31), "tail": (149, 1)}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pool_and_rows(count: int, width: int, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(PAGES, WIDTH, generator=generator).to(dtype)
    rows = torch.randn(count, width, generator=generator).to(dtype)
    return pool.to(DEVICE), rows.to(DEVICE)


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_scatters_what_the_reference_says(case, span):
    offset, width = SPANS[span]
    pool, rows = pool_and_rows(len(CASES[case]), width)
    page_ids = torch.tensor(CASES[case], dtype=torch.int32, device=DEVICE)
    expected = pool.clone()
    scatter_pages_ref(expected, page_ids, rows, offset=offset)
    scatter_pages(pool, page_ids, rows, offset=offset)
    assert mismatch(pool.view(torch.uint8), expected.view(torch.uint8)) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float32], ids=str)
def test_rows_of_any_dtype_come_back_as_they_were(dtype):
    pool, rows = pool_and_rows(3, WIDTH, dtype)
    page_ids = torch.tensor([6, 0, 2], dtype=torch.int64, device=DEVICE)
    scatter_pages(pool, page_ids, rows)
    assert torch.equal(gather_pages(pool, page_ids).view(torch.uint8), rows.view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(-2, PAGES), max_size=9), offset=st.integers(0, WIDTH - 1))
def test_the_last_row_of_an_id_wins_and_nothing_else_is_touched(ids, offset):
    pool = torch.full((PAGES, WIDTH), 200, dtype=torch.uint8, device=DEVICE)
    width = (WIDTH - offset + 1) // 2
    rows = torch.arange(len(ids), dtype=torch.uint8, device=DEVICE)[:, None].expand(-1, width)
    page_ids = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    scatter_pages(pool, page_ids, rows.contiguous(), offset=offset)
    last = {page: row for row, page in enumerate(ids)}
    for page in range(PAGES):
        assert set(pool[page, offset : offset + width].tolist()) == {last.get(page, 200)}
        assert set(pool[page, :offset].tolist() + pool[page, offset + width :].tolist()) <= {200}


def test_repeats_further_apart_than_a_tile_of_ids_are_found():
    ids = [5] + [0, 1, 2, 3] * 300 + [5]
    pool = torch.zeros(PAGES, 4, dtype=torch.int64, device=DEVICE)
    rows = torch.arange(len(ids), device=DEVICE)[:, None].expand(-1, 4).contiguous()
    scatter_pages(pool, torch.tensor(ids, dtype=torch.int32, device=DEVICE), rows)
    assert pool[:, 0].tolist() == [1197, 1198, 1199, 1200, 0, 1201, 0]


def test_a_page_past_two_gib_is_written():
    page_bytes, pages = 2**20 + 1, 2100
    memory = mmap.mmap(-1, page_bytes * pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = torch.frombuffer(memory, dtype=torch.uint8).view(pages, page_bytes).to(DEVICE)
    page_ids = torch.tensor([2099, 2], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([[7, 8, 9], [1, 2, 3]], dtype=torch.uint8, device=DEVICE)
    scatter_pages(pool, page_ids, rows, offset=page_bytes - 3)
    assert pool[2099, -3:].tolist() == [7, 8, 9]
    assert pool[2, -4:].tolist() == [0, 1, 2, 3]


def test_rows_that_do_not_fit_the_ids_or_the_page_are_refused():
    pool, rows = pool_and_rows(3, WIDTH)
    page_ids = torch.tensor([0, 1], device=DEVICE)
    for scatter in (scatter_pages, scatter_pages_ref):
        with pytest.raises(ValueError, match="one per page id"):
            scatter(pool, page_ids, rows)
        with pytest.raises(ValueError, match="contiguous"):
            scatter(torch.zeros(WIDTH, PAGES, device=DEVICE).T, page_ids, rows[:2].float())
        with pytest.raises(ValueError, match="not inside a page"):
            scatter(pool, page_ids, rows[:2], offset=1)
