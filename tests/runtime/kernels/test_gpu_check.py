import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="kernels need Triton: pip install kimistack[kernels]")


def test_every_kernel_is_checked_against_its_reference(run_python):
    done = run_python("scripts/gpu-check", "--interpret", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert {row["wrong"] for row in rows} == {None}
    assert {row["kernel"].split("/")[0] for row in rows} == {
        "gather_pages",
        "scatter_pages",
        "quantise_mxfp4",
        "quantise_mxfp8",
        "mxfp4_gemm",
        "experts",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so_in_one_line(run_python):
    done = run_python("scripts/gpu-check")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "gpu-check: torch sees no GPU on this machine; nothing was run"
    ]


@pytest.mark.parametrize("script", ["gpu-check", "kernel-report"])
def test_a_python_without_torch_is_told_so_in_one_line(run_python, script):
    done = run_python("-S", f"scripts/{script}")  # -S: no installed packages
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"{script}: this Python has no torch; run it with .venv/bin/python"
    ]


def test_a_kernel_that_differs_is_reported_with_exit_code_1(run_python):
    breaks_a_kernel = (
        "import runpy, sys\n"
        "sys.argv = ['gpu-check', '--interpret', '--only', 'gather']\n"
        "sys.path.insert(0, 'runtime')\n"
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from kimi_runtime.kernels import gather_pages as file\n"
        "right = file.gather_pages\n"
        "file.gather_pages = lambda *args, **rest: right(*args, **rest).bitwise_xor_(1)\n"
        "runpy.run_path('scripts/gpu-check', run_name='__main__')"
    )
    done = run_python("-c", breaks_a_kernel)
    assert done.returncode == 1
    assert "NO" in done.stdout
    assert "bytes differ" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_kernels_are_right_on_this_gpu(run_python):
    done = run_python("scripts/gpu-check")
    assert done.returncode == 0, done.stdout + done.stderr
