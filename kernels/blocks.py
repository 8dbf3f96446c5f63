"""Block-sparse attention: which (query block, key block) pairs are seen at all, on top of the intervals."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

SIZE_UNIT = 64


@dataclass(frozen=True, eq=False)
class BlockMask:
    """The rows of a query block see a key block only if the pair is kept, and of that block what their intervals allow.

    The lists that the kernels walk along are derived once and kept here: build the mask once and pass it to every call.

    Args:
        keep: bool (B or 1, Hq or 1, ceil(Nq / size), ceil(Nk / size)).
        size: rows of a block, a multiple of 64; 128 and its multiples let the kernels use their best tiles.

    Raises:
        ValueError: no tensor, another dtype, number of dimensions or size. Calls refuse what does not fit their q and k.
    """

    keep: Tensor
    size: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Tensor):
            raise ValueError(f"block mask is a {type(self.keep).__name__}: give a tensor of booleans")
        if self.keep.dtype != torch.bool or self.keep.dim() != 4:
            raise ValueError(
                f"block mask is {self.keep.dtype} of shape {tuple(self.keep.shape)}, "
                "but must be torch.bool (batch or 1, query heads or 1, query blocks, key blocks)"
            )
        if isinstance(self.size, float) or self.size <= 0 or self.size % SIZE_UNIT:
            raise ValueError(
                f"blocks of {self.size} rows: the size must be a multiple of {SIZE_UNIT}, as tiles may not cross blocks"
            )

    @cached_property
    def _key_lists(self) -> dict[int, Tensor]:
        return {}

    def cut(self, rows: slice, keys: slice) -> "BlockMask":
        """The mask of these query rows and key rows alone; both slices start at a block, or ValueError is raised."""
        if rows.start % self.size or keys.start % self.size:
            raise ValueError(f"rows from {rows.start} and keys from {keys.start} do not start at a block of {self.size}")
        rows, keys = (slice(x.start // self.size, -(-x.stop // self.size)) for x in (rows, keys))
        return BlockMask(self.keep[:, :, rows, keys], self.size)

    def dense(self, num_queries: int, num_keys: int) -> Tensor:
        """The mask written out as booleans (B or 1, Hq or 1, Nq, Nk): for the reference and for tests, never for training."""
        dense = self.keep.repeat_interleave(self.size, 2).repeat_interleave(self.size, 3)
        return dense[:, :, :num_queries, :num_keys]

    @cached_property
    def query_lists(self) -> Tensor:
        """For every query block its kept key blocks, see `_lists`: (B or 1, Hq or 1, query blocks, key blocks + 1, 2)."""
        return _lists(self.keep)

    def key_lists(self, group: int) -> Tensor:
        """For every key block the pairs (query block, query head of the key head's group of `group`) that keep it.

        Shape (B or 1, Hkv or 1, key blocks, query blocks * group + 1, 2), see `_lists`; the number of a pair is
        query block * group + head.
        """
        if group not in self._key_lists:
            heads = self.keep.shape[1]
            grouped = self.keep.unflatten(1, (-1, group)) if heads > 1 else self.keep[:, :, None].expand(-1, -1, group, -1, -1)
            self._key_lists[group] = _lists(grouped.permute(0, 1, 4, 3, 2).flatten(3))
        return self._key_lists[group]


def _lists(keep: Tensor) -> Tensor:
    """int32 (..., C + 1, 2) of bool (..., C): entry c is how many of the first c columns are kept, and the c-th kept column."""
    counts = pad(keep.cumsum(-1, dtype=torch.int32), (1, 0))
    columns = pad((~keep).byte().argsort(dim=-1, stable=True).int(), (0, 1))
    return torch.stack((counts, columns), -1)
