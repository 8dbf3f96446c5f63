"""Define a batch of sequences, and the shard of a batch that one rank processes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ringattn import Layout


@dataclass(frozen=True)
class Batch:
    """B sequences of S tokens.

    Attributes:
        tokens: (B, S) int64.
        labels: (B, S) int64, the next tokens, or IGNORE for tokens without a loss.
        documents: for each sequence, the lengths of its documents, or parts of documents, which sum to S.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: tuple[tuple[int, ...], ...]

    def __reduce__(self):
        # Pickling numpy arrays is much faster than pickling tensors.
        return Batch._of_arrays, (self.tokens.numpy(), self.labels.numpy(), self.documents)

    @staticmethod
    def _of_arrays(tokens: np.ndarray, labels: np.ndarray, documents: tuple[tuple[int, ...], ...]) -> "Batch":
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), documents)


class Shard(NamedTuple):
    """Holds the tokens of a batch that one rank processes, on the device of the rank."""

    tokens: torch.Tensor  # int64 (B, N)
    labels: torch.Tensor  # int64 (B, N)
    positions: torch.Tensor  # int64 (N,), the positions of the tokens in their sequence

    @classmethod
    def of(cls, batch: Batch, layout: Layout, rank: int, device: torch.device) -> "Shard":
        """Copy the tokens of rank number `rank` to `device`. Copies to a GPU are asynchronous."""
        shards = layout.shard(batch.tokens, rank), layout.shard(batch.labels, rank), layout.positions(rank)
        if device.type == "cuda":
            # If the memory were not pinned, the host would wait for the GPU during the copy.
            shards = (x.pin_memory() for x in shards)
        return cls(*(x.to(device, non_blocking=True) for x in shards))
