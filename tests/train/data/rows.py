"""Tokenised documents in memory."""

from collections.abc import Sequence

import numpy as np


class Rows:
    """A store of documents, as `ringattn.train.data.shards.Store`."""

    def __init__(self, rows: Sequence[Sequence[int]]):
        self._rows = [np.asarray(row, dtype=np.int32) for row in rows]
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)

    def read(self, number: int) -> np.ndarray:
        return self._rows[number]
