import pytest

torch = pytest.importorskip("torch")

from kimi_runtime.kernels.lang import can_launch, require_contiguous, require_device

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # what an import finds where it is not installed
import torch
from kimi_runtime.errors import KernelUnavailable
from kimi_runtime.kernels import experts, gather_pages, mxfp4_gemm, mxfp8, scatter_pages, lang
from kimi_runtime.kernels.mxfp4 import quantise_mxfp4, quantise_mxfp4_ref

assert not lang.is_installed()
assert not lang.can_launch(torch.device("cuda"))
made = quantise_mxfp4_ref(torch.ones(2, 64))
assert made.scales.tolist() == [[125, 125]] * 2
for launch in (lambda: quantise_mxfp4(torch.ones(2, 64)),
               lambda: gather_pages._gather_pages[(1,)]()):
    try:
        launch()
    except KernelUnavailable as error:
        print(error)
"""


def test_without_triton_the_references_run_and_kernels_say_what_is_missing(run_python):
    done = run_python("-W", "error", "-c", WITHOUT_TRITON)
    assert done.returncode == 0, done.stderr
    on_cpu, absent = done.stdout.splitlines()
    assert "kernels run on a GPU, not on cpu" in on_cpu
    assert "kernel _gather_pages needs Triton" in absent


def test_the_cpu_uses_references():
    assert not can_launch(torch.device("cpu"))


def test_memory_a_kernel_would_misread_is_refused():
    with pytest.raises(ValueError, match=r"rows of shape \(3, 2\) has strides \(1, 3\)"):
        require_contiguous(rows=torch.zeros(2, 3).T)
    with pytest.raises(ValueError, match="one device"):
        require_device(a=torch.zeros(1), b=torch.zeros(1, device="meta"))
