"""Convert the inputs of a forward pass between the format in which they circulate and the format that the kernels read.

`Operands` is the interface through which `ringattn.ring` uses the inputs. `QuantizedOperands` in this module rounds the inputs
to the FP8 format of `ringattn.kernels.fp8`. Each rank rounds its own inputs once, and all other ranks receive the e4m3 numbers
and the scales as bytes. The circulating blocks consist of the following uint8 tensors. As in every circulating block, dimension
1 contains the rows:

    queries    e4m3 numbers of q   (B, N, Hq, D)      exponents (B, N, Hq)
    keys       e4m3 numbers of k   (B, M, Hkv, D)     exponents of k and v (B, M, 2, Hkv)
               e4m3 numbers of v   (B, M, Hkv, Dv)

M is N, rounded up to a multiple of 128. v is stored as transposed tiles. 128 rows together contain one tile (Dv, 128) of every
head, so a single row of v has no meaning. The 128 rows of a block have the same scale. Each of these rows stores the biased
exponent (e8m0) of this scale. In the schedule of an FP8 ring, all ranges of rows start at multiples of 128, see
`Plan.schedule`. Every part of a circulating block therefore contains the scales and the tiles of its rows.
"""

from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringattn.comm.transport import Tensors
from ringattn.kernels import dispatch, fp8
from ringattn.kernels.fp8 import BLOCK, QuantizedRows, QuantizedValues


class Operands(Protocol):
    """The queries, keys and values of one rank."""

    @property
    def queries(self) -> Tensors: ...  # the circulating block of the state ring

    @property
    def keys(self) -> Tensors: ...  # the circulating block of the KV ring

    @property
    def row_multiple(self) -> int: ...  # the argument of `Plan.schedule`

    def attend(
        self,
        queries: Tensors | None,
        keys: Tensors | None,
        *arguments: Any,
        **options: Any,
    ) -> Tensors:
        """Compute the attention of some queries to some keys. `arguments` and `options` are those of `dispatch.forward`.

        `queries` and `keys` are rows of circulating blocks. If one of them is None, all queries or all keys of this rank are
        used.
        """


class PlainOperands:
    """The inputs q (B, N, Hq, D), k (B, N, Hkv, D) and v (B, N, Hkv, Dv) of a rank, contiguous, as an `Operands`."""

    row_multiple = 1

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.queries, self.keys = (q,), (k, v)

    def attend(self, queries: Tensors | None, keys: Tensors | None, *arguments: Any, **options: Any) -> Tensors:
        """See `Operands.attend`."""
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
        """The circulating block of queries."""
        return _as_bytes(self.q.data), _exponents(self.q.scales)[:, : self.q.data.shape[1]].contiguous()

    @cached_property
    def keys(self) -> Tensors:
        """The circulating block of keys and values."""
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
        """See `Operands.attend`. The options `precision` and `dropout` must have their default values."""
        q = self.q if queries is None else _queries(*queries)
        k, v = (self.k, self.v) if keys is None else _keys(*keys)
        return dispatch.forward_fp8(q, k, v, *arguments, dtype=self.dtype, **options)


def _as_bytes(x: Tensor) -> Tensor:
    # gloo and NCCL do not send e4m3 numbers in every release of PyTorch.
    return x.view(torch.uint8)


def _exponents(scales: Tensor) -> Tensor:
    """Return the exponent of the scale of every row, uint8 (B, C * 128, H), from the scales (B, C, H)."""
    return scales.to(torch.float8_e8m0fnu).view(torch.uint8).repeat_interleave(BLOCK, 1)


def _scales(exponents: Tensor) -> Tensor:
    """Return the scales (B, C, H) in fp32 from the exponents of the rows (B, N, H). There may be more dimensions in front."""
    return exponents[..., ::BLOCK, :].contiguous().view(torch.float8_e8m0fnu).float()


def _queries(data: Tensor, exponents: Tensor) -> QuantizedRows:
    """Return some rows of a circulating block of queries in the format that the kernels read."""
    return QuantizedRows(data.view(fp8.DTYPE), _scales(exponents))


def _keys(k: Tensor, v: Tensor, exponents: Tensor) -> tuple[QuantizedRows, QuantizedValues]:
    """Return some rows of a circulating block of keys and values in the format that the kernels read."""
    batch, rows, heads, value_dim = v.shape
    # The rows of one batch entry are contiguous, even if the block is a part of a larger block.
    tiles = v.flatten(1).view(batch, rows // BLOCK, heads, value_dim, BLOCK).transpose(1, 2)
    k_scales, v_scales = _scales(exponents.movedim(2, 0))
    return QuantizedRows(k.view(fp8.DTYPE), k_scales), QuantizedValues(tiles.view(fp8.DTYPE), v_scales)
