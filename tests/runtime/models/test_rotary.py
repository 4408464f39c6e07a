import math

import numpy as np
import pytest
import torch

from k2_reference import turn, yarn_frequencies
from kimi_runtime.models.rotary import Rotary, amplitude, frequencies, rotate
from kimi_runtime.spec import published
from kimi_runtime.spec.model import RopeSpec, YarnSpec

K26 = RopeSpec(theta=50_000.0, yarn=YarnSpec(factor=64.0, original_positions=4096))
ROPES = {
    "plain": RopeSpec(theta=10_000.0),
    "k26": K26,
    "short": RopeSpec(theta=50_000.0, yarn=YarnSpec(factor=8.0, original_positions=256)),
    "unequal mscales": RopeSpec(
        theta=10_000.0,
        yarn=YarnSpec(factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=1.0),
    ),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_frequencies_are_those_of_an_independent_implementation(rope):
    np.testing.assert_allclose(
        frequencies(rope, 64).numpy(), yarn_frequencies(rope, 64), rtol=1e-13
    )


def test_fast_pairs_keep_their_frequency_and_slow_ones_are_divided_by_the_factor():
    base = 50_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    got = frequencies(K26, 64)
    turns = 4096 * base / (2 * math.pi)
    assert torch.equal(got[turns > 40], base[turns > 40])
    torch.testing.assert_close(got[turns < 0.7], base[turns < 0.7] / 64)
    ramp = got / base
    assert bool((ramp[:-1] >= ramp[1:]).all())


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rotation_past_the_original_positions_equals_complex_multiplication(rope):
    positions = torch.tensor([0, 1, 255, 256, 4095, 4096, 5000, 8191])
    x = torch.randn(len(positions), 3, 64, generator=torch.Generator().manual_seed(0))
    angles = Rotary(rope, 64, 8192, torch.device("cpu")).at(positions)
    got = rotate(x, angles).double().numpy()
    for i, position in enumerate(positions.tolist()):
        for head in range(3):
            want = turn(rope, x[i, head].double().numpy(), position)
            np.testing.assert_allclose(got[i, head], want, atol=2e-6)


def test_pairs_are_interleaved_not_halves():
    x = torch.zeros(1, 1, 64)
    x[..., 0] = 1.0
    got = rotate(x, Rotary(K26, 64, 16, torch.device("cpu")).at(torch.tensor([3])))
    assert got[0, 0, :2].tolist() == pytest.approx([math.cos(3), math.sin(3)])
    assert got[0, 0, 2:].abs().max() == 0


def test_equal_mscales_leave_amplitudes_alone_and_the_scale_has_their_square():
    assert amplitude(K26.yarn) == 1.0
    assert published.K26.attention_scale * math.sqrt(192) == pytest.approx(2.00474, abs=1e-5)


def test_a_token_among_many_turns_as_alone_whatever_shares_threads_get():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 9, 64, generator=generator)
    angles = Rotary(K26, 64, 512, torch.device("cpu")).at(torch.arange(512))
    alone = torch.cat([rotate(x[i : i + 1], angles[i : i + 1]) for i in range(512)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(rotate(x, angles), alone), threads
    finally:
        torch.set_num_threads(before)
