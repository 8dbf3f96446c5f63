"""Convert q, k and v to e4m3 in a single launch. `ringattn.kernels.fp8` explains the format and contains the PyTorch version.

A program converts one block of 128 tokens of one head. The programs of q come first in the grid, then those of k and of v.

The results differ from those of the PyTorch version in two ways. The rotation adds in another order, so an element may be
rounded to a neighbouring e4m3 number, and a scale may differ if the largest element of a block is close to a power of two times
448. If a block contains an infinite element or NaN, its scale may differ, too.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import fp8
from ringattn.kernels.fp8 import HEAD_DIMS, QuantizedRows, QuantizedValues

BLOCK = tl.constexpr(fp8.BLOCK)

# The number of warps per program. On an H100, these settings were the fastest.
NUM_WARPS = {64: 4, 128: 4, 256: 8}

# The largest Hadamard matrix that a program loads. For a larger head dim, the rotation of a row is computed from the rotations
# of its two halves.
MAX_MATRIX = 128

# The exponent of a scale is in [-126, 126], so that the scale and its inverse are normal fp32 numbers.
MAX_EXPONENT = tl.constexpr(126)


@triton.jit
def _scales(largest):
    """Return the scale of a block and its inverse. `largest` is the largest magnitude of an element of the block."""
    bits = largest.to(tl.int32, bitcast=True)
    # The largest e4m3 number is 448 = 2**8 * 1.75. The scale of a block with the largest element 2**e * 1.f is 2**(e - 8), or
    # twice this number if 1.f exceeds 1.75. The 23 bits of the mantissa of 1.75 are 0x600000.
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(largest == 0.0, 0, tl.minimum(tl.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT))
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True), ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round(x):
    """Round x to e4m3. An infinite element becomes NaN; the conversion itself would round it to 448."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan")).to(tl.float8e4nv)


@triton.jit
def _rotated_part(x, signs, matrix, FIRST: tl.constexpr, PART: tl.constexpr):
    """Return the columns [FIRST, FIRST + PART) of a tile times their signs and the Hadamard matrix, in fp32.

    `x` is (pointers to the first column, mask of the rows).
    """
    pointers, mask = x
    columns = FIRST + tl.arange(0, PART)
    tile = tl.load(pointers + columns[None, :], mask=mask, other=0.0)
    tile *= tl.load(signs + columns)[None, :]
    if tile.dtype == tl.float32:
        # An fp32 number is the sum of three bf16 numbers. Their products with 1 and -1 are exact on the tensor cores.
        high = tile.to(tl.bfloat16)
        rest = tile - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, matrix) + tl.dot(middle, matrix) + tl.dot(high, matrix)
    else:
        return tl.dot(tile, matrix)


