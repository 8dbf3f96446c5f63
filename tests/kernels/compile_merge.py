"""Compile the merge kernel for sm_90 without a GPU, in another process like `tests.kernels.compile_sm90`."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringattn.kernels.triton import merge_states as kernel


def compile_in_place(head_dim: int) -> str:
    """Return the PTX that merges one state into another in place, for 16 heads."""
    function = kernel._merge_kernel
    constants = dict(HEADS=16, DIM=head_dim, PADDED_DIM=head_dim, ROWS=kernel.ELEMENTS // head_dim)
    tensors = ("m", "l", "o", "a_m", "a_l", "a_o")
    absent = "b_m", "b_l", "b_o", "c_m", "c_l", "c_o", "out", "lse"  # the other parts, and the outputs of a final merge
    constants |= dict.fromkeys(absent)
    signature = {
        name: "constexpr" if name in constants else "*fp32" if name in tensors else "i32" for name in function.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind == "*fp32"}
    source = ASTSource(function, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


def describe(head_dim: int) -> dict:
    """Return whether a barrier separates the loads of a merge in place from its stores."""
    accesses = re.findall(r"(ld\.global|bar\.sync|st\.global)", compile_in_place(head_dim))
    loads, stores = ([i for i, x in enumerate(accesses) if x.startswith(kind)] for kind in ("ld", "st"))
    assert loads
    assert stores
    return {"head_dim": head_dim, "separated": "bar.sync" in accesses[max(loads) : min(stores)]}
