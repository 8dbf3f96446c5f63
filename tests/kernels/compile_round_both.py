"""Compile `round_both` for sm_90, in another process like `tests.kernels.compile_sm90`."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringattn.kernels.triton import round_both as kernel


def compile_kernel(dtype: str) -> str:
    """Return the PTX for a bf16 matrix of 2,048 columns."""
    constants = dict(WIDTH=2048, MULTIPLE=kernel.MULTIPLE, ROWS=kernel.ROWS, COLUMNS=kernel.COLUMNS)
    types = dict(x="*bf16", scale="*fp32", rounded=f"*{dtype}", transposed=f"*{dtype}", num_rows="i32")
    signature = {name: types.get(name, "constexpr") for name in kernel._kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(kernel._kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def describe(dtype: str) -> dict:
    """For an output format, return the numbers of bits of the accesses to shared memory."""
    widths = re.findall(r"(?:ld|st|ldmatrix|stmatrix)\S*\.shared\S*\.(b\d+)", compile_kernel(dtype))
    return {"dtype": dtype, "widths": sorted(set(widths))}
