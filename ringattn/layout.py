"""A layout determines which positions of the sequence each rank holds. Ranks hold their positions in ascending order.

The table shows which of P = 3 ranks holds each of twelve positions:

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2      rank r holds chunk r of P; under a causal mask the last rank has the most work
    zigzag       0 0 1 1 2 2 2 2 1 1 0 0      rank r holds chunks r and 2P-1-r of 2P: equal work under a causal mask
    striped      0 1 2 0 1 2 0 1 2 0 1 2      rank r holds every P-th position: equal work, even with short documents
    assigned     1 1 0 0 2 2 0 0 1 1 2 2      chunks of equal length, each assigned to a rank; see `ringattn.load_balance`

The lengths of contiguous and zigzag chunks differ by at most one position. The last assigned chunk may be shorter. A rank may
hold no position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ringattn.choices import KINDS
from ringattn.kernels.caching import cached
from ringattn.kernels.validation import as_integer, shown


@dataclass(frozen=True)
class Layout:
    """A layout divides a sequence of `seq_len` positions into one shard for each of `ranks` ranks.

    `kind` is one of KINDS, or "assigned-<rows>:<rank>,<rank>,...", which lists the rank of each chunk of <rows> positions. If
    `split` has divided the shards among U ranks, `kind` ends with "/<U>". Operators receive a layout as three arguments:
    `kind`, `seq_len` and `ranks`.
    """

    kind: str
    seq_len: int
    ranks: int

    def __post_init__(self) -> None:
        for name in ("seq_len", "ranks"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), 1))
        if not isinstance(self.kind, str):
            raise ValueError(f"the kind of the layout is {shown(self.kind)}: it must be one of {', '.join(KINDS)}")
        kind, split, parts = self.kind.partition("/")
        if split and not (parts.isdecimal() and int(parts) > 1 and self.ranks % int(parts) == 0):
            raise ValueError(f"layout {self.name!r} over {self.ranks} ranks: the parts must be at least 2 and divide the ranks")
        if kind.startswith("assigned-"):
            self._check_assigned(kind)
        elif kind not in KINDS:
            raise ValueError(f"unknown layout {self.name!r}: it must be one of {', '.join(KINDS)}")

    @classmethod
    def contiguous(cls, seq_len: int, ranks: int) -> "Layout":
        return cls("contiguous", seq_len, ranks)

    @classmethod
    def zigzag(cls, seq_len: int, ranks: int) -> "Layout":
        return cls("zigzag", seq_len, ranks)

    @classmethod
    def striped(cls, seq_len: int, ranks: int) -> "Layout":
        return cls("striped", seq_len, ranks)

    @classmethod
    def assigned(cls, owners: Sequence[int], rows: int, seq_len: int, ranks: int) -> "Layout":
        """Return the layout in which rank `owners[i]` holds chunk i of `rows` positions. The last chunk may be shorter.

        Raises:
            ValueError: the number of owners is not the number of chunks, or an owner is not a rank.
        """
        rows = as_integer("rows", rows, 1)
        owners = owners.tolist() if hasattr(owners, "tolist") else owners  # accepts tensors and arrays as well
        if not isinstance(owners, Sequence) or not len(owners):
            raise ValueError(f"owners={shown(owners)}: it must be a list with the rank of every chunk")
        names = ",".join(str(as_integer("an owner", owner)) for owner in owners)
        return cls(f"assigned-{rows}:{names}", seq_len, ranks)

    def split(self, parts: int) -> "Layout":
        """Divide each shard among `parts` ranks. Rank r * parts + i of the new layout holds slice i of shard r.

        Raises:
            ValueError: the layout is split already, or `parts` is less than 1.
        """
        parts = as_integer("parts", parts, 1)
        if self.parts > 1:
            raise ValueError(f"layout {self.name!r} cannot be split into {parts} parts, because it is split already")
        return self if parts == 1 else Layout(f"{self.kind}/{parts}", self.seq_len, self.ranks * parts)

    @property
    def parts(self) -> int:
        """Return the number of ranks over which `split` has divided each shard, or 1."""
        return int(self.kind.partition("/")[2] or 1)

    @property
    def whole(self) -> "Layout":
        """The layout before `split`."""
        return Layout(self.kind.partition("/")[0], self.seq_len, self.ranks // self.parts)

    @property
    def name(self) -> str:
        """Return a short name for logs. The name of an assigned layout omits the list of ranks."""
        name, _, parts = self.kind.partition("/")
        return name.partition(":")[0] + (f"/{parts}" if parts else "")

    # Even in inference mode or under a compiler, the cached result must be an ordinary tensor.
    @torch.inference_mode(False)
    @unset_fake_temporarily()
    def positions(self, rank: int) -> Tensor:
        """Return the global int64 positions of a rank's rows, in ascending order."""
        self._check_rank(rank)
        return self._positions(rank).clone()

    @cached(maxsize=256)
    @torch.inference_mode(False)
    @unset_fake_temporarily()
    def _positions(self, rank: int) -> Tensor:
        """Return the cached tensor of `positions`, which must not be modified."""
        begin, count = self.pieces(rank)
        rows = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        return torch.from_numpy(np.repeat(begin, count) + self.stride * rows)

    @property
    def stride(self) -> int:
        """Return the distance between consecutive positions of a piece, which exceeds 1 only in striped layouts."""
        return self.ranks // self.parts if self.kind.startswith("striped") else 1

    @cached(maxsize=256)
    def pieces(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide a rank's positions into pieces, and return (begin, count): int64 (pieces,), read-only.

        Piece i contains the positions begin[i] + j * stride for j = 0 to count[i] - 1.
        """
        self._check_rank(rank)
        if self.parts > 1:
            whole, part = self.whole, rank % self.parts
            begin, count = whole.pieces(rank // self.parts)
            rows = int(count.sum())
            first, end = part * rows // self.parts, (part + 1) * rows // self.parts
            before = count.cumsum() - count
            skipped = (first - before).clip(0, count)
            begin, count = begin + whole.stride * skipped, (end - before).clip(0, count) - skipped
        elif self.kind.startswith("assigned-"):
            rows, begin = _chunks(self.kind)[0], _chunk_starts(self.kind, self.ranks)[rank]
            count = (self.seq_len - begin).clip(max=rows)
        elif self.kind == "striped":
            begin, count = np.array([rank]), np.array([max(0, -((rank - self.seq_len) // self.ranks))])
        else:
            begin, end = np.array(self._bounds(rank)).T
            count = end - begin
        begin, count = begin[count > 0], count[count > 0]
        begin.flags.writeable = count.flags.writeable = False
        return begin, count

    def rows(self, rank: int) -> int:
        self._check_rank(rank)
        return _rows(self, rank)

    def _bounds(self, rank: int) -> list[tuple[int, int]]:
        chunks = [rank] if self.kind == "contiguous" else [rank, 2 * self.ranks - 1 - rank]
        total = self.ranks * len(chunks)
        return [(i * self.seq_len // total, (i + 1) * self.seq_len // total) for i in chunks]

    def _check_assigned(self, kind: str) -> None:
        try:
            rows, owners = _chunks(kind)
        except ValueError:
            raise ValueError(f"layout {self.name!r}: it must have the form assigned-<rows>:<rank>,<rank>,...") from None
        ranks = self.ranks // self.parts
        if rows < 1 or len(owners) != -(-self.seq_len // rows) or not 0 <= min(owners) <= max(owners) < ranks:
            raise ValueError(
                f"layout {self.name!r} has {len(owners)} owners from {min(owners)} to {max(owners)}: every chunk of the "
                f"{self.seq_len} positions must have one, from 0 to {ranks - 1}"
            )

    def _check_rank(self, rank: int) -> None:
        as_integer("rank", rank, high=self.ranks - 1, remedy=", a rank of the layout")

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return the rows of `x` that `rank` holds. The tensor `x` has the rows of the whole sequence along dimension `dim`.

        Raises:
            ValueError: `x` does not have `seq_len` rows, or the layout has no such rank.
        """
        self._check_rank(rank)
        _check_dim(x, dim)
        if x.shape[dim] != self.seq_len:
            raise ValueError(
                f"dimension {dim} of x has length {x.shape[dim]} but the layout's sequence has {self.seq_len} positions: "
                "pass the whole sequence"
            )
        return x.index_select(dim, self._positions(rank).to(x.device))

    def unshard(self, x: Tensor | Sequence[Tensor], group: dist.ProcessGroup | None = None, dim: int = 1) -> Tensor:
        """Gather the shards: return the whole sequence on every rank, in the order of positions, without gradients.

        Args:
            x: this rank's rows, or a list with the rows of every rank.
            group: the ranks of the layout; None for the default group. A list needs no group.
            dim: the dimension of the rows.

        Raises:
            ValueError: the number of rows or ranks is wrong, or `x` requires a gradient.
        """
        rows = [self.rows(rank) for rank in range(self.ranks)]
        if isinstance(x, Tensor):
            _check_dim(x, dim)
            x = self._gather(x, rows, group, dim)
        elif not isinstance(x, Sequence):
            raise ValueError(f"x is a {type(x).__name__}: it must be a tensor with this rank's rows, or a list of tensors")
        for shard in x:
            _check_dim(shard, dim)
        if (given := [shard.shape[dim] for shard in x]) != rows:
            raise ValueError(f"the shards have {given} rows along dimension {dim} but the layout's shards have {rows}")
        whole = torch.cat(list(x), dim)
        # argsort inverts the permutation.
        order = torch.cat([self._positions(rank) for rank in range(self.ranks)]).argsort()
        return whole.index_select(dim, order.to(whole.device))

    def _gather(self, x: Tensor, rows: list[int], group: dist.ProcessGroup | None, dim: int) -> list[Tensor]:
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("x requires a gradient, which unshard does not compute: detach x, or compute the loss on shards")
        if self.ranks == 1:
            return [x]
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup) or group.size() != self.ranks:
            found = f"has {group.size()} ranks" if isinstance(group, dist.ProcessGroup) else f"is a {type(group).__name__}"
            raise ValueError(f"the group {found}: it must be the process group of the {self.ranks} ranks of the layout")
        if x.shape[dim] != rows[rank := dist.get_rank(group)]:
            raise ValueError(f"dimension {dim} has {x.shape[dim]} rows but the shard of rank {rank} has {rows[rank]}")
        x = x.movedim(dim, 0)
        # all_gather requires tensors of equal shape.
        padded = x.new_zeros(max(rows), *x.shape[1:])
        padded[: len(x)] = x
        gathered = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(gathered, padded, group=group)
        return [shard[:n].movedim(0, dim) for shard, n in zip(gathered, rows, strict=True)]


