"""PartialState: what a query row knows after seeing some of its keys. Everything distributed is a fold with `merge`."""

from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels import reference


class PartialState(NamedTuple):
    """The running softmax of query rows: m the row maximum, l = sum exp(s - m), o = sum exp(s - m) v; fp32.

    m, l: (B, N, H); o: (B, N, H, D). A row that has seen no key is (-inf, 0, 0), the identity of `merge`. Of the Hopper kernels
    m may be less than the maximum, by as much as l is the greater.
    """

    m: Tensor
    l: Tensor
    o: Tensor

    @classmethod
    def empty(cls, q: Tensor, value_dim: int | None = None) -> "PartialState":
        """The state of query rows `q` (B, N, H, D) before any key; `value_dim` None: D. fp64 for fp64 queries."""
        return cls(*reference.empty_state(q, q.shape[-1] if value_dim is None else value_dim))

    def merge(self, other: "PartialState") -> "PartialState":
        """The state after both sets of keys: alpha = exp(m_old - m_new) rescales each side. Total: no row makes a NaN."""
        return PartialState(*reference.merge(self, other))

    def finalize(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out = o / l in `dtype`, lse = m + log l); (0, -inf) for a row that saw no key."""
        return reference.finalize(self, dtype)
