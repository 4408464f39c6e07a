"""Time the kernels' plain references on this CPU, against a copy of the bytes they move.

python benchmarks/kernels.py [--threads N]      (GPU kernels: scripts/gpu-check)

The references are what serves on a CPU and what kernels are checked by. The last column is how
many times a copy of the same bytes fits into the call: 1 is memory speed.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "runtime"))

import torch

from kimi_runtime.kernels.experts import experts_ref, silu_mul
from kimi_runtime.kernels.gather_pages import gather_pages_ref
from kimi_runtime.kernels.mxfp4 import Mxfp4, dequantise_mxfp4, quantise_mxfp4_ref
from kimi_runtime.kernels.mxfp8 import quantise_mxfp8_ref
from kimi_runtime.kernels.scatter_pages import scatter_pages_ref
from kimi_runtime.kernels.sort_experts import sort_experts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {threads} thread(s), median of 5")
    print(f"{'reference':22} {'shape':34} {'ms':>8} {'GB/s':>7} {'copies':>7}")
    for name, shape, run, moved_bytes in cases():
        time_s, copy_s = seconds(run), seconds(copy_of(moved_bytes))
        print(
            f"{name:22} {shape:34} {time_s * 1e3:>8.2f} {moved_bytes / time_s / 1e9:>7.2f} "
            f"{time_s / copy_s:>7.1f}"
        )


def cases() -> list[tuple[str, str, Callable[[], object], int]]:
    """(name, shape, call, bytes read and written)."""
    pool = torch.randint(0, 256, (64, 4 << 20), dtype=torch.uint8)
    page_ids = torch.randperm(64)[:32].to(torch.int32)
    rows = gather_pages_ref(pool, page_ids)
    x = torch.randn(512, 7168).bfloat16()
    weight = quantise_mxfp4_ref(torch.randn(2048, 7168))
    count, hidden, inner, chosen = 32, 512, 256, 4
    w13, w2 = experts_of(count, 2 * inner, hidden), experts_of(count, hidden, inner)
    tokens = torch.randn(64, hidden).bfloat16()
    ids = torch.rand(64, count).argsort(1)[:, :chosen]
    scores = torch.rand(64, chosen)
    layer_bytes = sum(part.numel() for part in (*w13, *w2)) + 4 * tokens.numel()
    many = torch.randint(0, 384, (4096, 8))
    moved = 2 * rows.numel()
    return [
        ("gather_pages", "32 pages of 4 MiB", lambda: gather_pages_ref(pool, page_ids), moved),
        (
            "scatter_pages",
            "32 pages of 4 MiB",
            lambda: scatter_pages_ref(pool, page_ids, rows),
            moved,
        ),
        (
            "quantise_mxfp4",
            "[512, 7168] bf16",
            lambda: quantise_mxfp4_ref(x),
            int(2.53125 * x.numel()),
        ),
        (
            "quantise_mxfp8",
            "[512, 7168] bf16",
            lambda: quantise_mxfp8_ref(x),
            int(3.03125 * x.numel()),
        ),
        (
            "dequantise_mxfp4",
            "[2048, 7168]",
            lambda: dequantise_mxfp4(weight),
            int(4.53125 * 2048 * 7168),
        ),
        (
            "sort_experts",
            "4096 tokens, 8 of 384, blocks of 64",
            lambda: sort_experts(many, 384, 64),
            2 * 8 * many.numel(),
        ),
        (
            "experts",
            f"64 tokens, {chosen} of {count}, {hidden}->{inner}",
            lambda: experts_ref(tokens, ids, scores, w13, w2, act=silu_mul),
            layer_bytes,
        ),
    ]


def experts_of(count: int, rows: int, columns: int) -> Mxfp4:
    return quantise_mxfp4_ref(torch.randn(count, rows, columns) / columns**0.5)


def copy_of(moved_bytes: int) -> Callable[[], object]:
    """A copy that reads half of the bytes and writes the other half."""
    source = torch.ones(max(moved_bytes // 2, 1), dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
