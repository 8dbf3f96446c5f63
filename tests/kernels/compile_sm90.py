"""Compile the Triton kernels for sm_90 without a GPU.

@triton.jit makes functions that cannot be compiled in a process with TRITON_INTERPRET=1, which the tests set. The tests
therefore import this module in another process.
"""

import dataclasses
import re
import subprocess
import tempfile
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.triton import backward as triton_backward
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton import decode as triton_decode
from ringattn.kernels.triton import forward as triton_forward
from ringattn.kernels.triton import launcher
from ringattn.kernels.triton import quantize as triton_quantize

KERNELS = {
    "forward": triton_forward._forward_kernel,
    "key_gradient": triton_backward._key_gradient_kernel,
    "query_gradient": triton_backward._query_gradient_kernel,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def argument_type(name: str, dtype: str, stride: str = "i32") -> str | tuple[str, ...]:
    """Return the type of a kernel argument in Triton's notation. `stride` is the type of the strides of q, k, v and dout."""
    if name.endswith("_strides"):
        return (stride,) * 3
    if name == "block_strides":
        return ("i32",) * 2
    if name in ("num_masks", "num_tiles", "num_queries", "num_keys", "first_head"):
        return "i32"
    if name in ("lo", "hi", "query_lo", "query_hi", "table", "query_positions", "key_positions", "block_lists"):
        return "*i32"
    return {"scale": "fp32", "factor": "fp32", "seed": "u64", "threshold": "u32"}.get(
        name, f"*{dtype}" if name in ("q", "k", "v", "dout", "out") else "*fp32"
    )


def aligned(signature: dict) -> dict[tuple[int, ...], list]:
    """Return the attributes of a usual call, in which all pointers and strides are multiples of 16."""
    attributes = {}
    for index, (name, kind) in enumerate(signature.items()):
        if name.endswith("_strides"):
            attributes |= {(index, i): [["tt.divisibility", 16]] for i in range(3)}
        elif name == "block_strides" and kind != "constexpr":
            attributes |= {(index, i): [["tt.divisibility", 16]] for i in range(2)}
        elif kind[0] == "*":
            attributes[(index,)] = [["tt.divisibility", 16]]
    return attributes


def compile_source(source: ASTSource, options: dict) -> triton.compiler.CompiledKernel:
    """Compile for sm_90 with the assembler that `launch_by_triton` chooses on a Hopper GPU."""
    target = GPUTarget("cuda", 90, 32)
    kernel = {(1,): lambda **given: triton.compile(source, target=target, options=given)}
    with mock.patch.object(launcher, "driver", **{"active.get_current_target.return_value": target}):
        return launcher.launch_by_triton(kernel, (1,), True, **options)


def compile_kernel(name: str, dtype: str, head_dim: int, options: str) -> triton.compiler.CompiledKernel:
    """Compile a kernel as it would be launched on a Hopper GPU for grouped heads.

    Args:
        name: a key of KERNELS.
        dtype: a key of DTYPES.
        head_dim: the padded head dim of q, k and v.
        options: any of dropout, blocks, tf32 and long, joined by plus signs. Strides have 64 bits if "long" is given.
    """
    kernel = KERNELS[name]
    q = torch.empty(1, 1, 4, head_dim, device="meta", dtype=DTYPES[dtype])
    k = torch.empty(1, 1, 2, head_dim, device="meta", dtype=DTYPES[dtype])
    blocks = BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), 128) if "blocks" in options else None
    config, launch = triton_common.configure(name, q, k, k, blocks, "tf32" if "tf32" in options else "ieee")
    constants = dict(CONFIG=config, HAS_STATE=True, FINAL=True, ADD_DQ=True, ADD_DK=True, ADD_DV=True)
    if "dropout" not in options:
        constants |= dict(query_positions=None, key_positions=None)
    if "blocks" not in options:
        constants |= dict(block_lists=None, block_strides=None)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    stride = "i64" if "long" in options else "i32"
    signature = {name: "constexpr" if name in constants else argument_type(name, dtype, stride) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, aligned(signature))
    return compile_source(source, launch)


