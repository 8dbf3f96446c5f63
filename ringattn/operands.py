"""Prepare q, k and v for the forward pass of a ring. With precision="fp8", round the tensors to FP8.

`PlainOperands` circulate without conversion. `QuantizedOperands` are rounded once to the FP8 format of `ringattn.kernels.fp8`.
The rounded tensors circulate as uint8, with rows in dimension 1:

    queries    e4m3 numbers of q   (B, N, Hq, D)      exponents (B, N, Hq)
    keys       e4m3 numbers of k   (B, M, Hkv, D)     exponents of k and v (B, M, 2, Hkv)
               e4m3 numbers of v   (B, M, Hkv, Dv)

The number of rows M is the number of tokens N, rounded up to a multiple of 128. In v, each group of 128 rows contains one
transposed tile (Dv, 128) per head. A group of 128 rows has one scale, and every row stores the scale's biased exponent (e8m0).
All ranges of rows in a schedule start at multiples of 128.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringattn.comm.transport import Tensors
from ringattn.kernels import dispatch, fp8
from ringattn.kernels.fp8 import BLOCK, QuantizedRows, QuantizedValues


class PlainOperands:
    """The inputs q (B, N, Hq, D), k (B, N, Hkv, D) and v (B, N, Hkv, Dv) of a rank, contiguous."""

    row_multiple = 1  # the argument of `Plan.schedule`

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.queries, self.keys = (q,), (k, v)

    def attend(self, queries: Tensors | None, keys: Tensors | None, *arguments: Any, **options: Any) -> Tensors:
        """Compute attention of `queries` to `keys`.

        `arguments` and `options` are those of `dispatch.forward`.
        """
        (q,), (k, v) = queries or self.queries, keys or self.keys
        return dispatch.forward(q, k, v, *arguments, **options)


class QuantizedOperands:
    """The FP8 inputs of a rank, rounded from q (B, N, Hq, D), k (B, N, Hkv, D) and v (B, N, Hkv, Dv)."""

    row_multiple = BLOCK

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.q, self.k, self.v = dispatch.quantize(q, k, v)
        self.dtype = q.dtype

    @cached_property
    def queries(self) -> Tensors:
        return _as_bytes(self.q.data), _exponents(self.q.scales)[:, : self.q.data.shape[1]].contiguous()

    @cached_property
    def keys(self) -> Tensors:
        k, v = _as_bytes(self.k.data), _as_bytes(self.v.data).transpose(1, 2)  # v (B, C, Hkv, Dv, 128)
        k = pad(k, (0, 0, 0, 0, 0, -k.shape[1] % BLOCK))
        v = v.reshape(*k.shape[:3], v.shape[3])
        return k, v, torch.stack((_exponents(self.k.scales), _exponents(self.v.scales)), 2)

    def attend(
        self,
        queries: Tensors | None,
        keys: Tensors | None,
        *arguments: Any,
        precision: str = "fp8",
        dropout: None = None,
        **options: Any,
    ) -> Tensors:
        q = self.q if queries is None else _queries(*queries)
        k, v = (self.k, self.v) if keys is None else _keys(*keys)
        return dispatch.forward_fp8(q, k, v, *arguments, dtype=self.dtype, **options)


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _exponents(scales: Tensor) -> Tensor:
    """Convert scales (B, C, H) of groups of 128 rows to exponents of rows, uint8 (B, C * 128, H)."""
    return scales.to(torch.float8_e8m0fnu).view(torch.uint8).repeat_interleave(BLOCK, 1)


def _scales(exponents: Tensor) -> Tensor:
    """Convert exponents of rows (..., B, N, H) to fp32 scales (..., B, C, H) of groups of 128 rows."""
    return exponents[..., ::BLOCK, :].contiguous().view(torch.float8_e8m0fnu).float()


def _queries(data: Tensor, exponents: Tensor) -> QuantizedRows:
    return QuantizedRows(data.view(fp8.DTYPE), _scales(exponents))


def _keys(k: Tensor, v: Tensor, exponents: Tensor) -> tuple[QuantizedRows, QuantizedValues]:
    batch, rows, heads, value_dim = v.shape
    tiles = v.flatten(1).view(batch, rows // BLOCK, heads, value_dim, BLOCK).transpose(1, 2)
    k_scales, v_scales = _scales(exponents.movedim(2, 0))
    return QuantizedRows(k.view(fp8.DTYPE), k_scales), QuantizedValues(tiles.view(fp8.DTYPE), v_scales)
