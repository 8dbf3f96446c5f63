"""This module defines the FP8 format of attention inputs, and converts q, k and v to FP8 in PyTorch.

The format e4m3 has 4 exponent bits and 3 mantissa bits, and its largest number is 448. A *block* is 128 consecutive tokens of
one head and batch entry. The value of an element is its e4m3 number times the scale of its block:

    q, k    QuantizedRows      data (B, N, H, D)         scales (B, C, H) fp32
    v       QuantizedValues    data (B, H, C, D, 128)    scales (B, C, H) fp32          C = ceil(N / 128)

Scales. Scales are powers of two from 2^-126 to 2^126. Each block has the smallest scale such that its finite magnitudes are at
most 448 * scale. If all finite elements of a block are zero, the scale is 1. Elements that are not finite become NaN.

Rotation. Every query and key is first multiplied by the same orthogonal matrix, which does not change q k^T. The rotation
spreads outliers over all columns of a head, which removes most of the rounding error.

Values. For e4m3 operands, wgmma requires that the keys of V are contiguous in memory. Each block of values is therefore stored
as a transposed tile (D, 128 keys), padded with zeros. In each group of 32 keys, position 16 h + 4 t + b contains key
8 (2 h + b // 2) + 2 t + b % 2:

    position    0 1 2 3     4 5 6 7       8 9 10 11     12 13 14 15    16 17 18 19     ...
    key         0 1 8 9     2 3 10 11     4 5 12 13     6  7  14 15    16 17 24 25     ...

After the product q k^T, thread t of a quad holds the scores of the keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t. In an FP8 wgmma,
each thread holds four consecutive columns of the left operand. The order of keys above puts a thread's four keys into
consecutive columns, so threads exchange no data.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringattn.kernels.caching import cached_on_device
from ringattn.kernels.exact_products import exact_products
from ringattn.kernels.reference import state_dtype

BLOCK = 128  # tokens per scale
HEAD_DIMS = (64, 128, 256)  # equal head dims D and Dv for which a GPU has special kernels
DTYPE = torch.float8_e4m3fn
_MAX_MANTISSA, _MAX_EXPONENT = 0.875, 9
# For exponents from -126 to 126, a scale and its inverse are normal fp32 numbers.
_MIN_SCALE_EXPONENT, _MAX_SCALE_EXPONENT = -126, 126


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Queries or keys: e4m3 (B, N, H, D), the last dimension contiguous, and scales fp32 (B, ceil(N / 128), H)."""

    data: Tensor
    scales: Tensor


@dataclass(frozen=True, eq=False)
class QuantizedValues:
    """Values: e4m3 (B, H, ceil(N / 128), D, 128) with contiguous tiles (D, 128), and scales fp32 (B, ceil(N / 128), H).

    In memory, `data` stores blocks before heads, because a ring of GPUs sends whole blocks.
    """

    data: Tensor
    scales: Tensor


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


