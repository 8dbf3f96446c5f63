"""Mix the sequences of several sources, so that each source has a given share of the tokens.

Each sequence comes from one source. Sequence j of a source with the share w has the position (j + 1/2) / w in the mixture. The
mixture is sorted by these positions (Sainte-Laguë method). After any number of sequences, each source has provided its share to
within a few sequences. The index of a sequence determines its source. A checkpoint therefore only needs the number of consumed
sequences.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ringattn.train.data.documents import NumberedSequences, Progress
from ringattn.train.data.shards import Documents, JoinedParts


class MixtureDataset(NumberedSequences):
    """Mixes an endless series of sequences from several sources. The arguments and the index i determine sequence i.

    Attributes:
        sources: the sequences of each source, by name.
        weights: the share of each source in the tokens.
        sequences_per_epoch: the number of sequences before a source runs out.
        group_size: the number of consecutive sequences from one source.
    """

    def __init__(self, sources: Mapping[str, Any], weights: Iterable[float], group_size: int = 1):
        """Mix the sources in proportion to their weights.

        Args:
            sources: a PackedDataset or RecordDataset for each name.
            weights: the weight of each source, greater than 0.
        """
        self.sources, self.group_size = dict(sources), group_size
        self.seq_len = next(iter(self.sources.values())).seq_len
        given = np.array(list(weights), dtype=np.float64)
        self.weights = dict(zip(sources, (given / given.sum()).tolist(), strict=True))
        # The weights count tokens without padding, so a source with padding needs more sequences.
        sequences = given / [1 - self._padding(name) for name in sources]
        self._shares = sequences / sequences.sum()
        ends = {
            name: self._first_sequence(index, each.sequences_per_epoch) for index, (name, each) in enumerate(sources.items())
        }
        self.first_exhausted = min(ends, key=lambda name: ends[name])
        self.sequences_per_epoch = ends[self.first_exhausted]

    @property
    def fingerprint(self) -> dict[str, Any]:
        known = {name: each.fingerprint for name, each in self.sources.items()}
        # Checkpoints of earlier versions have no checksums, so `sources` must not contain checksums.
        checksums = [each.pop("checksum") for each in known.values()]
        sources = {name: [self.weights[name], each] for name, each in known.items()}
        return {"sequences": f"a mixture in groups of {self.group_size}", "sources": sources, "checksum": checksums}

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        counts, source = self._locate(index)
        return list(self.sources.values())[source].sequence(int(counts[source]))

    def progress(self, consumed: int) -> dict[str, Progress]:
        counts, _ = self._locate(consumed)
        return {
            name: Progress(round(count * each.seq_len * (1 - self._padding(name))), count / each.sequences_per_epoch)
            for (name, each), count in zip(self.sources.items(), counts.tolist(), strict=True)
        }

    def _padding(self, name: str) -> float:
        return getattr(self.sources[name], "padding", 0.0)

    def _locate(self, index: int) -> tuple[np.ndarray, int]:
        """Return the number of sequences before `index` from each source (int64), and the source of sequence `index`."""
        group, offset = divmod(index, self.group_size)
        counts, source = count_before(self._shares, group)
        counts *= self.group_size
        counts[source] += offset
        return counts, source

    def _first_sequence(self, source: int, number: int) -> int:
        latest = int((number + self.group_size) / self._shares[source]) + self.group_size * (len(self._shares) + 2)
        return bisect_right(range(latest), number, key=lambda index: int(self._locate(index)[0][source])) - 1


def count_before(shares: np.ndarray, position: int) -> tuple[np.ndarray, int]:
    """Return how many of the first `position` items come from each source, and the source of the next item.

    Args:
        shares: (sources,) float64, the shares, which sum to 1.
        position: the number of items.

    Returns:
        The number of items per source, int64 (sources,), and the index of the source of item `position`.
    """
    margin = len(shares)
    first = np.maximum(np.floor((position - margin) * shares).astype(np.int64) - 1, 0)
    stop = np.ceil((position + margin) * shares).astype(np.int64) + 2
    numbers = [np.arange(*bounds) for bounds in zip(first, stop, strict=True)]
    sources = np.repeat(np.arange(len(shares)), stop - first)
    times = (np.concatenate(numbers) + 0.5) / shares[sources]
    order = sources[np.argsort(times, kind="stable")]
    rest = position - int(first.sum())
    return first + np.bincount(order[:rest], minlength=len(shares)), int(order[rest])


def in_proportion(parts: list[Documents], weights: Iterable[float]) -> Documents:
    """Join the held-out documents of several sources. Some documents are dropped, so that each source has its share of the
    tokens.

    Args:
        parts: the documents of each source.
        weights: the weight of each source.
    """
    ends = [np.cumsum(part.lengths) for part in parts]
    scale = min(int(end[-1]) / weight for end, weight in zip(ends, weights, strict=True))
    counts = [int(np.searchsorted(end, scale * weight)) + 1 for end, weight in zip(ends, weights, strict=True)]
    return Documents.of(JoinedParts([part.first(count) for part, count in zip(parts, counts, strict=True)]))
