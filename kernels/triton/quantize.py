"""Convert q, k and v to the FP8 format of `ringattn.kernels.fp8` in a single launch.

The rotation adds terms in another order than PyTorch, so a result may be rounded to a neighbouring e4m3 number. If the largest
element of a block is close to 448 times a power of two, the scale may also differ.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import fp8
from ringattn.kernels.caching import cached_on_device
from ringattn.kernels.fp8 import HEAD_DIMS, QuantizedRows, QuantizedValues
from ringattn.kernels.triton.launcher import OPTIONS

BLOCK = tl.constexpr(fp8.BLOCK)

NUM_WARPS = {64: 4, 128: 4, 256: 8}

# With 16-bit inputs and 168 registers per thread, an SM runs three programs instead of two.
MAX_REGISTERS = {128: 168}

# With Hadamard matrices larger than 64 x 64, the kernel would need more shared memory and L2 bandwidth.
PART = 64

# See `_MAX_SCALE_EXPONENT` in `ringattn.kernels.fp8`.
MAX_EXPONENT = tl.constexpr(126)


@triton.jit
def _scales(largest):
    """The argument `largest` is the largest magnitude of a finite element."""
    bits = largest.to(tl.int32, bitcast=True)
    # The scale of 448 = 2**8 * 1.75 is 1. The scale of 2**e * x with 1 <= x < 2 is 2**(e - 8), or 2**(e - 7) if x exceeds 1.75.
    # The 23 mantissa bits of 1.75 are 0x600000.
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(largest == 0.0, 0, tl.minimum(tl.maximum(exponent, -MAX_EXPONENT), MAX_EXPONENT))
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True), ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _largest(x):
    x = tl.abs(x)
    return tl.max(tl.where(x < float("inf"), x, 0.0))


@triton.jit
def _round(x):
    """Replace infinity by NaN, because the conversion to e4m3 would change infinity to 448."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan")).to(tl.float8e4nv)


@triton.jit
def _rotated_part(x, matrices, INDEX: tl.constexpr, PART: tl.constexpr):
    pointers, mask = x
    columns = tl.arange(0, PART)
    matrix = tl.load(matrices + (INDEX * PART + columns[:, None]) * PART + columns[None, :])
    tile = tl.load(pointers + INDEX * PART + columns[None, :], mask=mask, other=0.0)
    if tile.dtype == tl.float32:
        # An fp32 number is the sum of three bf16 numbers, whose products with 1 and -1 are exact.
        high = tile.to(tl.bfloat16)
        rest = tile - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, matrix) + tl.dot(middle, matrix) + tl.dot(high, matrix)
    else:
        return tl.dot(tile, matrix)


@triton.jit
def _rotated_parts(x, matrices, DIM: tl.constexpr, PART: tl.constexpr):
    """Return the rotated rows times sqrt(DIM), in slices of PART columns."""
    # The Hadamard matrix of twice the size is [[H, H], [H, -H]].
    if DIM == PART:
        return (_rotated_part(x, matrices, 0, PART),)
    elif DIM == 2 * PART:
        first, second = _rotated_part(x, matrices, 0, PART), _rotated_part(x, matrices, 1, PART)
        return first + second, first - second
    else:
        first, second = _rotated_part(x, matrices, 0, PART), _rotated_part(x, matrices, 1, PART)
        first, second = first + second, first - second
        third, fourth = _rotated_part(x, matrices, 2, PART), _rotated_part(x, matrices, 3, PART)
        third, fourth = third + fourth, third - fourth
        return first + third, second + fourth, first - third, second - fourth


@triton.jit
def _pointers(x, strides, batch, tokens, head):
    return x + batch.to(tl.int64) * strides[0] + tokens.to(tl.int64)[:, None] * strides[1] + head.to(tl.int64) * strides[2]


