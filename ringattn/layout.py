"""Which positions of the sequence a rank holds. In every layout a shard is a sorted list of global positions.

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2      rank r holds the r-th chunk of P; under a causal mask the last rank works most
    zigzag       0 0 1 1 2 2 2 2 1 1 0 0      chunks r and 2P-1-r of 2P: equal causal work
    striped      0 1 2 0 1 2 0 1 2 0 1 2      every P-th position: equal causal work, and for short documents too

Chunks differ by at most one position where S does not divide; a rank may hold none at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

KINDS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Layout:
    """A sequence of `seq_len` positions cut into shards, one for each of `ranks` ranks."""

    kind: str
    seq_len: int
    ranks: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown layout {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.seq_len < 1 or self.ranks < 1:
            raise ValueError(f"seq_len = {self.seq_len}, ranks = {self.ranks}: both must be at least 1")

    @classmethod
    def contiguous(cls, seq_len: int, ranks: int) -> "Layout":
        """Rank r holds the r-th of P chunks."""
        return cls("contiguous", seq_len, ranks)

    @classmethod
    def zigzag(cls, seq_len: int, ranks: int) -> "Layout":
        """Rank r holds chunks r and 2P-1-r of 2P."""
        return cls("zigzag", seq_len, ranks)

    @classmethod
    def striped(cls, seq_len: int, ranks: int) -> "Layout":
        """Rank r holds the positions r, r + P, r + 2P, ..."""
        return cls("striped", seq_len, ranks)

    def positions(self, rank: int) -> Tensor:
        """The global positions of a rank's rows, int64, ascending."""
        return _positions(self, rank)

    def rows(self, rank: int) -> int:
        """How many rows a rank holds."""
        return sum(len(run) for run in self._runs(rank))

    def _runs(self, rank: int) -> list[range]:
        """A rank's positions as ascending ranges."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of a layout over {self.ranks} ranks: give 0 to {self.ranks - 1}")
        if self.kind == "striped":
            return [range(rank, self.seq_len, self.ranks)]
        chunks = [rank] if self.kind == "contiguous" else [rank, 2 * self.ranks - 1 - rank]
        total = self.ranks * len(chunks)
        return [range(i * self.seq_len // total, (i + 1) * self.seq_len // total) for i in chunks]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's rows of a whole sequence: `x` has `seq_len` rows along `dim`."""
        if x.shape[dim] != self.seq_len:
            raise ValueError(f"dimension {dim} has {x.shape[dim]} rows but the layout's sequence has {self.seq_len}")
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(self, x: Tensor | Sequence[Tensor], group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
        """The whole sequence, in order, on every rank: the inverse of `shard`. Not differentiable.

        Args:
            x: this rank's rows, gathered over `group`; or a list with every rank's rows, put together without a group.
        """
        if isinstance(x, Tensor):
            x = self._gather(x, group, dim)
        whole = torch.cat(list(x), dim)
        if whole.shape[dim] != self.seq_len:
            raise ValueError(f"the shards hold {whole.shape[dim]} rows but the layout's sequence has {self.seq_len}")
        order = torch.cat([self.positions(rank) for rank in range(self.ranks)]).argsort()
        return whole.index_select(dim, order.to(whole.device))

    def _gather(self, x: Tensor, group: dist.ProcessGroup | None, dim: int) -> list[Tensor]:
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("unshard passes no gradient: detach the shard, or compute the loss on shards")
        if self.ranks == 1:
            return [x]
        rows = [self.rows(rank) for rank in range(self.ranks)]
        x = x.movedim(dim, 0)
        padded = x.new_zeros(max(rows), *x.shape[1:])
        padded[: len(x)] = x
        gathered = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(gathered, padded, group=group)
        return [shard[:n].movedim(0, dim) for shard, n in zip(gathered, rows, strict=True)]


@lru_cache(maxsize=256)
def _positions(layout: Layout, rank: int) -> Tensor:
    runs = [torch.arange(run.start, max(run.start, run.stop), run.step) for run in layout._runs(rank)]
    return torch.cat(runs)
