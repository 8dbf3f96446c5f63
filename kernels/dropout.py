"""Dropout of attention probabilities. The dropout mask is never stored, because every kernel recomputes the part that it needs.

A pair (query, key) of a head is kept if a random 32-bit word, read as an unsigned integer, is at least p * 2**32. The word is
the second output of Philox-4x32-7 (Salmon et al. 2011). The key of Philox is the seed, and its counter is (query position, key
position, query head, batch entry). With this order of the counter and this output, the number of products that depend on both
positions is the smallest possible. The random word depends only on the seed and the counter, so tile sizes, layouts and the
number of ranks do not change the dropout mask.

Kept probabilities are multiplied by 1 / (1 - p). The maximum, the sum and the lse of a row are the same as without dropout.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The number of rounds of Philox. 7 is the smallest number with which Philox-4x32 passes the BigCrush tests of randomness.
ROUNDS = 7
_WORD_MASK = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Dropout:
    """The dropout of a call, which determines the dropped probabilities. `ringattn.kernels.validation` checks the values.

    Args:
        p: the probability that an attention probability is dropped, 0 <= p < 1.
        seed: 0 <= seed < 2**64.
        query_positions, key_positions: int32 (Nq,) and (Nk,), the positions of the call's queries and keys in the whole
            sequence.
        first_head: the index of the call's first query head among all query heads. It is not 0 if heads are split over ranks.
    """

    p: float
    seed: int
    query_positions: Tensor
    key_positions: Tensor
    first_head: int = 0

    @property
    def threshold(self) -> int:
        """The smallest random word with which a pair is kept."""
        # The threshold must fit into a 32-bit word. For the largest p below 1, p * 2**32 would be rounded up to 2**32.
        return min(round(self.p * 2**32), _WORD_MASK)

    @property
    def factor(self) -> float:
        """The factor by which kept probabilities are multiplied."""
        return 1 / (1 - self.p)

    def restrict(self, queries: slice, keys: slice) -> "Dropout":
        """Return the dropout for only these queries and keys."""
        return replace(self, query_positions=self.query_positions[queries], key_positions=self.key_positions[keys])


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of the 64-bit product of two 32-bit words."""
    # The product of two unsigned words may overflow int64 into the sign bit. The shift `>>` then inserts ones at the left,
    # which the mask removes.
    product = x * constant
    return product >> 32 & _WORD_MASK, product & _WORD_MASK


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Compute four random words for each counter with Philox-4x32.

    Args:
        counter: four int64 tensors with values in [0, 2**32). Their shapes must be broadcastable.
        seed: the key, 0 <= seed < 2**64.
        rounds: the number of rounds. The usual generators have 10 rounds.

    Returns:
        Four int64 tensors with values in [0, 2**32).
    """
    # Words are stored in int64 tensors, because PyTorch supports few operations on uint32.
    a, b, c, d = counter
    low, high = seed & _WORD_MASK, seed >> 32
    for _ in range(rounds):
        (a_high, a_low), (c_high, c_low) = _multiply(0xD2511F53, a), _multiply(0xCD9E8D57, c)
        a, b, c, d = c_high ^ b ^ low, c_low, a_high ^ d ^ high, a_low
        low, high = (low + 0x9E3779B9) & _WORD_MASK, (high + 0xBB67AE85) & _WORD_MASK
    return a, b, c, d


def keep_mask(dropout: Dropout, batch: int, heads: int) -> Tensor:
    """Return the dropout mask as a dense tensor. Only the reference and tests call this function.

    Returns:
        bool (batch, heads, Nq, Nk), which is True for the probabilities that are kept. `heads` is the number of query heads.
    """
    # Positions are int32. This function, like the kernels, interprets their bits as unsigned words.
    queries, keys = (x.long() & _WORD_MASK for x in (dropout.query_positions, dropout.key_positions))
    heads, batches = (torch.arange(n, device=queries.device) for n in (heads, batch))
    counter = queries[:, None], keys, dropout.first_head + heads[:, None, None], batches[:, None, None, None]
    return philox(counter, dropout.seed)[1].broadcast_to(batch, len(heads), len(queries), len(keys)) >= dropout.threshold