def compile_decode(name: str, dtype: str, head_dim: int, options: str) -> triton.compiler.CompiledKernel:
    """Compile a kernel of a decoding call as it would be launched on an H100, for 32 query heads and 8 key heads.

    Args:
        name: "decode" or "merge".
        dtype, head_dim: as for `compile_kernel`.
        options: any of "queries" for 16 queries instead of one, "short" for so few keys that one launch computes the call,
            "sinks", "pages" and "long" (strides of 64 bits), joined by plus signs.
    """
    kernel = {"decode": triton_decode._attend_kernel, "merge": triton_decode._merge_kernel}[name]
    shapes = (2, 16 if "queries" in options else 1, 32, head_dim), (2, 2**11 if "short" in options else 2**17, 8, head_dim)
    pages = 2**11 if "pages" in options else 0
    if pages:
        shapes = shapes[0], (pages, 2**17 // pages, 8, head_dim)
    strides = torch.empty(shapes[1], device="meta").stride()
    with mock.patch.object(triton_decode, "INTERPRETER_SMS", 132):
        plan = triton_decode._plan(
            *map(torch.Size, shapes), head_dim, strides, strides, pages, 1, int("sinks" in options), 1.0, DTYPES[dtype],
            torch.device("cpu"),
        )  # fmt: skip
    early = not pages and not plan.num_counters
    constants = dict(CONFIG=dataclasses.replace(plan.config, pdl=True, prefetch=not pages, prefetch_early=early))
    for operand, option in (("sinks", "sinks"), ("page_table", "pages")):
        if option not in options:
            constants[operand] = None
    constants |= dict(m=None, l=None, lse=None)
    if name == "decode" and not plan.num_counters:
        constants |= dict(counters=None, o=None)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {
        "q": f"*{dtype}",
        "k": f"*{dtype}",
        "v": f"*{dtype}",
        "o": f"*{dtype}",
        "lo": "*i32",
        "hi": "*i32",
        "sinks": "*i32",
        "page_table": "*i32",
        "counters": "*i32",
        "parts": "*fp32",
    }
    signature = {
        x: "constexpr" if x in constants else types.get(x, "fp32" if x == "scale" else "i32") for x in kernel.arg_names
    }
    if "long" in options:
        signature |= {x: "i64" for x in signature if x.startswith(("k_", "v_"))}
    source = ASTSource(kernel, signature, constants, aligned(signature))
    options = (plan.attend if name == "decode" else plan.merge)["out"].options
    return compile_source(source, {**options, "launch_pdl": True})


def compile_quantize(name: str, dtype: str, head_dim: int, options: str) -> triton.compiler.CompiledKernel:
    """Compile the conversion to FP8. With the options "long", the strides of q have 64 bits, and those of k and v have 32."""
    kernel = triton_quantize._quantize_kernel
    constants = dict(Q_HEADS=4, K_HEADS=2, FACTOR=head_dim**-0.5, DIM=head_dim, PART=triton_quantize.PART)
    types = dict.fromkeys("qkv", f"*{dtype}") | {"matrices": "*bf16" if dtype == "fp32" else f"*{dtype}"}
    types |= {f"{x}_out": "*fp8e4nv" for x in "qkv"} | {f"{x}_scales": "*fp32" for x in "qkv"}
    types |= dict.fromkeys(("q_batch", "q_token", "q_head"), "i64" if options == "long" else "i32")
    signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, aligned(signature))
    launch = triton_quantize._options(head_dim, DTYPES[dtype])
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)


def resources(compiled: triton.compiler.CompiledKernel) -> dict[str, int]:
    """Return registers per thread, bytes spilled to the stack per thread, and bytes of shared memory per program.

    The last number counts the instructions that copy 16 bytes asynchronously from global to shared memory.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    asynchronous = compiled.asm["ptx"].count("cp.async.cg.shared.global")
    return dict(registers=int(registers), stack=int(stack), shared=compiled.metadata.shared, asynchronous=asynchronous)


def describe(argument: str) -> dict:
    """Compile a case, kernel:dtype:head dim:options such as forward:bf16:64:blocks+dropout, and return its resources."""
    name, dtype, head_dim, options = argument.split(":")
    compile_case = {"quantize": compile_quantize, **dict.fromkeys(KERNELS, compile_kernel)}.get(name, compile_decode)
    compiled = compile_case(name, dtype, int(head_dim), options)
    return dict(kernel=name, dtype=dtype, head_dim=int(head_dim), options=options) | resources(compiled)
