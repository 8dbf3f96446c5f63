"""Dropout of attention probabilities. Each kernel recomputes the entries of the dropout mask that it needs, so the mask is
never stored.

Dropout keeps an attention probability if a random unsigned 32-bit word is at least p * 2**32. The random word is the second
output of the generator Philox-4x32-7 (Salmon et al. 2011). The key of the generator is the seed, and its counter is (query
position, key position, query head, batch entry). Therefore the dropout mask is the same for all tile sizes, layouts and numbers
of ranks.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Philox-4x32 needs at least 7 rounds to pass BigCrush, a test suite for random number generators.
ROUNDS = 7
_WORD_MASK = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout of a call, with 0 <= p < 1 and 0 <= seed < 2**64.

    query_positions (Nq,) and key_positions (Nk,) are int32 positions in the whole sequence. first_head is the first query head
    of this rank.
    """

    p: float
    seed: int
    query_positions: Tensor
    key_positions: Tensor
    first_head: int = 0

    @property
    def threshold(self) -> int:
        # If p is close to 1, p * 2**32 is rounded up to 2**32, which needs 33 bits.
        return min(round(self.p * 2**32), _WORD_MASK)

    @property
    def factor(self) -> float:
        return 1 / (1 - self.p)

    def restrict(self, queries: slice, keys: slice) -> "Dropout":
        return replace(self, query_positions=self.query_positions[queries], key_positions=self.key_positions[keys])


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    # `>>` fills the upper bits of a negative product with ones, so mask the upper bits.
    product = x * constant
    return product >> 32 & _WORD_MASK, product & _WORD_MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """The `counter` is four broadcastable int64 tensors that contain 32-bit words."""
    a, b, c, d = counter
    low, high = seed & _WORD_MASK, seed >> 32
    for _ in range(rounds):
        (a_high, a_low), (c_high, c_low) = _multiply(0xD2511F53, a), _multiply(0xCD9E8D57, c)
        a, b, c, d = c_high ^ b ^ low, c_low, a_high ^ d ^ high, a_low
        low, high = (low + 0x9E3779B9) & _WORD_MASK, (high + 0xBB67AE85) & _WORD_MASK
    return a, b, c, d


def keep_mask(dropout: Dropout, batch: int, heads: int) -> Tensor:
    queries, keys = (x.long() & _WORD_MASK for x in (dropout.query_positions, dropout.key_positions))
    head, entry = (torch.arange(n, device=queries.device) for n in (heads, batch))
    counter = queries[:, None], keys, dropout.first_head + head[:, None, None], entry[:, None, None, None]
    return philox(counter, dropout.seed)[1].broadcast_to(batch, heads, len(queries), len(keys)) >= dropout.threshold
