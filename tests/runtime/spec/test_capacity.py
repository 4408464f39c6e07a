"""What GPUs hold: sizes against published ones, and errors that say what to change."""

import pytest

from kimi_runtime.errors import CapacityError, ConfigError
from kimi_runtime.spec.capacity import CapacitySpec, Shape, holdings

K31 = CapacitySpec(model="kimi-k3.1-pro", shapes=(Shape(tensor=8),))
MILLION = 2**20


def test_k31_pro_with_one_request_of_a_million_tokens_takes_199_gb_of_each_of_8_gpus():
    (held,) = holdings(K31.model_copy(update={"context_ranks": 8}))
    assert held.largest_context == MILLION
    assert held.with_one(MILLION) == pytest.approx(199e9, rel=0.05)
    assert held.with_one(MILLION) < held.full


def test_a_million_tokens_fit_a_node_that_keeps_all_kv_on_every_rank_too():
    (held,) = holdings(K31)
    assert held.largest_context == MILLION
    assert held.token_bytes == 16_992
    assert held.sequences(MILLION) == 2


def test_less_kv_memory_is_a_smaller_largest_context():
    small = Shape(tensor=4, kv_memory=3_513_600_000)
    (held,) = holdings(CapacitySpec(model="kimi-k2.6", shapes=(small,)))
    assert held.largest_context == 100_000
    assert held.at_largest_context == held.full
    assert held.sequences(50_000) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "kimi-k4"}, "model: 'kimi-k4' is not one of kimi-k2-thinking"),
        ({"gpu": "H100"}, "gpu: 'H100' is not one of MI355X"),
        ({"shapes": (Shape(tensor=6),)}, "hidden 7168 % 6"),
        ({"context_ranks": 3}, "context_ranks: 3 ranks do not divide the 8 tensor ranks"),
    ],
)
def test_what_is_not_known_or_does_not_divide_is_said(changes, says):
    with pytest.raises(ConfigError, match=says):
        holdings(K31.model_copy(update=changes))


def test_weights_that_do_not_fit_are_a_capacity_error():
    with pytest.raises(CapacityError, match="use more GPUs per replica"):
        holdings(CapacitySpec(model="kimi-k3", shapes=(Shape(tensor=4),)))
