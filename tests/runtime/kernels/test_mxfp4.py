import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need Triton: pip install kimistack[kernels]")

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.kernels.mxfp4 import (
    Mxfp4,
    decode_e2m1,
    decode_e8m0,
    dequantise_mxfp4,
    encode_e2m1,
    pack_e2m1,
    quantise_mxfp4,
    quantise_mxfp4_ref,
    unpack_e2m1,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = ("compressed_tensors", "ocp_floor")
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e2m1_of_ml_dtypes(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF


def group(*values: float) -> torch.Tensor:
    """One group of 32 with the given values first and zeros after."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def awkward_rows() -> torch.Tensor:
    """Groups over the whole range of fp32, ties, both zeros, zeros only, infinities and NaN."""
    generator = torch.Generator().manual_seed(11)
    exponents = torch.arange(-149, 128, dtype=torch.float64)[:, None]
    wide = torch.randn(277, 32, generator=generator, dtype=torch.float64) * 2**exponents
    ties = torch.arange(-14, 18).float() / 4
    special = [
        torch.zeros(32),
        -torch.zeros(32),
        group(torch.inf, 1),
        group(-torch.inf),
        group(torch.nan, 3, -2),
        group(3.4e38, 1),
        group(1e-45),
        torch.full((32,), 6.5),
        torch.full((32,), 7.0),
    ]
    return torch.cat([wide.float(), ties[None], ties[None] * 2**20, torch.stack(special)])


def test_the_sixteen_codes_decode_as_in_the_standard():
    codes = torch.arange(16, dtype=torch.uint8)
    assert decode_e2m1(codes).tolist() == [*E2M1, *(-value for value in E2M1)]
    oracle = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(decode_e2m1(codes).numpy().view(np.uint32), oracle.view(np.uint32))


def test_the_256_scales_decode_as_in_the_standard():
    scales = torch.arange(256, dtype=torch.uint8)
    oracle = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(decode_e8m0(scales).numpy(), oracle, equal_nan=True)


def test_every_code_under_every_scale_decodes_as_in_the_standard():
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    packed = Mxfp4(pack_e2m1(torch.from_numpy(codes)), torch.from_numpy(scales))
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    with np.errstate(over="ignore"):  # 2^127 times 2 and more is an infinity in fp32
        oracle = (values * scales.view(ml_dtypes.float8_e8m0fnu)).astype(np.float32)
    got = dequantise_mxfp4(packed).numpy()
    assert np.array_equal(got[:255].view(np.uint32), oracle[:255].view(np.uint32))
    assert np.isnan(got[255]).all()


def test_values_round_to_the_nearest_code_and_ties_to_the_even_one():
    values = np.arange(-1000, 1001, dtype=np.float32) / 128  # every tie, and beyond 6 on both sides
    assert np.array_equal(encode_e2m1(torch.from_numpy(values)).numpy(), e2m1_of_ml_dtypes(values))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert decode_e2m1(encode_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_any_value_gets_the_code_that_ml_dtypes_gives(values):
    floats = np.array(values, dtype=np.float32)
    assert np.array_equal(encode_e2m1(torch.from_numpy(floats)).numpy(), e2m1_of_ml_dtypes(floats))


def test_codes_are_packed_low_nibble_first():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.numpy().tobytes().hex(" ") == "10 32 54 76 98 ba dc fe"
    assert torch.equal(unpack_e2m1(packed), codes)


@pytest.mark.parametrize(
    ("largest", "ocp_floor", "compressed_tensors"),
    [
        (1.0, 125, 125),
        (6.0, 127, 127),
        (6.99, 127, 127),  # rounds to 6 of the same scale under both rules
        (7.0, 127, 128),  # 1.75 * 4: the bump carries into the exponent
        (7.99, 127, 128),
        (8.0, 128, 128),
        (0.0, 0, 0),
        (2.0**-126, 0, 0),
        (2.9e38, 252, 252),
        (3.4e38, 252, 253),
    ],
)
def test_the_two_rules_choose_the_scale_they_name(largest, ocp_floor, compressed_tensors):
    x = group(-largest, largest / 2)
    assert quantise_mxfp4_ref(x, "ocp_floor").scales.tolist() == [ocp_floor]
    assert quantise_mxfp4_ref(x, "compressed_tensors").scales.tolist() == [compressed_tensors]


@pytest.mark.parametrize("rounding", RULES)
def test_a_group_is_what_ml_dtypes_makes_of_its_scaled_elements(rounding):
    x = awkward_rows()
    made = quantise_mxfp4_ref(x, rounding)
    finite = x.isfinite().all(dim=1)
    scale = made.scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    codes = e2m1_of_ml_dtypes((x.numpy().astype(np.float64) / scale).astype(np.float32)[finite])
    assert np.array_equal(unpack_e2m1(made.codes).numpy()[finite], codes)
    assert made.scales[~finite].tolist() == [[0xFF]] * int((~finite).sum())


@pytest.mark.parametrize("rounding", RULES)
def test_an_infinity_or_a_nan_makes_its_group_nan(rounding):
    x = torch.stack([group(1, torch.inf), group(2, torch.nan), group(3)])
    back = dequantise_mxfp4(quantise_mxfp4_ref(x, rounding))
    assert back.isnan().all(dim=1).tolist() == [True, True, False]
    assert not back[2].isnan().any()


@pytest.mark.parametrize("rounding", RULES)
def test_values_that_mxfp4_can_hold_come_back_exactly(rounding):
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (64, 96), generator=generator, dtype=torch.uint8)
    codes[:, ::32] = 7  # a six in each group, so that the scale is found again
    scales = torch.randint(0, 253, (64, 3), generator=generator, dtype=torch.uint8)
    x = dequantise_mxfp4(Mxfp4(pack_e2m1(codes), scales))
    made = quantise_mxfp4_ref(x, rounding)
    assert torch.equal(made.scales, scales)
    assert torch.equal(made.codes, pack_e2m1(codes))
    assert torch.equal(x.bfloat16().float(), x)  # exact in bf16 too


@pytest.mark.parametrize("rounding", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_is_bit_for_bit_the_reference(dtype, rounding):
    x = awkward_rows().to(dtype).to(DEVICE)
    if dtype == torch.bfloat16:  # Triton's interpreter widens bf16's subnormals wrongly
        x[x.abs() < 2.0**-126] = 0
    made, expected = quantise_mxfp4(x, rounding), quantise_mxfp4_ref(x, rounding)
    assert torch.equal(made.scales, expected.scales)
    assert torch.equal(made.codes, expected.codes)


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (3, 1, 160)])
def test_shapes_are_kept(shape):
    x = torch.ones(shape, device=DEVICE)
    for made in (quantise_mxfp4(x), quantise_mxfp4_ref(x)):
        assert made.codes.shape == (*shape[:-1], shape[-1] // 2)
        assert made.scales.shape == (*shape[:-1], shape[-1] // 32)
        assert torch.equal(dequantise_mxfp4(made), x)


def test_an_axis_that_is_no_multiple_of_the_group_is_refused():
    for quantise in (quantise_mxfp4, quantise_mxfp4_ref):
        with pytest.raises(ValueError, match="groups of 32"):
            quantise(torch.ones(4, 48))
