"""Linear layers whose rows do not depend on each other; see `models.rows`."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.models.rows import (
    ANY_ROWS,
    LADDER,
    Product,
    Tiles,
    cancelling,
    measure_tiles,
)


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN can keep a weight in its own layout: half the time for a few rows."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _linear(weight: Tensor) -> Product:
    """x [M, K] -> x @ weight.T for weight [N, K], with the weight packed where that is possible."""
    if not _packs(weight.device, weight.dtype):
        return lambda x: functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LADDER[-1])
    linear = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor) -> Tensor:
        result: Tensor = linear(x, packed, None, "none", [], "")
        return result

    return product


def _per_head(weight: Tensor) -> Product:
    """x [H, M, K] -> x @ weight for weight [H, K, N]."""
    return lambda x: torch.bmm(x, weight)


class Linear:
    """x [M, K] -> x @ weight.T [M, N]."""

    def __init__(self, product: Product, tiles: Tiles) -> None:
        self._product, self.tiles = product, tiles

    def __call__(self, x: Tensor) -> Tensor:
        """x is contiguous; any number of rows."""
        return self.tiles.apply(self._product, x)


class LinearFactory:
    """Makes linear layers, measuring each shape once.

    fp32 weights of bf16 models (the router) are measured too; with `promise` False nothing is, and
    rows may differ in their last bits between batches.
    """

    def __init__(self, *, promise: bool) -> None:
        self.promise = promise
        self.measured: dict[tuple[str, tuple[int, ...], torch.dtype], Tiles] = {}

    def linear(self, weight: Tensor) -> Linear:
        """A layer of weight [N, K]."""
        return Linear(_linear(weight), self._tiles(weight, "linear", _linear))

    def per_head(self, weight: Tensor) -> Linear:
        """A layer of weight [H, K, N] on x [H, M, K]."""
        weight = weight.contiguous()
        return Linear(_per_head(weight), self._tiles(weight, "per head", _per_head))

    def _tiles(self, weight: Tensor, kind: str, build: Callable[[Tensor], Product]) -> Tiles:
        if not self.promise:
            return ANY_ROWS
        key = (kind, tuple(weight.shape), weight.dtype)
        if key not in self.measured:
            if kind == "per head":
                heads, inputs, outputs = weight.shape
                x, w = cancelling(LADDER[-1], inputs, outputs, lead=(heads,))
                w = w.transpose(1, 2).contiguous()
            else:
                outputs, inputs = weight.shape
                x, w = cancelling(LADDER[-1], inputs, outputs)
            x, w = x.to(weight), w.to(weight)
            self.measured[key] = measure_tiles(build(w), x, f"a {kind} product {key[1]}")
        return self.measured[key]
