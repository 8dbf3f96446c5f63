"""Define `PartialState`, the result of queries that have attended to only some of their keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.validation import FLOAT_DTYPES, as_integer, shown


class PartialState(NamedTuple):
    """The softmax state (m, l, o) of each query over some keys.

    For scores s, m = max s and l = sum exp(s - m), both (B, N, H), and o = sum exp(s - m) v, (B, N, H, D). The tensors are fp32
    (fp64 for fp64 queries). A query without keys has the state (-inf, 0, 0), the identity of `merge`. A Hopper kernel may
    return an m below the maximum, which `finalize` accepts.
    """

    m: Tensor
    l: Tensor
    o: Tensor

    @classmethod
    def empty(cls, q: Tensor, value_dim: int | None = None) -> "PartialState":
        """Return the state of queries that have not attended to any key.

        Args:
            q: (B, N, H, D); only its shape, dtype and device matter.
            value_dim: the head dim of o; None for D.

        Raises:
            ValueError: an argument is invalid.
        """
        is_dense = isinstance(q, Tensor) and q.layout is torch.strided and not q.is_nested
        if not is_dense or q.ndim != 4 or q.dtype not in FLOAT_DTYPES:
            raise ValueError(f"q={shown(q)}: it must be a dense tensor (B, N, H, D) of fp16, bf16, fp32 or fp64")
        value_dim = None if value_dim is None else as_integer("value_dim", value_dim)
        return cls(*reference.empty_state(q, q.shape[-1] if value_dim is None else value_dim))

    def merge(self, other: "PartialState") -> "PartialState":
        """Merge with a state of the same queries over other keys. The result covers the keys of both states.

        Merging is associative and commutative up to rounding, and never results in a NaN.

        Raises:
            ValueError: `other` is not a state of the same queries and values.
        """
        is_state = isinstance(other, tuple) and len(other) == 3 and all(isinstance(x, Tensor) for x in other)
        if not is_state or any(x.shape != y.shape for x, y in zip(self, other, strict=True)):
            shapes = [tuple(x.shape) for x in self]
            raise ValueError(f"other={shown(other)}: it must be a state (m, l, o) with the shapes {shapes} of this state")
        return PartialState(*reference.merge(self, other))

    def finalize(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return out = o / l in `dtype`, and lse = m + log l. An empty state yields out = 0 and lse = -inf.

        Raises:
            ValueError: `dtype` is not fp16, bf16, fp32 or fp64.
        """
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype={shown(dtype)}: it must be torch.float16, torch.bfloat16, torch.float32 or torch.float64")
        return reference.finalize(self, dtype)