def _check_dim(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        raise ValueError(f"x is a {type(x).__name__}: it must be a dense tensor")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={shown(dim)}: it must be an integer from {-x.dim()} to {x.dim() - 1}, the dimension of the rows")


@cached(maxsize=16)
def _chunks(kind: str) -> tuple[int, list[int]]:
    rows, _, owners = kind.removeprefix("assigned-").partition(":")
    return int(rows), [int(owner) for owner in owners.split(",")]


@cached(maxsize=16)
def _chunk_starts(kind: str, ranks: int) -> list[np.ndarray]:
    rows, owners = _chunks(kind)
    order = np.array(owners).argsort(kind="stable")
    return np.split(rows * order, np.bincount(owners, minlength=ranks).cumsum()[:-1])


# torch.compile can trace global functions.
@cached(maxsize=256)
def _rows(layout: Layout, rank: int) -> int:
    if layout.parts > 1:
        whole, part = layout.whole.rows(rank // layout.parts), rank % layout.parts
        return (part + 1) * whole // layout.parts - part * whole // layout.parts
    if layout.kind.startswith("assigned-"):
        size, owners = _chunks(layout.kind)
        missing = len(owners) * size - layout.seq_len if owners[-1] == rank else 0
        return owners.count(rank) * size - missing
    if layout.kind == "striped":
        # how many of r, r + P, r + 2P, ... are below S
        return max(0, -((rank - layout.seq_len) // layout.ranks))
    return sum(end - begin for begin, end in layout._bounds(rank))