@triton.jit
def _quantize_rows(
    x, out, scales, strides, position, num_tokens, heads, signs, matrix, FACTOR: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Rotate and round one block of queries or keys.

    Args:
        x, out: (B, N, H, DIM); out is contiguous.
        scales: (B, C, H).
        strides: the strides of x, without the last one, which is 1.
        position: (batch entry, block, head).
        signs, matrix: see `_rotation`.
        FACTOR: 1 / sqrt(DIM).
    """
    batch, block, head = position
    PART: tl.constexpr = matrix.shape[0]
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    mask = (tokens < num_tokens)[:, None]
    source = x + batch.to(tl.int64) * strides[0] + tokens.to(tl.int64)[:, None] * strides[1] + head * strides[2], mask
    row = (batch.to(tl.int64) * num_tokens + tokens) * heads + head
    target = out + row[:, None] * DIM + tl.arange(0, PART)[None, :]
    scale_pointer = scales + (batch.to(tl.int64) * tl.cdiv(num_tokens, BLOCK) + block) * heads + head
    first = _rotated_part(source, signs, matrix, 0, PART)
    if DIM == PART:
        first *= FACTOR
        scale, inverse = _scales(tl.max(tl.abs(first)))
    else:
        # The Hadamard matrix of twice the size is [[H, H], [H, -H]].
        second = _rotated_part(source, signs, matrix, PART, PART)
        first, second = (first + second) * FACTOR, (first - second) * FACTOR
        scale, inverse = _scales(tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second))))
        tl.store(target + PART, _round(second * inverse), mask=mask)
    tl.store(target, _round(first * inverse), mask=mask)
    tl.store(scale_pointer, scale)


@triton.jit
def _quantize_values(x, out, scales, strides, position, num_tokens, heads, DIM: tl.constexpr):
    """Round one block of values. `out` is (B, C, H, DIM, 128) and contiguous.

    The other arguments are as for `_quantize_rows`.
    """
    batch, block, head = position
    # Load the keys in the order in which the tile contains them, see `ringattn.kernels.fp8`.
    position_in_tile = tl.arange(0, BLOCK)
    h, t, b = position_in_tile % 32 // 16, position_in_tile % 16 // 4, position_in_tile % 4
    tokens = block * BLOCK + position_in_tile // 32 * 32 + 8 * (2 * h + b // 2) + 2 * t + b % 2
    columns = tl.arange(0, DIM)
    source = x + batch.to(tl.int64) * strides[0] + tokens.to(tl.int64)[:, None] * strides[1] + head * strides[2]
    tile = tl.load(source + columns[None, :], mask=(tokens < num_tokens)[:, None], other=0.0).to(tl.float32)
    scale, inverse = _scales(tl.max(tl.abs(tile)))
    number = (batch.to(tl.int64) * tl.cdiv(num_tokens, BLOCK) + block) * heads + head
    target = out + number * (DIM * BLOCK) + columns[:, None] * BLOCK + position_in_tile[None, :]
    tl.store(target, tl.trans(_round(tile * inverse)))
    tl.store(scales + number, scale)


@triton.jit
def _split_index(index, heads, num_tokens):
    """Return (batch entry, block, head) of a program, where `index` counts the programs of a tensor."""
    blocks = tl.cdiv(num_tokens, BLOCK)
    return index // (heads * blocks), index // heads % blocks, index % heads


# The strides are specialised, because 16-byte loads require that they are multiples of 16.
@triton.jit(do_not_specialize=["batch", "num_queries", "num_keys"])
def _quantize_kernel(
    q, k, v, q_out, k_out, v_out, q_scales, k_scales, v_scales, signs, matrix, batch, num_queries, num_keys,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, FACTOR: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Convert q, k and v. The function `quantize` launches this kernel."""
    index = tl.program_id(0)
    num_q = batch * tl.cdiv(num_queries, BLOCK) * Q_HEADS
    num_k = batch * tl.cdiv(num_keys, BLOCK) * K_HEADS
    if index < num_q + num_k:
        rows = tl.arange(0, PART)
        hadamard = tl.load(matrix + rows[:, None] * PART + rows[None, :])
        if index < num_q:
            position = _split_index(index, Q_HEADS, num_queries)
            strides = q_batch, q_token, q_head
            _quantize_rows(q, q_out, q_scales, strides, position, num_queries, Q_HEADS, signs, hadamard, FACTOR, DIM)
        else:
            position = _split_index(index - num_q, K_HEADS, num_keys)
            strides = k_batch, k_token, k_head
            _quantize_rows(k, k_out, k_scales, strides, position, num_keys, K_HEADS, signs, hadamard, FACTOR, DIM)
    else:
        position = _split_index(index - num_q - num_k, K_HEADS, num_keys)
        _quantize_values(v, v_out, v_scales, (v_batch, v_token, v_head), position, num_keys, K_HEADS, DIM)


@lru_cache(maxsize=64)
def _rotation(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (signs, matrix): the signs (D,) of the rotation, and the Hadamard matrix (P, P) of ones with P = min(D, 128)."""
    part = min(dim, MAX_MATRIX)
    # The first column of a Hadamard matrix contains only ones.
    signs = fp8.rotation(dim, device)[:, 0].sign()
    matrix = fp8.rotation(part, device).sign()
    return signs.to(dtype), (matrix * matrix[:, :1]).to(torch.bfloat16 if dtype == torch.float32 else dtype)


def _convert(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the e4m3 data and the scales of q, k and v. All have the same dtype and the same head dim in HEAD_DIMS."""
    (batch, num_queries, query_heads, dim), (num_keys, key_heads) = q.shape, k.shape[1:3]
    device, query_blocks, key_blocks = q.device, fp8.num_blocks(num_queries), fp8.num_blocks(num_keys)
    # The kernel requires that the last dimension is contiguous.
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    shapes = q.shape, k.shape, (batch, key_blocks, key_heads, dim, fp8.BLOCK)
    data = [torch.empty(shape, dtype=fp8.DTYPE, device=device) for shape in shapes]
    shapes = (batch, query_blocks, query_heads), (batch, key_blocks, key_heads), (batch, key_blocks, key_heads)
    scales = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]
    programs = batch * (query_blocks * query_heads + 2 * key_blocks * key_heads)
    if programs:
        strides = [stride for x in (q, k, v) for stride in x.stride()[:3]]
        signs, matrix = _rotation(dim, q.dtype, device)
        numbers = batch, num_queries, num_keys, *strides
        constants = dict(Q_HEADS=query_heads, K_HEADS=key_heads, FACTOR=dim**-0.5, DIM=dim, PART=min(dim, MAX_MATRIX))
        options = dict(num_warps=NUM_WARPS[dim])
        with torch.cuda.device_of(q):
            _quantize_kernel[(programs,)](q, k, v, *data, *scales, signs, matrix, *numbers, **constants, **options)
    return data, scales


def quantize(q: Tensor, k: Tensor, v: Tensor) -> tuple[QuantizedRows, QuantizedRows, QuantizedValues]:
    """Convert q (B, Nq, Hq, D), k (B, Nk, Hkv, D) and v (B, Nk, Hkv, Dv) in fp16, bf16 or fp32 to e4m3 on a GPU.

    If D and Dv are different or not in HEAD_DIMS, this function calls `ringattn.kernels.fp8.quantize`.
    """
    if q.shape[3] != v.shape[3] or q.shape[3] not in HEAD_DIMS:
        return fp8.quantize(q, k, v)
    (q, k, v), scales = _convert(q, k, v)
    return QuantizedRows(q, scales[0]), QuantizedRows(k, scales[1]), QuantizedValues(v.transpose(1, 2), scales[2])
