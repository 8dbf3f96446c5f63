"""Block-sparse attention: which blocks of keys each block of queries attends to, in addition to the intervals."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

# The size of a block must be a multiple of this number. A tile may not cross the border between two blocks, and the sides of
# tiles are powers of two, so tiles with sides of 64 fit into blocks of every allowed size.
SIZE_UNIT = 64


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask over pairs of blocks.

    Queries attend to a block of keys only if the pair of blocks is kept. Within the block, their intervals apply.

    The lists of kept blocks that the kernels iterate over are derived once and cached in this object. Therefore create a block
    mask once and pass it to every call.

    Args:
        keep: bool (B or 1, Hq or 1, ceil(Nq / size), ceil(Nk / size)).
        size: number of queries or keys in a block, a multiple of 64. With multiples of 128, the kernels can use their fastest
            tiles.

    Raises:
        ValueError: `keep` is not a bool tensor with four dimensions, or the size is not a positive multiple of 64. The calls
            that take the mask check whether it fits q and k.
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
        if isinstance(self.size, float) or self.size <= 0 or self.size % SIZE_UNIT:
            raise ValueError(f"block size={self.size}: must be a multiple of {SIZE_UNIT}, because no tile may cross two blocks")

    @cached_property
    def _key_lists(self) -> dict[int, Tensor]:
        # This cache is a property and not a field, so that a copy of the object field by field starts with an empty cache.
        return {}

    def restrict(self, queries: slice, keys: slice) -> "BlockMask":
        """Return the mask of these queries and keys alone.

        Raises:
            ValueError: a slice does not start at the beginning of a block.
        """
        if queries.start % self.size or keys.start % self.size:
            raise ValueError(
                f"slices from {queries.start} and {keys.start}: both must be multiples of the block size {self.size}"
            )
        queries, keys = (slice(x.start // self.size, -(-x.stop // self.size)) for x in (queries, keys))
        return BlockMask(self.keep[:, :, queries, keys], self.size)

    def dense(self, num_queries: int, num_keys: int) -> Tensor:
        """Write out the mask as bool (B or 1, Hq or 1, Nq, Nk), for the reference and for tests, never for training."""
        # The last block may extend past the end of the sequence.
        dense = self.keep.repeat_interleave(self.size, 2).repeat_interleave(self.size, 3)
        return dense[:, :, :num_queries, :num_keys]

    @cached_property
    def query_lists(self) -> Tensor:
        """The kept key blocks of every query block: int32 (B or 1, Hq or 1, query blocks, key blocks + 1, 2), see `_lists`."""
        return _lists(self.keep)

    def key_lists(self, group: int) -> Tensor:
        """List, for every key block and key head, the pairs (query block, query head of the group) that keep the block.

        Args:
            group: number of query heads per key head, Hq / Hkv.

        Returns:
            int32 (B or 1, Hkv or 1, key blocks, query blocks * group + 1, 2), see `_lists`. The index of a pair is
            query block * group + head within the group.
        """
        if group not in self._key_lists:
            # Make heads and query blocks the last two dimensions, so that the list runs over the heads of one block after
            # another.
            heads = self.keep.shape[1]
            grouped = self.keep.unflatten(1, (-1, group)) if heads > 1 else self.keep[:, :, None].expand(-1, -1, group, -1, -1)
            self._key_lists[group] = _lists(grouped.permute(0, 1, 4, 3, 2).flatten(3))
        return self._key_lists[group]


def _lists(keep: Tensor) -> Tensor:
    """Turn each row of a mask into a list of its kept columns.

    Args:
        keep: bool (..., C).

    Returns:
        int32 (..., C + 1, 2). Entry c holds two independent numbers: how many of the first c columns are kept, and the index of
        the c-th kept column. Because the numbers are stored side by side, a kernel needs only one pointer for both.
    """
    counts = pad(keep.cumsum(-1, dtype=torch.int32), (1, 0))
    # A stable sort of "not kept" moves the kept columns to the front and leaves them in order.
    columns = pad((~keep).byte().argsort(dim=-1, stable=True).int(), (0, 1))
    return torch.stack((counts, columns), -1)
