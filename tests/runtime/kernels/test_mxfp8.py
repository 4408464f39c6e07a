import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need Triton: pip install kimistack[kernels]")

import ml_dtypes
import numpy as np

from kimi_runtime.kernels.mxfp8 import dequantise_mxfp8, quantise_mxfp8, quantise_mxfp8_ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = ("compressed_tensors", "ocp_floor")


def awkward_rows() -> torch.Tensor:
    """Groups over fp32's range, e4m3's ties and subnormals, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(11)
    exponents = torch.arange(-149, 128, dtype=torch.float64)[:, None]
    wide = torch.randn(277, 32, generator=generator, dtype=torch.float64) * 2**exponents
    ties = torch.arange(1, 3200, dtype=torch.float64).view(-1, 1)[: 32 * 99].view(99, 32) / 2**11
    ties[:, 0] = 256  # fixes the scale at 1, so that the others meet e4m3's own grid
    special = torch.zeros(5, 32, dtype=torch.float64)
    special[1] *= -1
    special[2, 3], special[3, 0] = torch.inf, torch.nan
    special[4] = 460.0
    return torch.cat([wide, ties, special]).float()


@pytest.mark.parametrize("rounding", RULES)
def test_a_group_is_what_ml_dtypes_makes_of_its_scaled_elements(rounding):
    x = awkward_rows()
    made = quantise_mxfp8_ref(x, rounding)
    finite = x.isfinite().all(dim=1).numpy()
    scale = made.scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    scaled = np.clip((x.numpy().astype(np.float64) / scale)[finite], -448, 448).astype(np.float32)
    oracle = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(made.values.view(torch.uint8).numpy()[finite], oracle)
    assert (made.scales.numpy()[~finite] == 0xFF).all()
    assert dequantise_mxfp8(made)[~torch.from_numpy(finite)].isnan().all()


def test_only_the_floor_rule_saturates():
    x = torch.full((1, 32), 500.0)  # 1.95 * 2^8
    assert dequantise_mxfp8(quantise_mxfp8_ref(x, "ocp_floor")).unique().tolist() == [448.0]
    assert dequantise_mxfp8(quantise_mxfp8_ref(x)).unique().tolist() == [512.0]


@pytest.mark.parametrize("rounding", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_is_bit_for_bit_the_reference(dtype, rounding):
    x = awkward_rows().to(dtype).to(DEVICE)
    if dtype == torch.bfloat16:  # Triton's interpreter widens bf16's subnormals wrongly
        x[x.abs() < 2.0**-126] = 0
    made, expected = quantise_mxfp8(x, rounding), quantise_mxfp8_ref(x, rounding)
    assert torch.equal(made.scales, expected.scales)
    assert torch.equal(made.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (3, 1, 160)])
def test_shapes_are_kept(shape):
    x = torch.ones(shape, device=DEVICE)
    for made in (quantise_mxfp8(x), quantise_mxfp8_ref(x)):
        assert made.scales.shape == (*shape[:-1], shape[-1] // 32)
        assert torch.equal(dequantise_mxfp8(made), x)
