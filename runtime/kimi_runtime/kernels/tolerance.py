"""How far a kernel may be from its reference, by the dtype of its result: one table for all.

Kernels and references sum in fp32 in different orders and round once. So a result may land on the
neighbouring value (rtol: one unit in the last place), and one that cancels to nearly nothing
differs by fp32's error in its terms (atol, for terms of order one). Codes, bytes and integers are
exact: no tolerance is asked for where no sum is taken.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """As `torch.testing.assert_close` takes it."""

    rtol: float
    atol: float


TOLERANCE = {
    torch.float32: Tolerance(rtol=1e-5, atol=1e-5),
    torch.bfloat16: Tolerance(rtol=2**-7, atol=2**-8),
    torch.float16: Tolerance(rtol=2**-10, atol=2**-10),
}


def mismatch(actual: Tensor, expected: Tensor) -> str | None:
    """What is wrong with `actual`, or None: shape, dtype, NaN where there is none, distance.

    Dtypes without a tolerance (bytes, integers, fp8 and so on) are compared bit by bit.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"{actual.dtype} {tuple(actual.shape)} instead of "
            f"{expected.dtype} {tuple(expected.shape)}"
        )
    tolerance = TOLERANCE.get(actual.dtype)
    if tolerance is None:
        wrong = int((_bytes(actual) != _bytes(expected)).sum())
        return f"{wrong} bytes differ" if wrong else None
    close = torch.isclose(
        actual, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
    )
    if bool(close.all()):
        return None
    worst = (actual.float() - expected.float()).abs()[~close].max()
    return f"{int((~close).sum())} of {close.numel()} values differ, by up to {float(worst):.3g}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