@triton.jit
def _quantize_rows(
    x, out, scales, strides, position, num_tokens, heads, matrices, FACTOR: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """The argument `position` is (batch entry, block, head)."""
    batch, block, head = position
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    mask = (tokens < num_tokens)[:, None]
    parts = _rotated_parts((_pointers(x, strides, batch, tokens, head), mask), matrices, DIM, PART)
    largest = _largest(parts[0])
    for i in tl.static_range(1, DIM // PART):
        largest = tl.maximum(largest, _largest(parts[i]))
    scale, inverse = _scales(largest * FACTOR)
    tl.store(scales + (batch.to(tl.int64) * tl.cdiv(num_tokens, BLOCK) + block) * heads + head, scale)
    row = (batch.to(tl.int64) * num_tokens + tokens) * heads + head
    target = out + row[:, None] * DIM + tl.arange(0, PART)[None, :]
    for i in tl.static_range(DIM // PART):
        # Multiplying by the inverse scale is exact, because the inverse is a power of two.
        tl.store(target + i * PART, _round(parts[i] * (FACTOR * inverse)), mask=mask)


@triton.jit
def _quantize_values(x, out, scales, strides, position, num_tokens, heads, DIM: tl.constexpr):
    """The shape of `out` is (B, C, H, DIM, 128)."""
    batch, block, head = position
    # `ringattn.kernels.fp8` explains the order of the keys in a tile of values.
    position_in_tile = tl.arange(0, BLOCK)
    h, t, b = position_in_tile % 32 // 16, position_in_tile % 16 // 4, position_in_tile % 4
    tokens = block * BLOCK + position_in_tile // 32 * 32 + 8 * (2 * h + b // 2) + 2 * t + b % 2
    columns = tl.arange(0, DIM)
    source = _pointers(x, strides, batch, tokens, head)
    tile = tl.load(source + columns[None, :], mask=(tokens < num_tokens)[:, None], other=0.0)
    scale, inverse = _scales(_largest(tile).to(tl.float32))
    number = (batch.to(tl.int64) * tl.cdiv(num_tokens, BLOCK) + block) * heads + head
    target = out + number * (DIM * BLOCK) + columns[:, None] * BLOCK + position_in_tile[None, :]
    tl.store(target, tl.trans(_round(tile.to(tl.float32) * inverse)))
    tl.store(scales + number, scale)


@triton.jit
def _split_index(index, heads, num_tokens):
    blocks = tl.cdiv(num_tokens, BLOCK)
    return index // (heads * blocks), index // heads % blocks, index % heads


# Let Triton specialise on the strides, because 16-byte loads require strides that are known multiples of 16.
@triton.jit(do_not_specialize=["batch", "num_queries", "num_keys"])
def _quantize_kernel(
    q, k, v, q_out, k_out, v_out, q_scales, k_scales, v_scales, matrices, batch, num_queries, num_keys,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, FACTOR: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    num_q = batch * tl.cdiv(num_queries, BLOCK) * Q_HEADS
    num_k = batch * tl.cdiv(num_keys, BLOCK) * K_HEADS
    # Triton may give the strides of q and k different integer types, so one variable must not hold both.
    q_strides, k_strides = (q_batch, q_token, q_head), (k_batch, k_token, k_head)
    if index < num_q + num_k:
        if index < num_q:
            position = _split_index(index, Q_HEADS, num_queries)
            _quantize_rows(q, q_out, q_scales, q_strides, position, num_queries, Q_HEADS, matrices, FACTOR, DIM, PART)
        else:
            position = _split_index(index - num_q, K_HEADS, num_keys)
            _quantize_rows(k, k_out, k_scales, k_strides, position, num_keys, K_HEADS, matrices, FACTOR, DIM, PART)
    else:
        position = _split_index(index - num_q - num_k, K_HEADS, num_keys)
        _quantize_values(v, v_out, v_scales, (v_batch, v_token, v_head), position, num_keys, K_HEADS, DIM)


@cached_on_device(maxsize=None)  # a captured CUDA graph contains the addresses of the matrices
def _matrices(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a Hadamard matrix for each slice of PART columns, with the rows multiplied by random signs."""
    signs = fp8.rotation(dim, device)[:, 0].sign()
    matrix = fp8.rotation(PART, device).sign()
    matrices = signs.view(-1, PART, 1) * (matrix * matrix[:, :1])
    return matrices.to(torch.bfloat16 if dtype == torch.float32 else dtype)


def _options(dim: int, dtype: torch.dtype) -> dict[str, int]:
    limited = dim in MAX_REGISTERS and dtype != torch.float32
    return OPTIONS | dict(num_warps=NUM_WARPS[dim]) | (dict(maxnreg=MAX_REGISTERS[dim]) if limited else {})


def _convert(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    (batch, num_queries, query_heads, dim), (num_keys, key_heads) = q.shape, k.shape[1:3]
    device, query_blocks, key_blocks = q.device, fp8.num_blocks(num_queries), fp8.num_blocks(num_keys)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    shapes = q.shape, k.shape, (batch, key_blocks, key_heads, dim, fp8.BLOCK)
    data = [torch.empty(shape, dtype=fp8.DTYPE, device=device) for shape in shapes]
    shapes = (batch, query_blocks, query_heads), (batch, key_blocks, key_heads), (batch, key_blocks, key_heads)
    scales = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]
    programs = batch * (query_blocks * query_heads + 2 * key_blocks * key_heads)
    if programs:
        strides = [stride for x in (q, k, v) for stride in x.stride()[:3]]
        numbers = batch, num_queries, num_keys, *strides
        constants = dict(Q_HEADS=query_heads, K_HEADS=key_heads, FACTOR=dim**-0.5, DIM=dim, PART=PART)
        with torch.cuda.device_of(q):
            _quantize_kernel[(programs,)](
                q, k, v, *data, *scales, _matrices(dim, q.dtype, device), *numbers, **constants, **_options(dim, q.dtype)
            )
    return data, scales


def quantize(q: Tensor, k: Tensor, v: Tensor) -> tuple[QuantizedRows, QuantizedRows, QuantizedValues]:
    """Compute `fp8.quantize`, with a single kernel if the head dims are equal and in HEAD_DIMS."""
    if q.shape[3] != v.shape[3] or q.shape[3] not in HEAD_DIMS:
        return fp8.quantize(q, k, v)
    (q, k, v), scales = _convert(q, k, v)
    return QuantizedRows(q, scales[0]), QuantizedRows(k, scales[1]), QuantizedValues(v.transpose(1, 2), scales[2])
