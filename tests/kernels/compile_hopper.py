"""Compile the Hopper kernels for sm_90 without a GPU and print a JSON line of resources and complaints for each.

A program of its own, as `compile_sm90.py`: where tests set TRITON_INTERPRET=1, kernels cannot be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

from ringattn.kernels.hopper import backward as hopper_backward
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import forward as hopper_forward
from tests.kernels.compile_sm90 import resources

HEADS = 4
INTEGERS = ("lo", "hi", "query_lo", "query_hi", "work_tiles")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def descriptor(dtype: str, block: tuple[int, ...], layout=None) -> str:
    """A TMA descriptor's type in Triton's notation."""
    layout = layout or hopper_common.shared_layout(block, TYPES.get(dtype, torch.float32))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def forward_case(dtype: str, dim: int, group: int, kind: str) -> tuple:
    """(kernel, config, types of its descriptors, arguments that are not there); kind: final, begin, state, merge or few."""
    has_state, final = kind in ("state", "merge"), kind not in ("begin", "state")
    config = hopper_forward.configure((dim, dim), (HEADS, HEADS // group), TYPES[dtype], has_state, final, kind == "few")
    block = {"q": hopper_forward.ROWS.value, "out_tiles": hopper_forward.ROWS.value, "k": config.keys, "v": config.keys}
    types = {name: descriptor(dtype, (1, rows, 1, dim)) for name, rows in block.items()} | {"out": f"*{dtype}"}
    if config.state_stages:
        types["state_tiles"] = descriptor("fp32", (1, hopper_forward.ROWS.value, 1, dim // config.o_parts))
    absent = [] if config.state_stages else ["state_m", "state_l", "state_o", "state_tiles"]
    absent += [] if final else ["out_tiles", "out", "lse"]
    return hopper_forward._forward_kernel, config, types, absent


def backward_case(dtype: str, dim: int, group: int, kind: str) -> tuple:
    """As `forward_case`; kind: fresh, or add for gradients that are added to accumulators."""
    add = kind == "add"
    config = hopper_backward.Config(dim, dim, dim, HEADS, group, add, add, add)
    rows = {"q": config.queries, "dout": config.queries, "k": hopper_backward.ROWS.value, "v": hopper_backward.ROWS.value}
    types = {name: descriptor(dtype, (1, n, 1, dim)) for name, n in rows.items()}
    types["dq_sums"] = descriptor("fp32", (2 * config.chunk_columns, 32))
    types["scalars"] = descriptor("fp32", (2 * config.queries,), hopper_backward.SCALARS_LAYOUT)
    types |= dict.fromkeys(("dk", "dv"), "*fp32" if add else f"*{dtype}")
    return hopper_backward._main_kernel, config, types, []


def compile_case(kernel, config, types: dict[str, str], absent: list[str]) -> triton.compiler.CompiledKernel:
    """`kernel` for a usual call: all pointers are multiples of 16."""
    constants = {"CONFIG": config} | dict.fromkeys(absent)
    signature = {}
    for name in kernel.arg_names:
        pointer = "*i32" if name in INTEGERS else "*fp32" if name in ("lse", "state_m", "state_l", "state_o") else "i32"
        plain = "fp32" if name in ("scale", "log2_scale") else pointer
        signature[name] = "constexpr" if name in constants else types.get(name, plain)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))


def complaints(compiled: triton.compiler.CompiledKernel) -> list[str]:
    """What the assembler says about wgmma instructions that it runs one by one."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line for line in (done.stdout + done.stderr).splitlines() if "serialized" in line]


def spills_of_steps(compiled: triton.compiler.CompiledKernel) -> list[int]:
    """For every innermost loop with matrix products, how often it loads from or stores to the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    jumps = [(labels[found[1]], i) for i, line in enumerate(lines) if (found := re.search(r"BRA `\((\.L\w+)\)", line))]
    products = [i for i, line in enumerate(lines) if "HGMMA" in line]
    loops = [(first, last) for first, last in jumps if any(first < i < last for i in products)]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return [sum("LDL" in line or "STL" in line for line in lines[a:b]) for a, b in inner]


def main() -> None:
    for argument in sys.argv[1:]:
        name, dtype, dim, group, kind = argument.split(":")
        case = {"forward": forward_case, "backward": backward_case}[name](dtype, int(dim), int(group), kind)
        compiled = compile_case(*case)
        found = dict(case=argument, dim=int(dim), serialized=complaints(compiled), steps=spills_of_steps(compiled))
        found |= resources(compiled)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
