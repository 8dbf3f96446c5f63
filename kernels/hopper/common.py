"""This module contains the TMA descriptors, mbarriers and support checks of all Hopper kernels.

On Hopper GPUs (sm_90), the Tensor Memory Accelerator (TMA) copies tiles between global and shared memory. A TMA descriptor
contains the shape and strides of a tensor, and the size of a tile. A warpgroup is 128 threads, which multiply matrices with the
instruction wgmma. An mbarrier is a barrier in shared memory that counts arrivals and bytes copied by TMA. A named barrier is
one of the 16 hardware barriers of a program (CTA).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringattn.kernels.hopper import NARROW_DIM
from ringattn.kernels.reference import Delta
from ringattn.kernels.tile_scheduler import CONSUMER_ROWS
from ringattn.kernels.triton.common import load_tile

MAX_DIM = 256

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}

TMA_DTYPES = DTYPES | {torch.float32: gl.float32, torch.float8_e4m3fn: gl.float8e4nv}

ROWS = gl.constexpr(CONSUMER_ROWS)

# The GPU has an instruction for exp2 but not for exp, so scores are in log2 units.
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)

PRODUCER_REGISTERS = gl.constexpr(24)

# Triton itself uses named barriers with numbers below 8.
FIRST_PING_PONG_BARRIER = gl.constexpr(8)

# Each named barrier synchronises two consumer warpgroups of 128 threads.
PING_PONG_THREADS = gl.constexpr(256)

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

# `forward_short` needs views of several buffers. Triton 3.8 rejects such views, and Triton 3.9 accepts them only as slices.
NEEDS_SLICES = gl.constexpr(TRITON_VERSION >= (3, 9))

# Triton 3.8 renamed the functions for TMA copies.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait

thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@dataclass(frozen=True)
class KernelConfig:
    """All Hopper kernels have these constants.

    Args:
        dim: the padded head dim.
        value_dim: Dv.
        num_heads: the number of query heads.
        group: the number of query heads per key head.
    """

    dim: int
    value_dim: int
    num_heads: int
    group: int

    @property
    def output_layout(self) -> gl.NVMMADistributedLayout:
        return accumulator_layout(self.dim)

    @property
    def p_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(operand_index=0, parent=self.output_layout, k_width=2)


@gluon.constexpr_function
def accumulator_layout(columns: int, bits: int = 16) -> gl.NVMMADistributedLayout:
    """Return the register layout of a wgmma result (64, columns) for operands of `bits` bits."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // bits])


def padded_dim(head_dim: int, value_dim: int) -> int:
    return 64 if max(head_dim, value_dim) <= 64 else NARROW_DIM


def padded_wide_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    return (192, 128) if head_dim <= 192 and value_dim <= 128 else (256, 256)


