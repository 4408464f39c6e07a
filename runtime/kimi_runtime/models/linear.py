"""Linear layers whose rows do not depend on each other; see `models.rows`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.models.rows import (
    ANY_ROWS,
    LADDER,
    REFERENCE_ROWS,
    Product,
    Tiles,
    cancelling,
    in_reference_tiles,
    measure_tiles,
)


def _widens(weight: Tensor) -> bool:
    """Whether products of bf16 are computed in fp32 and rounded once: on x86 without AMX.

    There oneDNN's bf16 products take half again as long as fp32's, converting included. A rule and
    no measurement: equal processors must compute equal bits.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    able = torch.cpu.get_capabilities()
    return able["architecture"] == "x86_64" and not able.get("amx_bf16", False)


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN can keep a weight in its own layout: half the time for a few rows."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _linear(weight: Tensor) -> Product:
    """x [M, K] -> x @ weight.T for weight [N, K], with the weight packed where that is possible."""
    if _widens(weight):
        return _widened(_linear(weight.float()))
    if not _packs(weight.device, weight.dtype):
        return lambda x: functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LADDER[-1])
    linear = torch.ops.mkldnn._linear_pointwise

    def product(x: Tensor) -> Tensor:
        result: Tensor = linear(x, packed, None, "none", [], "")
        return result

    return product


def _widened(product: Product) -> Product:
    """The fp32 product of bf16 operands, rounded to bf16."""
    return lambda x: product(x.float()).to(torch.bfloat16)


def _per_head(weight: Tensor) -> Product:
    """x [H, M, K] -> x @ weight for weight [H, K, N]."""
    if _widens(weight):
        return _widened(_per_head(weight.float()))
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

    def stacked(self, weights: Sequence[Tensor]) -> Linear | None:
        """A layer of E weights [N, K] at once, x [M, K] -> [M, E * N], or None.

        None where the library adds up the wide product in another order than each weight's own.
        """
        count, like = len(weights), weights[0]
        if self.promise:
            x, w = _cancelling_like(like)
            alone = in_reference_tiles(_linear(w), x).repeat(1, count)
            if not torch.equal(in_reference_tiles(_linear(w.repeat(count, 1)), x), alone):
                return None
        return self.linear(torch.cat(tuple(weights)))

    def abreast(self, weights: Sequence[Tensor]) -> Linear | None:
        """A layer of E weights [N, K] on inputs of their own, x [E, M, K] -> [E, M, N], or None.

        None as in `stacked`.
        """
        count, like = len(weights), weights[0]
        if self.promise:
            x, w = _cancelling_like(like)
            alone = in_reference_tiles(_linear(w), x).expand(count, -1, -1)
            many = _per_head(w.T.expand(count, -1, -1).contiguous())
            if not torch.equal(in_reference_tiles(many, x.expand(count, -1, -1)), alone):
                return None
        return self.per_head(torch.stack(tuple(weights)).transpose(1, 2))

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


def _cancelling_like(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two reference tiles of inputs and a weight [N, K] like the given one."""
    outputs, inputs = weight.shape
    x, w = cancelling(2 * REFERENCE_ROWS, inputs, outputs)
    return x.to(weight), w.to(weight)
