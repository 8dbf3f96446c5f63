"""Which positions of the sequence a rank holds. In every layout a shard is a sorted list of global positions.

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2      rank r holds the r-th chunk of P; under a causal mask the last rank works most
    zigzag       0 0 1 1 2 2 2 2 1 1 0 0      chunks r and 2P-1-r of 2P: equal causal work
    striped      0 1 2 0 1 2 0 1 2 0 1 2      every P-th position: equal causal work, and for short documents too
    dealt        1 1 0 0 2 2 0 0 1 1 2 2      chunks of equal length in any hands, named one by one; see `ringattn.load_balance`

Chunks differ by at most one position where S does not divide, but for the last one dealt, which may be shorter; a rank may hold
none at all. A layout over R ranks can be `split` for U ranks in the place of each one: consecutive slices of its shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ringattn.kernels.caching import cached

KINDS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Layout:
    """A sequence of `seq_len` positions cut into shards, one for each of `ranks` ranks.

    `kind` says all the rest, so that an operator can carry a layout as a string and two integers: one of KINDS, or
    "assigned-<rows>:<rank>,<rank>,...", the rank that holds each chunk of so many rows; then "/<U>" where it is split.
    """

    kind: str
    seq_len: int
    ranks: int

    def __post_init__(self) -> None:
        for name in ("seq_len", "ranks"):
            try:
                object.__setattr__(self, name, index(getattr(self, name)))
            except TypeError:
                raise ValueError(f"{name} = {getattr(self, name)}: give an integer") from None
        if self.seq_len < 1 or self.ranks < 1:
            raise ValueError(f"seq_len = {self.seq_len}, ranks = {self.ranks}: both must be at least 1")
        kind, split, parts = self.kind.partition("/")
        if split and not (parts.isdecimal() and int(parts) > 1 and self.ranks % int(parts) == 0):
            raise ValueError(f"layout {_short(self.kind)!r} over {self.ranks} ranks: give 2 or more parts, which divide them")
        if kind.startswith("assigned-"):
            _check_assigned(kind, self.seq_len, self.ranks // self.parts)
        elif kind not in KINDS:
            raise ValueError(f"unknown layout {_short(self.kind)!r}: choose one of {', '.join(KINDS)}")

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

    @classmethod
    def assigned(cls, owners: Sequence[int], rows: int, seq_len: int, ranks: int) -> "Layout":
        """Rank `owners[i]` holds the i-th chunk of `rows` positions, of which the last may be shorter.

        Raises:
            ValueError: another number of chunks than the sequence has, none, or an owner that is no rank.
        """
        if not len(owners):
            raise ValueError("no owners: give the rank of every chunk")
        return cls(f"assigned-{rows}:{','.join(str(int(owner)) for owner in owners)}", seq_len, ranks)

    def split(self, parts: int) -> "Layout":
        """Over `parts` times as many ranks: rank r * parts + i holds the i-th of `parts` slices of what rank r holds here.

        Raises:
            ValueError: a layout that is split already, or fewer than one part.
        """
        if self.parts > 1 or parts < 1:
            raise ValueError(f"layout {_short(self.kind)!r} in {parts} parts: split one that is whole, in at least 1 part")
        return self if parts == 1 else Layout(f"{self.kind}/{parts}", self.seq_len, self.ranks * parts)

    @property
    def parts(self) -> int:
        """How many ranks share the shard of one rank of `whole`; 1: not split."""
        return int(self.kind.partition("/")[2] or 1)

    @property
    def whole(self) -> "Layout":
        """The layout that this one was split from; itself if it was not."""
        return Layout(self.kind.partition("/")[0], self.seq_len, self.ranks // self.parts)

    @property
    def name(self) -> str:
        """The kind in a few letters, for a log."""
        return _short(self.kind)

    def positions(self, rank: int) -> Tensor:
        """The global positions of a rank's rows, int64, ascending.

        Raises:
            ValueError: no rank of the layout.
        """
        self._check_rank(rank)
        return _positions(self, rank)

    def rows(self, rank: int) -> int:
        """How many rows a rank holds.

        Raises:
            ValueError: no rank of the layout.
        """
        self._check_rank(rank)
        return _rows(self, rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of a layout over {self.ranks} ranks: give 0 to {self.ranks - 1}")

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """A rank's rows of a whole sequence: `x` has `seq_len` rows along `dim`.

        Raises:
            ValueError: `x` has another number of rows; no rank of the layout.
        """
        if x.shape[dim] != self.seq_len:
            raise ValueError(f"dimension {dim} has {x.shape[dim]} rows but the layout's sequence has {self.seq_len}")
        return x.index_select(dim, self.positions(rank).to(x.device))

    def unshard(self, x: Tensor | Sequence[Tensor], group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
        """The whole sequence, in order, on every rank: the inverse of `shard`. Not differentiable.

        Args:
            x: this rank's rows, gathered over `group` (None: the default group, not this process alone); or a list with every
                rank's rows, put together without a group.

        Raises:
            ValueError: the shards have other rows than the layout's, the group other ranks, or a gradient is asked for.
        """
        rows = [self.rows(rank) for rank in range(self.ranks)]
        if isinstance(x, Tensor):
            x = self._gather(x, rows, group, dim)
        if (held := [shard.shape[dim] for shard in x]) != rows:
            raise ValueError(f"the shards hold {held} rows along dimension {dim} but the layout's hold {rows}")
        whole = torch.cat(list(x), dim)
        order = torch.cat([self.positions(rank) for rank in range(self.ranks)]).argsort()
        return whole.index_select(dim, order.to(whole.device))

    def _gather(self, x: Tensor, rows: list[int], group: dist.ProcessGroup | None, dim: int) -> list[Tensor]:
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("unshard passes no gradient: detach the shard, or compute the loss on shards")
        if self.ranks == 1:
            return [x]
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup) or group.size() != self.ranks:
            found = f"has {group.size()} ranks" if isinstance(group, dist.ProcessGroup) else f"is a {type(group).__name__}"
            raise ValueError(f"the group {found}: give the process group of the {self.ranks} ranks of the layout")
        if x.shape[dim] != rows[rank := dist.get_rank(group)]:
            raise ValueError(f"dimension {dim} has {x.shape[dim]} rows but the shard of rank {rank} has {rows[rank]}")
        x = x.movedim(dim, 0)
        padded = x.new_zeros(max(rows), *x.shape[1:])
        padded[: len(x)] = x
        gathered = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(gathered, padded, group=group)
        return [shard[:n].movedim(0, dim) for shard, n in zip(gathered, rows, strict=True)]


def _short(kind: str) -> str:
    """`kind` without the owners of its chunks."""
    name, _, parts = kind.partition("/")
    return name.partition(":")[0] + (f"/{parts}" if parts else "")


@lru_cache(maxsize=16)  # the ring makes a layout anew from its string in every layer
def _chunks(kind: str) -> tuple[int, Tensor]:
    """The rows of a chunk and the chunks' owners, from "assigned-<rows>:<rank>,<rank>,..."."""
    rows, _, owners = kind.removeprefix("assigned-").partition(":")
    return int(rows), torch.tensor([int(owner) for owner in owners.split(",")], device="cpu")


