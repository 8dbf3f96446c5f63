"""What the Hopper kernels share: Gluon under its several names, tensor descriptors, and who can run them.

Gluon renames functions from release to release; every such call stands behind a name of this file.
"""

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.tile_scheduler import CONSUMER_ROWS

MAX_DIM = 128
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
ROWS = gl.constexpr(CONSUMER_ROWS)  # of one wgmma, which are a consumer's
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

# triton 3.8 calls the copies from global to shared memory loads
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def padded_dim(head_dim: int, value_dim: int) -> int:
    """The head dim of the tiles, 64 or 128: TMA fills the columns past a tensor's own with zeros."""
    return 64 if max(head_dim, value_dim) <= 64 else 128


@lru_cache(maxsize=256)
def refusal(device: torch.device, dtype: torch.dtype, dims: tuple[int, int]) -> str | None:
    """Why the Hopper kernels cannot compute on `device` with `dtype` and dims = (D, Dv); None if they can."""
    if device.type != "cuda":
        return f"they do not run on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"the GPU is sm_{major}{minor}, not sm_90"
    if dtype not in DTYPES:
        return f"{dtype} is not fp16 or bf16"
    for name, dim in zip(("query", "value"), dims, strict=True):
        if dim > MAX_DIM or dim % 8:
            return f"{name} head dim {dim} is not a multiple of 8 up to {MAX_DIM}"
    return None


@lru_cache(maxsize=64)
def num_programs(device: torch.device, shares_sms: bool) -> int:
    """How many programs may share the work: one a processor, or any number where other kernels may hold processors."""
    return 2**31 - 1 if shares_sms else torch.cuda.get_device_properties(device).multi_processor_count


def check(q: Tensor, v: Tensor, dropout: Dropout | None, blocks: BlockMask | None) -> None:
    """Raise ValueError for inputs and options that only the portable kernels take."""
    reason = refusal(q.device, q.dtype, (q.shape[-1], v.shape[-1]))
    if dropout is not None or blocks is not None:
        reason = "they have no dropout and no block masks"
    if v.shape[1] == 0:
        reason = "there are no keys"
    if reason is not None:
        raise ValueError(f"the Hopper kernels cannot run: {reason}; use the portable ones, backend='triton'")


@lru_cache(maxsize=64)
def shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of `block` in shared memory that both TMA and wgmma read."""
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES.get(dtype, gl.float32))


def as_strided_rows(x: Tensor) -> Tensor:
    """`x` (B, N, H, D) itself if TMA can address it, else a contiguous copy; D is a multiple of 8."""
    if x.data_ptr() % 16 == 0 and (x.is_contiguous() or _addressable(x.shape, x.stride())):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _addressable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    outer = [stride for stride, size in zip(strides[:-1], shape, strict=False) if size > 1]
    return strides[-1] == 1 and all(stride > 0 and stride % 8 == 0 for stride in outer)


def with_base(descriptor: TensorDescriptor, x: Tensor) -> TensorDescriptor:
    """`descriptor`, but of `x`. One that is made anew checks itself at length: one is made for each shape, and copied."""
    copy = object.__new__(TensorDescriptor)
    copy.__dict__ = descriptor.__dict__ | {"base": x}
    return copy


@lru_cache(maxsize=1024)
def _template(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, rows: int, dim: int) -> TensorDescriptor:
    block = (1, rows, 1, dim)
    # the stride of a dimension of one says nothing, and may be one that TMA refuses
    strides = [stride if stride > 0 and stride % 8 == 0 else 8 for stride in strides[:-1]] + [1]
    return TensorDescriptor(
        torch.empty(1, dtype=dtype, device="cpu"), list(shape), strides, list(block), shared_layout(block, dtype)
    )


def describe(x: Tensor, rows: int, dim: int) -> TensorDescriptor:
    """How TMA moves `rows` rows of one head of x (B, N, H, D); rows and columns that x lacks read as 0 and are not written."""
    return with_base(_template(x.shape, x.stride(), x.dtype, rows, dim), x)


@_core.builtin
def _tma_reduce_add(desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


# triton 3.8 exports it
tma_reduce_add = getattr(tma, "async_atomic_add", None) or _tma_reduce_add


@_core.builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """The same shared memory as another kind of tile."""
    # public from triton 3.9 on
    change = getattr(buffer, "reinterpret", None) or buffer._reinterpret
    return change(dtype, shape, layout, _semantic=_semantic)


@gluon.jit
def tile_view(buffer, desc):
    """A two-dimensional tile (rows, dim) of shared memory as the block that `desc` moves."""
    return reinterpret(buffer, desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def step_start(begin, num_masked_prefix, num_unmasked, num_masked, step, STEP: gl.constexpr):
    """First column of a step of the walk: the tiles to mask first, head then tail, then those that all rows see."""
    tile = gl.where(
        step < num_masked, step + gl.where(step < num_masked_prefix, 0, num_unmasked), num_masked_prefix + step - num_masked
    )
    return begin + tile * STEP


@gluon.jit
def wait_for_writes():
    """Wait until all that this partition has stored by TMA is written; `tma.store_wait` waits until it has been read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _barrier_assembly(instruction, number, threads):
    return f"{instruction} {number}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def named_barrier_arrive(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Count this partition's threads in at a hardware barrier without waiting."""
    ASSEMBLY: gl.constexpr = _barrier_assembly("bar.arrive", NUMBER, THREADS)
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_wait(NUMBER: gl.constexpr, THREADS: gl.constexpr):
    """Wait at a hardware barrier until THREADS threads have arrived, this partition's included."""
    ASSEMBLY: gl.constexpr = _barrier_assembly("bar.sync", NUMBER, THREADS)
    gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)