@cached_on_device(maxsize=None)
def rotation(dim: int, device: torch.device) -> Tensor:
    """Return the orthogonal fp32 matrix (D, D) that rotates queries and keys as x @ matrix."""
    # The matrix is cached, so it must not depend on the caller's autograd mode and default device.
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator(device="cpu").manual_seed(0)
        signs = 1.0 - 2.0 * torch.randint(2, (dim,), generator=generator, device="cpu").float()
        parts = [2**bit for bit in reversed(range(dim.bit_length())) if dim & 2**bit]
        matrix = torch.block_diag(*(_hadamard(part) / part**0.5 for part in parts))
        return (signs[:, None] * matrix).to(device)


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@cached_on_device(maxsize=None)
def key_order(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        group = [8 * (2 * h + b // 2) + 2 * t + b % 2 for h in range(2) for t in range(4) for b in range(4)]
        keys = [32 * g + key for g in range(BLOCK // 32) for key in group]
        return torch.tensor(keys, device="cpu").to(device)


def quantize_rows(x: Tensor, rotate: bool = True, per_block: bool = True) -> QuantizedRows:
    """Convert queries or keys (B, N, H, D) to e4m3. With the rotation, a row that contains an infinity or NaN becomes NaN.

    Attention uses the defaults. If `per_block` is False, all blocks of a head share one scale, for studies of rounding errors.
    """
    blocks, scales = _round(_rotate(x) if rotate else x.float(), per_block)
    return QuantizedRows(blocks.flatten(1, 2)[:, : x.shape[1]].contiguous().view(DTYPE), scales)


def quantize_values(x: Tensor, per_block: bool = True) -> QuantizedValues:
    """Convert values (B, N, H, D) of any floating-point dtype to e4m3 tiles."""
    blocks, scales = _round(x.float(), per_block)
    tiles = blocks.permute(0, 1, 3, 4, 2)[..., key_order(x.device)].contiguous()  # (B, C, H, D, 128)
    return QuantizedValues(tiles.view(DTYPE).transpose(1, 2), scales)


def quantize(q: Tensor, k: Tensor, v: Tensor) -> tuple[QuantizedRows, QuantizedRows, QuantizedValues]:
    return quantize_rows(q), quantize_rows(k), quantize_values(v)


def dequantize(x: QuantizedRows | QuantizedValues, dtype: torch.dtype, num_tokens: int | None = None) -> Tensor:
    """Convert e4m3 tensors to a contiguous tensor (B, N, H, D), which is exact in bf16, fp32 and fp64.

    The returned queries and keys are still rotated. For `QuantizedValues`, pass the number of tokens as `num_tokens` to remove
    the padding.
    """
    if isinstance(x, QuantizedRows):
        num_tokens = x.data.shape[1]
        blocks = _pad_to_blocks(x.data.to(dtype))
    else:
        tiles = x.data.to(dtype)[..., key_order(x.data.device).argsort()]
        blocks = tiles.permute(0, 2, 4, 1, 3)  # (B, C, 128, H, D)
    values = blocks * x.scales.to(dtype)[:, :, None, :, None]
    return values.flatten(1, 2)[:, :num_tokens].contiguous()


def rotate_back(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Apply the inverse rotation to x (B, N, H, D), such as a gradient with respect to rotated queries."""
    matrix = rotation(x.shape[-1], x.device).to(state_dtype(x.dtype))
    with exact_products(x.device):
        return (x.to(matrix.dtype) @ matrix.T).to(dtype or x.dtype)


def _rotate(x: Tensor) -> Tensor:
    with exact_products(x.device):
        return x.float() @ rotation(x.shape[-1], x.device)


def _pad_to_blocks(x: Tensor) -> Tensor:
    return pad(x, (0, 0, 0, 0, 0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def _round(x: Tensor, per_block: bool) -> tuple[Tensor, Tensor]:
    """Round x (B, N, H, D) in fp32 to e4m3. Return the bytes (B, C, 128, H, D) and the scales (B, C, H)."""
    blocks = _pad_to_blocks(x)
    finite = blocks.isfinite()
    largest = blocks.abs().masked_fill(~finite, 0).amax((2, 4))  # frexp(inf) is arbitrary
    if not per_block and largest.shape[1]:
        largest = largest.amax(1, keepdim=True).expand_as(largest)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2**exponent, with 0.5 <= mantissa < 1
    exponent = exponent - _MAX_EXPONENT + (mantissa > _MAX_MANTISSA)
    exponent = exponent.masked_fill(largest == 0, 0).clamp(_MIN_SCALE_EXPONENT, _MAX_SCALE_EXPONENT)
    # 2.0**exponent may be inexact on a GPU, so write the exponent into the bits of an fp32 number.
    scales = ((exponent + 127) << 23).view(torch.float32)
    # Some releases of PyTorch convert infinity to 448 instead of NaN.
    blocks = (blocks / scales[:, :, None, :, None]).masked_fill(~finite, float("nan"))
    return blocks.to(DTYPE).view(torch.uint8), scales
