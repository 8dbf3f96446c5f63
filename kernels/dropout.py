"""Dropout of attention probabilities: the mask is never stored, but drawn again wherever it is needed.

The pair (query, key) of a head is kept iff a random 32-bit word, as unsigned, is at least p * 2**32. The word is the second of
Philox-4x32-7 (Salmon et al. 2011) with the seed as key and (query position, key position, query head, batch) as counter: in
this order, and for this word, the fewest of its products depend on both positions. It depends on nothing else, so tile sizes,
layouts and the number of ranks do not change the mask. What is kept is scaled by 1 / (1 - p); the row's maximum, sum and lse
are those without dropout.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROUNDS = 7  # the fewest that pass BigCrush
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Dropout:
    """Which probabilities a call drops.

    Args:
        p: probability of being dropped, 0 <= p < 1.
        seed: 0 <= seed < 2**64.
        query_positions, key_positions: int32 (Nq,) and (Nk,), the places of the call's rows in the whole sequence.
        first_head: the place of the call's first query head among all, where heads are split over ranks.

    Raises:
        ValueError: anything outside the above.
    """

    p: float
    seed: int
    query_positions: Tensor
    key_positions: Tensor
    first_head: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError(f"dropout p is {self.p}, but must be at least 0 and less than 1")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"dropout seed is {self.seed}, but must be at least 0 and less than 2**64")
        if isinstance(self.first_head, float) or self.first_head < 0:
            raise ValueError(f"dropout first_head is {self.first_head}, but must be an integer of at least 0")
        for name, x in (("query_positions", self.query_positions), ("key_positions", self.key_positions)):
            if x.dtype != torch.int32 or x.dim() != 1:
                raise ValueError(f"{name} is {x.dtype} of shape {tuple(x.shape)}, but must be torch.int32 (rows,)")

    @property
    def threshold(self) -> int:
        """A pair is kept iff its word is at least this."""
        return min(round(self.p * 2**32), _WORD)

    @property
    def factor(self) -> float:
        """What kept probabilities are multiplied by."""
        return 1 / (1 - self.p)

    def cut(self, rows: slice, keys: slice) -> "Dropout":
        """The dropout of these query rows and key rows alone."""
        return replace(self, query_positions=self.query_positions[rows], key_positions=self.key_positions[keys])


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product with words held in int64: it wraps into the sign, which the mask removes."""
    product = x * constant
    return product >> 32 & _WORD, product & _WORD


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Philox-4x32: four random words for each counter.

    Args:
        counter: four int64 tensors with values in [0, 2**32) and shapes that broadcast.
        seed: the key, 0 <= seed < 2**64.
        rounds: 10 in the usual generators.

    Returns:
        Four int64 tensors with values in [0, 2**32).
    """
    a, b, c, d = counter
    low, high = seed & _WORD, seed >> 32
    for _ in range(rounds):
        (a_high, a_low), (c_high, c_low) = _multiply(0xD2511F53, a), _multiply(0xCD9E8D57, c)
        a, b, c, d = c_high ^ b ^ low, c_low, a_high ^ d ^ high, a_low
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return a, b, c, d


def keep_mask(dropout: Dropout, batch: int, heads: int) -> Tensor:
    """The mask written out, True where kept: bool (batch, heads, Nq, Nk) for query heads; for the reference and for tests."""
    queries, keys = (x.long() & _WORD for x in (dropout.query_positions, dropout.key_positions))
    heads, batches = (torch.arange(n, device=queries.device) for n in (heads, batch))
    counter = queries[:, None], keys, dropout.first_head + heads[:, None, None], batches[:, None, None, None]
    return philox(counter, dropout.seed)[1].broadcast_to(batch, len(heads), len(queries), len(keys)) >= dropout.threshold