def delta_operands(delta: Delta, dout: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    operands = (None, delta[0], dout, delta[1]) if isinstance(delta, tuple) else (delta, None, None, None)
    return tuple(x if x is None else x.contiguous() for x in operands)


@lru_cache(maxsize=256)
def unsupported_reason(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    """Return why the Hopper kernels do not support a call, or None if they do."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"the Hopper kernels require an sm_90 GPU, and this GPU is sm_{major}{minor}"
    if dtype not in DTYPES:
        return f"{dtype} is not fp16 or bf16"
    for name, dim in zip(("query", "value"), dims, strict=True):
        if dim > MAX_DIM or dim % 8:
            return f"{name} head dim {dim} is not a multiple of 8 up to {MAX_DIM}"
    return None


@lru_cache(maxsize=64)
def num_programs(device: torch.device, shares_sms: bool) -> int:
    return 2**31 - 1 if shares_sms else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=64)
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), TMA_DTYPES[dtype])


def as_addressable(x: Tensor) -> Tensor:
    if x.data_ptr() % 16 == 0 and (x.is_contiguous() or _has_tma_strides(x.shape, x.stride(), 16 // x.element_size())):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _has_tma_strides(shape: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    """TMA requires that the last stride is 1, and that all other strides are multiples of 16 bytes."""
    outer = [stride for stride, size in zip(strides[:-1], shape, strict=False) if size > 1]
    return strides[-1] == 1 and all(stride > 0 and stride % unit == 0 for stride in outer)


def with_base(descriptor: TensorDescriptor, x: Tensor) -> TensorDescriptor:
    """Return a copy of `descriptor` for the tensor `x`, without the slow checks of the constructor."""
    copy = object.__new__(TensorDescriptor)
    copy.__dict__ = descriptor.__dict__ | {"base": x}
    return copy


@lru_cache(maxsize=1024)
def _descriptor_template(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...]
) -> TensorDescriptor:
    # TMA may reject the unused stride of a dimension of size 1.
    unit = 16 // dtype.itemsize
    strides = [stride if stride > 0 and stride % unit == 0 else unit for stride in strides[:-1]] + [1]
    return TensorDescriptor(
        torch.empty(1, dtype=dtype, device="cpu"), list(shape), strides, list(block), shared_layout(block, dtype)
    )


def tma_descriptor(x: Tensor, rows: int, dim: int, heads: int = 1) -> TensorDescriptor:
    """Return a TMA descriptor for tiles (rows, heads, dim) of x (B, N, H, D). The tensor x must come from `as_addressable`."""
    return block_descriptor(x, (1, rows, heads, dim))


def block_descriptor(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor:
    return with_base(_descriptor_template(x.shape, x.stride(), x.dtype, block), x)


@_core.builtin
def _tma_reduce_add(desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


# Triton has exported TMA's reduce-add since release 3.8.
tma_reduce_add = getattr(tma, "async_atomic_add", None) or _tma_reduce_add


@_core.builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    # Triton 3.9 renamed the method `_reinterpret` to `reinterpret`.
    change = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return change(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def tile_view(buffer, desc):
    return reinterpret(buffer, desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def as_left(tile, COLUMNS: gl.constexpr):
    return gl.convert_layout(tile, gl.DotOperandLayout(operand_index=0, parent=accumulator_layout(COLUMNS), k_width=2))


@gluon.jit
def allocate_barrier(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return SLOTS mbarriers. Allocate only mbarriers that the kernel waits for.

    If a kernel never waits for an mbarrier, Triton reuses the mbarrier's memory for other data. If processes share a GPU, the
    GPU saves and restores all initialised mbarriers. Restoring an unused mbarrier would then overwrite other data.
    """
    barrier = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(barrier.index(i), count=ARRIVALS)
    return barrier


@gluon.jit
def allocate_barriers(SLOTS: gl.constexpr, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr):
    return allocate_barrier(SLOTS, PRODUCERS), allocate_barrier(SLOTS, CONSUMERS)


@gluon.jit
def load_work_tile(work_tiles, index):
    """Load the entry `index` of `Intervals.work_tiles`.

    An entry with `end` = 0 follows the last work tile of a program. The producer warp runs ahead of the consumers, so every
    warpgroup loads its entries itself.
    """
    entry = work_tiles + index * 8
    first, end, loop = load_tile(entry)
    head, batch = gl.load(entry + 6), gl.load(entry + 7)
    return batch, head, first, end, loop


@gluon.jit
def step_start(loop, step, STEP: gl.constexpr):
    begin, _, _, _ = loop
    return begin + step * STEP


@gluon.jit
def num_steps(loop):
    """A work tile without keys still has one step."""
    _, _, num_unmasked, num_masked = loop
    return gl.maximum(num_masked + num_unmasked, 1)


@gluon.jit
def is_masked(loop, step):
    _, num_masked_prefix, num_unmasked, _ = loop
    return (step < num_masked_prefix) | (step >= num_masked_prefix + num_unmasked)


@gluon.jit
def execute(ASSEMBLY: gl.constexpr):
    """An inline assembly call must return a value, so assembly without a result must end with "mov.b32 $0, $1;"."""
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def sync_at(CONSUMER: gl.constexpr):
    # Triton 3.6 rejects an f-string as an argument, so assign the f-string to a constant first.
    SYNC: gl.constexpr = f"bar.sync {FIRST_PING_PONG_BARRIER + CONSUMER}, {PING_PONG_THREADS}; mov.b32 $0, $1;"
    execute(SYNC)


@gluon.jit
def arrive_at(CONSUMER: gl.constexpr):
    ARRIVE: gl.constexpr = f"bar.arrive {FIRST_PING_PONG_BARRIER + CONSUMER}, {PING_PONG_THREADS}; mov.b32 $0, $1;"
    execute(ARRIVE)
