"""Define a batch of sequences, which every data source returns."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Batch:
    """B sequences of S tokens.

    Attributes:
        tokens: (B, S) int64.
        labels: (B, S) int64, the token that follows each token. A label of IGNORE does not contribute to the loss. Labels are
            computed before the sequence is sharded, so no rank needs a token of another rank.
        documents: one tuple per sequence. The tuple contains the length of each document, or part of a document, in the
            sequence. The lengths sum to S.
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
