"""Compile the kernel that rounds a matrix in both orders for sm_90 without a GPU.

    python -m tests.kernels.compile_round_both fp8e4nv fp8e5

The arguments are output formats. For each of them, the program prints as JSON how many bits its accesses to shared memory have.
This is a program of its own for the same reason as `tests.kernels.compile_sm90`.
"""

import json
import re
import sys

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


def main() -> None:
    for dtype in sys.argv[1:]:
        widths = re.findall(r"(?:ld|st|ldmatrix|stmatrix)\S*\.shared\S*\.(b\d+)", compile_kernel(dtype))
        print(json.dumps({"dtype": dtype, "widths": sorted(set(widths))}), flush=True)


if __name__ == "__main__":
    main()
