"""Compile the kernels for a GPU that is not here, and read what the compiler made of them.

Triton carries LLVM's AMDGPU back end, so gfx950 code is made with no GPU and no ROCm. What a wrong
tile costs shows in the code already: spilled registers, too much LDS, or a scaled product that
became a software one. `scripts/kernel-report` prints the table and a test holds the limits.

Registers and spills are read from the code object's metadata notes; LDS is the launch's `shared`
figure, since the notes hold only its static part (0).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_runtime.errors import KernelUnavailable
from kimi_runtime.kernels import gather_pages, mxfp4, mxfp4_gemm, mxfp8, scatter_pages
from kimi_runtime.kernels.lang import is_installed
from kimi_runtime.kernels.tuning import tiles_for, tuned

LDS_BYTES = {"gfx950": 160 * 1024, "gfx942": 64 * 1024}
"""Local data share of one compute unit: the most one workgroup can have."""

_OPCODE = re.compile(r"^\s+((?:[sv]|ds|buffer|global|flat|scratch)_\w+)", re.MULTILINE)
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel as the launcher would specialise it."""

    name: str  # kernel[/variant] as in the tuning data, and the bucket's bound
    kernel: Any  # the @triton.jit function
    types: Mapping[str, str]  # argument -> Triton type, constexprs left out
    constants: Mapping[str, Any]  # constexprs
    options: Mapping[str, int]  # num_warps and its like
    unaligned: frozenset[str] = frozenset()  # sizes that need not divide by 16


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came out of one compilation."""

    name: str
    arch: str
    vgprs: int  # per lane, accumulation registers included
    sgprs: int
    spilled_vgprs: int
    spilled_sgprs: int
    shared_bytes: int  # LDS of one workgroup
    code_bytes: int
    threads: int
    opcodes: Mapping[str, int]  # instruction -> times it stands in the code

    def count(self, prefix: str) -> int:
        """Instructions whose name begins with `prefix`."""
        return sum(times for name, times in self.opcodes.items() if name.startswith(prefix))


def compile_case(case: Case, arch: str) -> Compiled:
    """Compile for `arch` such as `gfx950`; seconds when cold, cached in TRITON_CACHE_DIR.

    Raises KernelUnavailable without Triton, or under its interpreter (TRITON_INTERPRET=1), where
    kernels are plain Python; errors of the compiler pass as they are.
    """
    if not is_installed():
        raise KernelUnavailable("cross-compiling needs Triton: install kimistack[kernels]")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    if not isinstance(case.kernel, JITFunction):
        raise KernelUnavailable(
            "under TRITON_INTERPRET=1 kernels are plain Python; unset it to cross-compile"
        )
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): _ALIGNED for name in case.types if name not in case.unaligned}
    source = ASTSource(case.kernel, signature, dict(case.constants), aligned)
    made = triton.compile(source, GPUTarget("hip", arch, 64), options=dict(case.options))
    text = made.asm["amdgcn"]
    return Compiled(
        name=case.name,
        arch=arch,
        vgprs=_note(text, "vgpr_count"),
        sgprs=_note(text, "sgpr_count"),
        spilled_vgprs=_note(text, "vgpr_spill_count"),
        spilled_sgprs=_note(text, "sgpr_spill_count"),
        shared_bytes=int(made.metadata.shared),
        code_bytes=len(made.asm["hsaco"]),
        threads=64 * int(made.metadata.num_warps),
        opcodes=dict(Counter(_OPCODE.findall(text))),
    )


def cases(arch: str) -> Iterator[Case]:
    """Every kernel at every bucket of the tuning data for `arch` (or at its defaults)."""
    yield from _page_cases(arch)
    yield from _quantise_cases(arch)
    yield from _gemm_cases(arch)


def _page_cases(arch: str) -> Iterator[Case]:
    sizes = {"pages": "i32", "page_words": "i32", "offset": "i32", "width": "i32"}
    gather = {"pool_ptr": "*i64", "ids_ptr": "*i32", "out_ptr": "*i64", **sizes}
    scatter = {"pool_ptr": "*i64", "ids_ptr": "*i32", "rows_ptr": "*i64", **sizes, "n_rows": "i32"}
    free = frozenset({"pages", "n_rows"})
    for name, kernel, types in (
        ("gather_pages", gather_pages._gather_pages, gather),
        ("scatter_pages", scatter_pages._scatter_pages, scatter),
    ):
        for label, constants, options in _buckets(name, arch):
            yield Case(label, kernel, types, constants, options, free)


def _quantise_cases(arch: str) -> Iterator[Case]:
    rest = {"scales_ptr": "*u8", "groups": "i32", "bump": "i32"}
    fp4 = {"x_ptr": "*bf16", "codes_ptr": "*u8", **rest}
    fp8 = {"x_ptr": "*bf16", "values_ptr": "*fp8e4nv", **rest}
    for name, kernel, types in (
        ("quantise_mxfp4", mxfp4._quantise_mxfp4, fp4),
        ("quantise_mxfp8", mxfp8._quantise_mxfp8, fp8),
    ):
        for label, constants, options in _buckets(name, arch):
            yield Case(label, kernel, types, constants, options)


def _gemm_cases(arch: str) -> Iterator[Case]:
    weights = {"w_ptr": "*u8", "w_scales_ptr": "*u8", "out_ptr": "*bf16"}
    plan = {"slots_ptr": "*i32", "experts_ptr": "*i32"}
    sizes = dict.fromkeys(
        (
            *("n_slots", "slots_per_row", "blocks"),
            *("w_expert_stride", "w_scales_expert_stride", "N", "K"),
        ),
        "i32",
    )
    free = frozenset({"n_slots", "slots_per_row", "blocks"})
    plain = {"x_ptr": "*bf16", **weights, **plan, **sizes}
    for label, constants, options in _buckets("mxfp4_gemm/bf16", arch):
        yield Case(label, mxfp4_gemm._mxfp4_gemm_bf16, plain, constants, options, free)
    for kind, fmt, pack, x_type in (("mxfp8", "e4m3", 1, "*fp8e4nv"), ("mxfp4", "e2m1", 2, "*u8")):
        scaled = {"x_ptr": x_type, "x_scales_ptr": "*u8", **weights, **plan, **sizes}
        for label, constants, options in _buckets(f"mxfp4_gemm/{kind}", arch):
            formats = {"X_FORMAT": fmt, "X_PACK": pack, **constants}
            yield Case(label, mxfp4_gemm._mxfp4_gemm_scaled, scaled, formats, options, free)


def _buckets(kernel: str, arch: str) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """(label, constexprs, options) of each bucket of a kernel."""
    for bucket in tuned(arch).get(kernel, {}).get("buckets", [{"up_to": None}]):
        bound = bucket["up_to"]
        chosen = tiles_for(kernel, arch, 2**62 if bound is None else bound)
        constants = {name: value for name, value in chosen.items() if name.isupper()}
        options = {name: value for name, value in chosen.items() if not name.isupper()}
        yield f"{kernel} <={bound or 'any'}", constants, options


def _note(assembly: str, field: str) -> int:
    """A figure of the code object's metadata notes."""
    found = re.search(rf"^\s+\.{field}:\s+(\d+)", assembly, re.MULTILINE)
    if found is None:
        raise KernelUnavailable(f"this Triton's code object has no note {field}; 3.8 or 3.9 have")
    return int(found.group(1))
