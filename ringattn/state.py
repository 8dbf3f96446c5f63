"""PartialState: what is known about queries after they have attended to some of their keys.

Every distributed computation of attention is a fold with `merge`: over tiles in a kernel, over hops in a ring, and over splits
of a KV cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels import reference


class PartialState(NamedTuple):
    """The running softmax of queries: the maximum m of the scores s, l = sum exp(s - m), and o = sum exp(s - m) v, in fp32.

    m and l have shape (B, N, H), and o has shape (B, N, H, D). A query that has not attended to any key has the state
    (-inf, 0, 0), which is the identity of `merge`. States of the Hopper kernels may contain an m below the maximum. Then l and
    o are larger by the same factor, and every result is the same.
    """

    m: Tensor
    l: Tensor
    o: Tensor

    @classmethod
    def empty(cls, q: Tensor, value_dim: int | None = None) -> "PartialState":
        """Return the state of queries that have not attended to any key.

        Args:
            q: (B, N, H, D). Only its shape, dtype and device matter. The state is fp32, or fp64 for fp64 queries.
            value_dim: the head dim of o; None for D.
        """
        return cls(*reference.empty_state(q, q.shape[-1] if value_dim is None else value_dim))

    def merge(self, other: "PartialState") -> "PartialState":
        """Return the state after both sets of keys: alpha = exp(m_old - m_new) rescales each side.

        Merging is associative and commutative, and never produces a NaN, not even for two empty states.
        """
        return PartialState(*reference.merge(self, other))

    def finalize(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (out = o / l in `dtype`, lse = m + log l). An empty state yields (0, -inf)."""
        return reference.finalize(self, dtype)
