"""Documents of tests: tokenised documents in memory, and the documents of a source."""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from ringattn.train.data import sources
from ringattn.train.settings.config import ConfigError, DataConfig


class Rows:
    """A store of documents, as `ringattn.train.data.shards.Store`."""

    def __init__(self, rows: Sequence[Sequence[int]]):
        self._rows = [np.asarray(row, dtype=np.int32) for row in rows]
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)

    @property
    def keys(self) -> np.ndarray:
        return np.array([zlib.crc32(row.data) << 32 | len(row) for row in self._rows], dtype=np.uint64)

    def read(self, number: int) -> np.ndarray:
        return self._rows[number]


def read_documents(config: DataConfig) -> tuple[Iterator[sources.Entry], dict[str, int] | None]:
    """Read the documents of a corpus in one process.

    Returns:
        The documents, and the number of rows by split. The numbers are None for the whole split "train", because its rows are
        counted only at the end.

    Raises:
        ConfigError: a file or the column is missing. The iterator raises this error for a faulty document.
        Exception: a dataset of the hub or a split cannot be read. The type depends on the reader.
    """
    corpus = sources.Corpus(config)
    if sources.selects_all(config):
        return without_faults(entry for piece in corpus.pieces for entry in corpus.read(piece)), corpus.known_sizes
    counts = [sources.count_rows(corpus.read(piece)) for piece in corpus.pieces]
    sizes, tasks = sources.select_rows(config, corpus.pieces, counts)
    entries = (entry for piece, first, last in tasks for entry in sources.slice_rows(corpus.read(piece), first, last))
    return without_faults(entries), sizes


def without_faults(entries: Iterator[sources.Entry]) -> Iterator[sources.Entry]:
    for where, content in entries:
        if isinstance(content, ConfigError):
            raise content
        yield where, content
