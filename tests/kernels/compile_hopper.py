"""Compile the Hopper kernels for sm_90 without a GPU, in a process without TRITON_INTERPRET=1, which the tests set."""

import contextlib
import io
import re
import subprocess
import tempfile

import torch
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from ringattn.kernels.hopper import backward as hopper_backward
from ringattn.kernels.hopper import backward_narrow, backward_wide, forward_fp8, forward_narrow, forward_short, forward_wide
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import forward as hopper_forward
from ringattn.kernels.triton.launcher import OPTIONS
from tests.kernels.compile_sm90 import compile_source, resources

# The number of query heads.
HEADS = 8
# The number of rows of a consumer of the forward.
ROWS = hopper_forward.ROWS.value
# The kernel arguments that are pointers to int32.
INTEGERS = ("lo", "hi", "query_lo", "query_hi", "work_tiles", "progress")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}


def descriptor(dtype: str, block: tuple[int, ...], layout=None) -> str:
    """Return the type of a TMA descriptor in Triton's notation."""
    layout = layout or hopper_common.shared_layout(block, TYPES.get(dtype, torch.float32))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def forward_case(dtype: str, dim: int, group: int, kind: str) -> tuple:
    """Return (kernel, config, types of some arguments, names of arguments that are None).

    Args:
        dtype: a key of TYPES.
        dim: the head dim of q, k and v.
        group: number of query heads per key head.
        kind: final (an output without a state), begin (a new state), state (a state updated in place), merge (an output from a
            state), few or medium (an output, with TILES_FEW_ROWS or TILES_MEDIUM), or short1, short4 or short8 (an output of
            `forward_short` with so many packed heads).
    """
    has_state, final = kind in ("state", "merge"), kind not in ("begin", "state")
    packed_heads = int(kind[5:]) if kind.startswith("short") else 0
    options = kind == "few", packed_heads, kind == "medium"
    config = hopper_forward.configure((dim, dim), (HEADS, HEADS // group), TYPES[dtype], has_state, final, *options)
    heads = config.heads_per_row
    block = {"q": (ROWS // heads, heads), "out_tiles": (ROWS // heads, heads), "k": (config.keys, 1), "v": (config.keys, 1)}
    types = {name: descriptor(dtype, (1, *rows, config.dim)) for name, rows in block.items()} | {"out": f"*{dtype}"}
    if config.state_stages:
        types["state_tiles"] = descriptor("fp32", (1, ROWS, 1, config.dim // config.o_parts))
    absent = [] if config.state_stages else ["state_m", "state_l", "state_o", "state_tiles"]
    absent += [] if final else ["out_tiles", "out", "lse"]
    return (forward_short if packed_heads else forward_narrow)._forward_kernel, config, types, absent


def wide_forward_case(dtype: str, dim: int, group: int, kind: str) -> tuple:
    """Return the same for the forward at head dims above 128: (256, 256) for dim 256, (192, 128) for dim 192.

    kind: final, begin, state or merge, or "irregular" for an output with a value head dim that is 8 less.
    """
    has_state, final = kind in ("state", "merge"), kind not in ("begin", "state")
    dims = dim, {256: 256, 192: 128}[dim] - (8 if kind == "irregular" else 0)
    config = hopper_forward.configure(dims, (HEADS, HEADS // group), TYPES[dtype], has_state, final)
    rows = {"q": ROWS, "k": config.keys}
    types = {name: descriptor(dtype, (1, n, 1, config.dim)) for name, n in (rows | {"v": config.keys}).items()}
    types |= {f"{name}_tail": descriptor(dtype, (1, n, 1, config.tail)) for name, n in rows.items() if config.tail}
    absent = [] if config.tail else ["q_tail", "k_tail"]
    absent += [] if has_state or not final else ["state_m", "state_l", "state_o"]
    absent += [] if final else ["out", "lse"]
    return forward_wide._forward_kernel, config, types | {"out": f"*{dtype}"}, absent


def fp8_forward_case(dtype: str, dim: int, group: int, kind: str) -> tuple:
    """Return the same for the forward with FP8 inputs. kind: final, begin, state or merge. `dtype` is the dtype of out."""
    has_state, final = kind in ("state", "merge"), kind not in ("begin", "state")
    config = hopper_forward.configure((dim, dim), (HEADS, HEADS // group), TYPES["fp8e4nv"], has_state, final)
    blocks = {"q": (1, ROWS, 1, dim), "k": (1, config.keys, 1, dim), "v": (1, 1, 1, dim, config.keys)}
    types = {name: descriptor("fp8e4nv", block) for name, block in blocks.items()} | {"out": f"*{dtype}"}
    types |= dict.fromkeys(("q_scales", "k_scales", "v_scales"), "*fp32")
    absent = [] if has_state or not final else ["state_m", "state_l", "state_o"]
    return forward_fp8._forward_kernel, config, types, absent + ([] if final else ["out", "lse"])


def backward_case(dtype: str, dim: int, group: int, kind: str) -> tuple:
    """Return the same for the main kernel of the backward.

    kind: "fresh" (new gradients), "skip" (the same, and consumers skip steps) or "add" (accumulators); "ordered" and
        "add-ordered" for the deterministic backward.
    """
    add, ordered = kind.startswith("add"), kind.endswith("ordered")
    config = hopper_backward.configure((dim, dim), (HEADS, HEADS // group), (add, add, add), ordered, kind == "skip")
    rows = {"q": config.queries, "dout": config.queries, "k": backward_narrow.ROWS.value, "v": backward_narrow.ROWS.value}
    types = {name: descriptor(dtype, (1, n, 1, config.dim)) for name, n in rows.items()}
    for consumer, name in enumerate(("first_dq_sums", "second_dq_sums")):
        types[name] = descriptor("fp32", (2 * backward_narrow.dq_columns(config, consumer), 32))
    types["scalars"] = descriptor("fp32", (2 * config.queries,), hopper_backward.SCALARS_LAYOUT)
    types |= dict.fromkeys(("dk", "dv"), "*fp32" if add else f"*{dtype}")
    return backward_narrow._main_kernel, config, types, [] if ordered else ["progress"]


def wide_backward_case(dtype: str, dim: int, group: int, kind: str) -> tuple:
    """Return the same for the backward at head dims above 128: (256, 256) for dim 256, (192, 128) for dim 192.

    kind: "keys" for the kernel for dk and dv, "queries" for the kernel for dq; "add-keys" and "add-queries" with accumulators.
    """
    add, by_key = kind.startswith("add"), kind.endswith("keys")
    dims = dim, {256: 256, 192: 128}[dim]
    config = hopper_backward.configure(dims, (HEADS, HEADS // group), (add, add, add))
    rows = config.queries if by_key else backward_wide.ROWS.value
    blocks = {"q": (rows, config.part), "dout": (rows, config.value_part)}
    blocks |= {"k": (backward_wide.ROWS.value, config.part), "v": (backward_wide.ROWS.value, config.value_part)}
    types = {name: descriptor(dtype, (1, n, 1, columns)) for name, (n, columns) in blocks.items()}
    scalars = descriptor("fp32", (config.queries,), hopper_backward.SCALARS_LAYOUT) if by_key else "*fp32"
    types |= dict.fromkeys(("log2_lse", "row_delta"), scalars)
    types |= dict.fromkeys(("dq", "dk", "dv"), "*fp32" if add else f"*{dtype}")
    return backward_wide._key_gradient_kernel if by_key else backward_wide._query_gradient_kernel, config, types, []


def compile_case(kernel, config, types: dict[str, str], absent: list[str]) -> tuple[triton.compiler.CompiledKernel, str]:
    """Compile a case for a usual call, in which all pointers are multiples of 16. Return the kernel and the output of ptxas."""
    constants = {"CONFIG": config} | dict.fromkeys(absent)
    signature = {}
    for name in kernel.arg_names:
        pointer = "*i32" if name in INTEGERS else "*fp32" if name in ("lse", "state_m", "state_l", "state_o") else "i32"
        plain = "fp32" if name in ("scale", "log2_scale") else pointer
        signature[name] = "constexpr" if name in constants else types.get(name, plain)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"}
    source = GluonASTSource(kernel, signature, constants, aligned)
    options = OPTIONS | dict(num_warps=4, maxnreg=getattr(config, "max_registers", None))
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        compiled = compile_source(source, options)
    assert "ptxas info" in log.getvalue()
    return compiled, log.getvalue()


def count_spills(compiled: triton.compiler.CompiledKernel) -> list[int]:
    """Return, for every innermost loop with matrix products, how often it loads from or stores to the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    jumps = [(labels[found[1]], i) for i, line in enumerate(lines) if (found := re.search(r"BRA `\((\.L\w+)\)", line))]
    # HGMMA and QGMMA are wgmma instructions. LDL and STL load from and store to the stack.
    products = [i for i, line in enumerate(lines) if "HGMMA" in line or "QGMMA" in line]
    loops = [(first, last) for first, last in jumps if any(first < i < last for i in products)]
    inner = [(a, b) for a, b in loops if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in loops)]
    return [sum("LDL" in line or "STL" in line for line in lines[a:b]) for a, b in inner]


def unused_barriers(compiled: triton.compiler.CompiledKernel) -> list[str]:
    """Return the mbarriers that the kernel initialises but does not wait for."""
    text = compiled.asm["ttgir"]
    sources = dict(re.findall(r"(%[\w#]+) = ttg\.memdesc_\w+ (%[\w#]+)", text))

    def allocation(name: str) -> str:
        return allocation(sources[name]) if name in sources else name

    used = re.findall(r"ttng\.wait_barrier (%[\w#]+)", text)
    used += [name.strip() for names in re.findall(r"ttg\.warp_specialize\((.*?)\)", text) for name in names.split(",")]
    initialised = map(allocation, re.findall(r"ttng\.init_barrier (%[\w#]+)", text))
    return sorted(set(initialised) - set(map(allocation, used)))


def describe(argument: str) -> dict:
    """Compile a case, and return its resources and warnings.

    A case is direction:dtype:head dim:query heads per key head:kind, such as forward:bf16:128:1:final.
    """
    name, dtype, dim, group, kind = argument.split(":")
    make_case = {
        "forward": forward_case,
        "short-forward": forward_case,
        "wide-forward": wide_forward_case,
        "fp8-forward": fp8_forward_case,
        "backward": backward_case,
        "wide-backward": wide_backward_case,
    }[name]
    compiled, log = compile_case(*make_case(dtype, int(dim), int(group), kind))
    # If the steps of a pipeline need too many registers, ptxas serialises its wgmma instructions and prints why.
    result = dict(case=argument, dim=int(dim), serialized=[line for line in log.splitlines() if "serialized" in line])
    result |= dict(spills=count_spills(compiled), unused_barriers=unused_barriers(compiled))
    return result | resources(compiled)
