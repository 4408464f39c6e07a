import json

import pytest

torch = pytest.importorskip("torch")

from kimi_runtime.errors import ConfigError
from kimi_runtime.kernels.tuning import DEFAULTS, read_tuned, tiles, tiles_for, tuned


def test_a_bucket_holds_the_sizes_up_to_its_bound():
    rows = [tiles_for("mxfp4_gemm/mxfp8", "gfx950", size)["TILE_M"] for size in (1, 16, 17, 9999)]
    assert rows == [16, 16, 32, 64]


def test_an_architecture_without_data_runs_with_the_defaults():
    assert tuned("gfx000") == {}
    for kernel, default in DEFAULTS.items():
        assert tiles_for(kernel, "gfx000", 10**9).items() >= default.items()
    assert tiles("gather_pages", torch.device("cpu"), 1)["TILE"] == DEFAULTS["gather_pages"]["TILE"]


def test_every_kernel_is_tuned_for_gfx950():
    assert set(tuned("gfx950")) == set(DEFAULTS)


def test_a_tile_is_a_power_of_two_that_triton_can_index():
    for kernel in DEFAULTS:
        for arch in ("gfx950", "gfx000"):
            for size in (1, 2**10, 2**40):
                chosen = tiles_for(kernel, arch, size)
                for name, value in chosen.items():
                    if name.startswith("TILE"):
                        assert value & (value - 1) == 0, (kernel, name)
                        assert value >= 16, (kernel, name)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ({"gemm": {"buckets": [{"up_to": None, "tiles": {}}]}}, "tunes 'gemm'"),
        ({"gather_pages": {"buckets": [{"up_to": 4, "tiles": {}}]}}, "end in null"),
        ({"gather_pages": {"buckets": []}}, "end in null"),
        (
            {"gather_pages": {"buckets": [{"up_to": None, "tiles": {"TILES": 4}}]}},
            "no argument TILES",
        ),
    ],
)
def test_data_that_would_silently_not_apply_is_refused(tmp_path, kernels, message):
    (tmp_path / "gfx001.json").write_text(json.dumps({"kernels": kernels}))
    with pytest.raises(ConfigError, match=message):
        read_tuned(tmp_path, "gfx001")