def _check_assigned(kind: str, seq_len: int, ranks: int) -> None:
    try:
        rows, owners = _chunks(kind)
    except ValueError:
        raise ValueError(f"layout {_short(kind)!r}: write it as assigned-<rows>:<rank>,<rank>,...") from None
    if rows < 1 or len(owners) != -(-seq_len // rows) or not 0 <= owners.min() <= owners.max() < ranks:
        raise ValueError(
            f"layout {_short(kind)!r} names {len(owners)} owners from {owners.min()} to {owners.max()}: give one for each "
            f"chunk of {seq_len} positions, from 0 to {ranks - 1}"
        )


@cached(maxsize=256)
def _rows(layout: Layout, rank: int) -> int:
    """`len(_positions(...))` in integers alone, which a compiler can follow."""
    if layout.parts > 1:
        whole, part = layout.whole.rows(rank // layout.parts), rank % layout.parts
        return (part + 1) * whole // layout.parts - part * whole // layout.parts
    if layout.kind.startswith("assigned-"):
        size, _, owners = layout.kind.removeprefix("assigned-").partition(":")
        size, owners = int(size), [int(owner) for owner in owners.split(",")]
        missing = len(owners) * size - layout.seq_len if owners[-1] == rank else 0
        return owners.count(rank) * size - missing
    if layout.kind == "striped":
        return max(0, -((rank - layout.seq_len) // layout.ranks))
    return sum(end - begin for begin, end in _bounds(layout, rank))


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # kept: a gradient may pass by them later,
@unset_fake_temporarily()  # and real tensors may ask for them
def _positions(layout: Layout, rank: int) -> Tensor:
    if layout.parts > 1:
        whole, part = layout.whole.positions(rank // layout.parts), rank % layout.parts
        return whole[part * len(whole) // layout.parts : (part + 1) * len(whole) // layout.parts]
    if layout.kind.startswith("assigned-"):
        rows, owners = _chunks(layout.kind)
        positions = owners.eq(rank).nonzero() * rows + torch.arange(rows, device="cpu")
        return positions[positions < layout.seq_len]
    if layout.kind == "striped":
        return torch.arange(rank, max(rank, layout.seq_len), layout.ranks, device="cpu")
    return torch.cat([torch.arange(begin, end, device="cpu") for begin, end in _bounds(layout, rank)])


def _bounds(layout: Layout, rank: int) -> list[tuple[int, int]]:
    """(begin, end) of a rank's chunks, contiguous or zigzag."""
    chunks = [rank] if layout.kind == "contiguous" else [rank, 2 * layout.ranks - 1 - rank]
    total = layout.ranks * len(chunks)
    return [(i * layout.seq_len // total, (i + 1) * layout.seq_len // total) for i in chunks]
