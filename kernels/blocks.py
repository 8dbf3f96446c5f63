"""Block masks for block-sparse attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import index

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringattn.kernels.caching import SharedTensors, is_capturing

# Block sizes are multiples of 64, so that every tile of 64 x 64 elements lies within one block.
SIZE_UNIT = 64


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A query attends to a key if the interval mask allows it and `keep` is True for their blocks.

    Reuse one `BlockMask` for all calls, because it caches the lists of blocks that the kernels read.

    Args:
        keep: bool (B or 1, Hq or 1, ceil(Nq / size), ceil(Nk / size)).
        size: the number of queries or keys in a block, a multiple of 64. Block sizes that are multiples of 128 are fastest.
    """

    keep: Tensor
    size: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Tensor):
            raise ValueError(f"the block mask is a {type(self.keep).__name__}: give a tensor of booleans")
        if self.keep.dtype != torch.bool or self.keep.dim() != 4:
            raise ValueError(
                f"the block mask is {self.keep.dtype} of shape {tuple(self.keep.shape)}, "
                "but must be torch.bool (batch or 1, query heads or 1, query blocks, key blocks)"
            )
        try:
            object.__setattr__(self, "size", index(self.size))
        except TypeError:
            raise ValueError(f"block size={self.size!r}: must be an integer, a multiple of {SIZE_UNIT}") from None
        if self.size <= 0 or self.size % SIZE_UNIT:
            raise ValueError(f"block size={self.size}: must be a multiple of {SIZE_UNIT}, because no tile may cross two blocks")

    @cached_property
    def _cached_lists(self) -> SharedTensors:
        return SharedTensors()

    def restrict(self, queries: slice, keys: slice) -> "BlockMask":
        if queries.start % self.size or keys.start % self.size:
            raise ValueError(
                f"slices from {queries.start} and {keys.start}: both must be multiples of the block size {self.size}"
            )
        queries, keys = (slice(x.start // self.size, -(-x.stop // self.size)) for x in (queries, keys))
        return BlockMask(self.keep[:, :, queries, keys], self.size)

    def dense(self, num_queries: int, num_keys: int) -> Tensor:
        dense = self.keep.repeat_interleave(self.size, 2).repeat_interleave(self.size, 3)
        return dense[:, :, :num_queries, :num_keys]

    @property
    def query_lists(self) -> Tensor:
        """Return, for each query block, the list of its kept key blocks: int32 (B or 1, Hq or 1, query blocks, key blocks + 1,
        2).
        """
        return self._lists("queries", lambda: self.keep)

    def key_lists(self, group: int) -> Tensor:
        """Return, for each key block, the list of its kept columns: int32 (B or 1, Hkv or 1, key blocks, query blocks * group +
        1, 2). Column c is query block `c // group` of query head `c % group` of the group.
        """
        return self._lists(group, lambda: self._rows_by_key(group))

    def _rows_by_key(self, group: int) -> Tensor:
        heads = self.keep.shape[1]
        grouped = self.keep.unflatten(1, (-1, group)) if heads > 1 else self.keep[:, :, None].expand(-1, -1, group, -1, -1)
        return grouped.permute(0, 1, 4, 3, 2).flatten(3)

    def _lists(self, key: str | int, rows: Callable[[], Tensor]) -> Tensor:
        if key in self._cached_lists:
            return self._cached_lists[key]
        lists = _lists(rows())
        if not is_capturing(self.keep.device):
            self._cached_lists[key] = lists
        return lists


def _lists(keep: Tensor) -> Tensor:
    """List the columns of the True values in each row of the bool mask `keep` (..., C). Return int32 (..., C + 1, 2).

    Entry c of a list is (number of True values before column c, column of the c-th True value).
    """
    counts = pad(keep.cumsum(-1, dtype=torch.int32), (1, 0))
    columns = pad((~keep).byte().argsort(dim=-1, stable=True).int(), (0, 1))
    return torch.stack((counts, columns), -1)
