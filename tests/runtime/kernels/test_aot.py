"""What Triton's compiler makes of the kernels for gfx950, on a machine without any GPU."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need Triton: pip install kimistack[kernels]")

LDS_BYTES = 160 * 1024  # of a compute unit of gfx950
MAX_VGPRS = 256  # of 512 a lane: two waves on each SIMD, so that one computes while one waits


@pytest.fixture(scope="module")
def compiled(run_python) -> dict[str, dict]:
    done = run_python("-W", "error", "scripts/kernel-report", "--arch", "gfx950", "--json")
    assert done.returncode == 0, done.stderr
    return {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}


def variants(compiled: dict[str, dict], kernel: str) -> list[dict]:
    found = [one for name, one in compiled.items() if name.split(" ")[0] == kernel]
    assert found
    return found


def scaled_products(one: dict) -> int:
    return sum(times for name, times in one["opcodes"].items() if name.startswith("v_mfma_scale_"))


def test_every_kernel_compiles(compiled):
    kernels = {name.split(" ")[0].split("/")[0] for name in compiled}
    assert kernels == {
        "gather_pages",
        "scatter_pages",
        "quantise_mxfp4",
        "quantise_mxfp8",
        "mxfp4_gemm",
    }


def test_no_kernel_spills_or_asks_for_more_than_a_compute_unit_has(compiled):
    for name, one in compiled.items():
        assert (one["spilled_vgprs"], one["spilled_sgprs"]) == (0, 0), name
        assert one["vgprs"] <= MAX_VGPRS, name
        assert one["shared_bytes"] <= LDS_BYTES, name


@pytest.mark.parametrize("activations", ["mxfp8", "mxfp4"])  # e4m3 x e2m1, e2m1 x e2m1
def test_quantised_activations_use_the_scaled_matrix_instruction(compiled, activations):
    for one in variants(compiled, f"mxfp4_gemm/{activations}"):
        assert scaled_products(one) > 0, one["name"]
        assert not [name for name in one["opcodes"] if name.startswith("v_mfma_f32")], one["name"]


def test_bf16_activations_multiply_in_bf16(compiled):
    for one in variants(compiled, "mxfp4_gemm/bf16"):
        assert scaled_products(one) == 0
        assert [name for name in one["opcodes"] if name.startswith("v_mfma_f32")]


@pytest.mark.parametrize("kernel", ["gather_pages", "scatter_pages"])
def test_pages_are_moved_by_wide_loads_and_stores(compiled, kernel):
    for one in variants(compiled, kernel):
        moves = " ".join(one["opcodes"])
        assert "load_dwordx4" in moves, one["name"]
        assert "store_dwordx4" in moves, one["name"]


def test_the_table_is_printed_for_people(run_python):
    done = run_python("scripts/kernel-report")
    assert done.returncode == 0
    header, *rows = done.stdout.splitlines()
    assert header.split()[:5] == ["kernel", "VGPR", "SGPR", "spill", "LDS"]
    assert any("v_mfma_scale_f32_16x16x128_f8f6f4" in row for row in rows)


def test_under_the_interpreter_it_says_what_to_change(run_python):
    code = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from kimi_runtime.kernels.aot import cases, compile_case\n"
        "compile_case(next(cases('gfx950')), 'gfx950')"
    )
    done = run_python("-c", code)
    assert "unset it to cross-compile" in done.stderr
