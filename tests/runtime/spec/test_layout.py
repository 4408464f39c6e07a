import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.layout import KvLayout
from kimi_runtime.spec.published import K3, K26, KIMI_NANO
from kimi_runtime.spec.sizes import kv_bytes_per_token

BASE = KvLayout(dtype="bf16", block_tokens=64, layers=4, row_dim=576)
LAYOUTS = st.builds(
    KvLayout,
    dtype=st.sampled_from(("bf16", "fp8", "fp32")),
    block_tokens=st.integers(1, 256),
    layers=st.integers(1, 100),
    row_dim=st.integers(1, 1000),
)
bounded = settings(max_examples=50, deadline=None)


def test_a_block_has_the_bytes_of_its_tokens():
    for model in (KIMI_NANO, K26, K3):
        layout = KvLayout.of(model, block_tokens=64, dtype="fp8")
        assert layout.block_bytes == 64 * kv_bytes_per_token(model, "fp8")


@pytest.mark.parametrize(
    "change", [{"dtype": "fp8"}, {"block_tokens": 32}, {"layers": 5}, {"row_dim": 512}]
)
def test_any_difference_changes_the_digest(change):
    assert BASE.model_copy(update=change).digest() != BASE.digest()


def test_the_digest_does_not_depend_on_the_process():
    assert BASE.digest() == "f95d76d2565ee400544294265414d3fb"


@bounded
@given(LAYOUTS, LAYOUTS)
def test_layouts_are_equal_exactly_when_their_digests_are(one, other):
    assert (one == other) == (one.digest() == other.digest())


@bounded
@given(LAYOUTS, st.data())
def test_layer_groups_cover_the_block_and_differ_by_at_most_one_layer(layout, data):
    groups = data.draw(st.integers(1, layout.layers))
    sizes = layout.layer_groups(groups)
    assert (len(sizes), sum(sizes)) == (groups, layout.layers)
    assert max(sizes) - min(sizes) <= 1
    assert sum(layout.group_bytes(groups)) == layout.block_bytes


@pytest.mark.parametrize("groups", [0, 5])
def test_more_groups_than_layers_are_refused(groups):
    with pytest.raises(ConfigError, match="4 layers cannot be cut into"):
        BASE.layer_groups(groups)
