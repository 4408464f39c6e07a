"""Device functions that more than one kernel uses. They have no launcher and no grid."""

from kimi_runtime.kernels.lang import tl, triton


@triton.jit
def power_of_two(exponent):
    """2^exponent in fp32, exact, for int32 exponents in -126..127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def group_scales(x, bump, emax):
    """The e8m0 bytes (int32) of groups x [G, 32] in fp32, and x over its scale, exact.

    As `mxfp4.encode_group_scales` and `mxfp4.divide_by_scales`: a group with an infinity or a NaN
    has byte 255 and zeros.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # magnitudes order like their bits
    largest = tl.max(bits, axis=1)  # [G]
    is_finite = largest < 0x7F800000
    largest = tl.where(is_finite, largest, 0)
    # No upper clamp: the largest fp32 has exponent 254, a bump makes it 255, and emax is over 1.
    scale = tl.maximum(((largest + bump) >> 23) - emax, 0)
    scaled = tl.where(is_finite[:, None], x, 0.0) * power_of_two(127 - scale)[:, None]
    return tl.where(is_finite, scale, 255), scaled


@triton.jit
def e2m1_codes(values):
    """The nearest e2m1 codes (int32) of fp32 values, as `mxfp4.encode_e2m1`."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32)
    code += (size >= 0.75).to(tl.int32)
    code += (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32)
    code += (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    sign = (values.to(tl.int32, bitcast=True) >> 31) & 1
    return code | (sign << 3)


@triton.jit
def round_to_e4m3(values):
    """The nearest e4m3fn values, still in fp32: ties to even, saturated at 448.

    Written out because the cast that follows is then exact, whatever rounding the target's own
    conversion has (Triton's CPU interpreter, for one, drops the carry into the exponent).
    """
    bits = values.to(tl.int32, bitcast=True)
    size = tl.abs(values)
    exponent = ((bits >> 23) & 0xFF) - 127
    exponent = tl.minimum(tl.maximum(exponent, -6), 8)  # subnormals share 2^-6
    # Adding 1.5 * 2^23 steps leaves no bit below a step of 2^(exponent - 3).
    steps = power_of_two(exponent + 20) * 1.5
    rounded = tl.minimum((size + steps) - steps, 448.0)
    sign = bits & -0x80000000  # kept for zeros too
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
