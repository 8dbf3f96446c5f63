"""Hold masks in fixed GPU memory, so that a CUDA graph can read another mask in each replay.

Tables are padded with zeros to the largest size that a mask of the same shape can need.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.kernels.interval_mask import Intervals, packed_size, sides, unpack, with_memory


class MaskSlots:
    """A `MaskSlots` object holds the memory of several masks that were created with `is_replaced`. Before you create the
    object, run the kernels with the masks, so that all tables exist.

    Capture the CUDA graph with the masks in `self.masks`.
    """

    def __init__(self, masks: Sequence[Intervals], device: torch.device) -> None:
        self._keys = [tuple(side._tables) for side in sides(masks)]
        self._shapes = [
            shape
            for side, keys in zip(sides(masks), self._keys, strict=True)
            for shape in (side.lo.shape, side.hi.shape, *map(side.largest_table, keys))
        ]
        self._memory = torch.zeros(packed_size(self._shapes), dtype=torch.int32, device=device)
        self.masks = with_memory(masks, unpack(self._memory, self._shapes), with_host=False)

    def pack(self, masks: Sequence[Intervals]) -> Tensor:
        """`masks` must have the same shapes and tables as the masks given to the constructor."""
        packed = torch.zeros(self._memory.shape, dtype=torch.int32, device="cpu", pin_memory=self._memory.is_cuda)
        slots = iter(unpack(packed, self._shapes))
        for side, keys in zip(sides(masks), self._keys, strict=True):
            for x in (*side.host, *(side._tables[key] for key in keys)):
                next(slots)[tuple(map(slice, x.shape))] = x
        return packed

    def write(self, packed: Tensor) -> None:
        self._memory.copy_(packed, non_blocking=True)
