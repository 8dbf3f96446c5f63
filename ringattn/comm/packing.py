"""Pack the tensors of a block, or of a result, into one contiguous message. The receiver uses views of the message:

k, v  --copy-->  [ k | v ]  --send-->  [ k | v ]  --views-->  k, v
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes; every tensor starts at a cache line of the GPU

Shapes = tuple[tuple[int, tuple[int, ...], torch.dtype], ...]  # for each tensor (B, N, ...) of a block: B, (...), dtype
Memory = tuple[Tensor, tuple[Tensor, ...]]  # a message, and views of its tensors


@dataclass(frozen=True, eq=False)  # compared by identity, as a dictionary key
class Packing:
    """A `Packing` describes where the tensors of a block or of a result lie in a message."""

    size: int  # bytes of the message
    parts: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...], int], ...]  # dtype, shape, strides, offset in elements

    @classmethod
    def of(cls, shapes: Shapes, rows: int) -> "Packing":
        """Return the packing of tensors that have `rows` rows (dimension 1)."""
        size = 0
        parts: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]] = []
        for batch, rest, dtype in shapes:
            shape = torch.Size((batch, rows, *rest))
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            parts.append((dtype, shape, strides, size // dtype.itemsize))
            size += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(size, tuple(parts))

    @torch.inference_mode(False)  # inference tensors could not be modified outside of inference mode
    def new_message(self, device: torch.device) -> Memory:
        if len(self.parts) == 1:
            ((dtype, shape, *_),) = self.parts
            message = torch.empty(shape, dtype=dtype, device=device)
            return message, (message,)
        message = torch.empty(self.size, dtype=torch.uint8, device=device)
        views = {dtype: message.view(dtype) for dtype in {part[0] for part in self.parts}}
        return message, tuple(views[dtype].as_strided(shape, strides, offset) for dtype, shape, strides, offset in self.parts)

    def packed(self, block: tuple[Tensor, ...]) -> Tensor | None:
        first = block[0]
        if len(block) == 1:
            return first if first.is_contiguous() else None
        start, positions = first.data_ptr(), zip(block, self.parts, strict=True)
        if all(x.is_contiguous() and x.data_ptr() == start + offset * x.itemsize for x, (*_, offset) in positions):
            storage = first.untyped_storage()
            if (offset := start - storage.data_ptr()) + self.size <= storage.nbytes():
                return torch.empty(0, dtype=torch.uint8, device=first.device).set_(storage, offset, (self.size,), (1,))
        return None
