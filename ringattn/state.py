"""PartialState: the intermediate result of attention for queries that have attended to only some of their keys.

Every distributed computation of attention combines partial states with `merge`. A kernel merges over tiles, a ring merges over
hops, and decoding merges over splits of a KV cache.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.kernels import reference


class PartialState(NamedTuple):
    """The running softmax of queries: the maximum m of the scores s, l = sum exp(s - m), and o = sum exp(s - m) v, in fp32.

    m and l have shape (B, N, H), and o has shape (B, N, H, D). A query that has not attended to any key has the state
    (-inf, 0, 0), which is the identity of `merge`. States of the Hopper kernels may contain an m below the maximum. In this
    case l and o are larger by the same factor, so merging and finalising give the same result.
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
        """Return the state of the queries after they have attended to the keys of both states.

        The factor alpha = exp(m_old - m_new) rescales the sums of each state to the common maximum m_new.

        Merging is associative and commutative up to rounding. The result never contains a NaN, even if both states are empty.
        """
        return PartialState(*reference.merge(self, other))

    def finalize(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (out = o / l in `dtype`, lse = m + log l). An empty state yields (0, -inf)."""
        return reference.finalize(self, dtype)
