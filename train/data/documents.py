"""Define the base class of all datasets that pack tokenised documents into sequences."""

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from ringattn.train.data.batch import Batch
from ringattn.train.data.shards import Documents
from ringattn.train.model.loss import IGNORE

# `sampled` covers at most NUM_SAMPLED documents. Checkpoints of earlier versions contain no other checksum of the text.
NUM_SAMPLED = 64
# The seed of an order contains the number of the epoch. The orders of packing and of evaluation are the same in every epoch, so
# their seeds contain one of these constants instead.
PACKING, EVALUATION = 2**62, 2**62 + 1


class Progress(NamedTuple):
    """Counts the tokens and the epochs of a source that a run has consumed."""

    tokens: int
    epochs: float


class NumberedSequences:
    """A base class for endless series of sequences.

    Sequence i depends only on i and on the settings.

    Attributes:
        seq_len: the number S of tokens per sequence.
        sequences_per_epoch: the number of sequences of an epoch.
    """

    seq_len: int
    sequences_per_epoch: int

    def batch(self, indices: Iterable[int]) -> Batch:
        tokens, labels, documents = zip(*(self.sequence(index) for index in indices), strict=True)
        return Batch(torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(labels)), documents)

    def progress(self, consumed: int) -> dict[str, Progress]:
        return {"": Progress(consumed * self.seq_len, consumed / self.sequences_per_epoch)}

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return the tokens and labels of a sequence, both int64 (S,), and the lengths of its documents or document parts."""
        raise NotImplementedError


class TokenisedDocuments(NumberedSequences):
    """Base class for datasets that pack tokenised documents into sequences.

    Attributes:
        splits: the number of documents per split of the source.
        lengths: (documents,) int64, tokens per document.
        tokens_per_epoch: the number of tokens of all documents.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int):
        self.seq_len = seq_len
        self.seed = seed
        self.splits, self.lengths = documents.splits, documents.lengths
        self.tokens_per_epoch = int(self.lengths.sum())
        self._documents = documents

    @functools.cached_property
    def begin_token(self) -> int:
        """Return the first token of every document. A part of a document may begin with a different token."""
        return int(self._documents.store.read(int(self._documents.numbers[0]))[0])

    @property
    def keys(self) -> np.ndarray:
        """Return the keys of the documents, as in `shards.Store`."""
        return self._documents.keys

    @functools.cached_property
    def sampled(self) -> int:
        """Return a CRC-32 of the tokens of up to NUM_SAMPLED documents, spread evenly over the corpus."""
        crc = 0
        for index in np.linspace(0, len(self.lengths) - 1, min(len(self.lengths), NUM_SAMPLED)).astype(int):
            # The checksum depends on the dtype, so convert the tokens to int32.
            crc = zlib.crc32(self._documents[int(index)].astype(np.int32).data, crc)
        return crc

    @functools.cached_property
    def checksum(self) -> int:
        """Return a CRC-32 of the checksums of all documents. No tokens are read."""
        return zlib.crc32(self._documents.store.keys[self._documents.numbers].tobytes())

    @property
    def fingerprint(self) -> dict[str, int | str]:
        known = {"documents": zlib.crc32(self.lengths.tobytes()), "text": self.sampled, "checksum": self.checksum}
        return {"tokens_per_epoch": self.tokens_per_epoch, **known, "seq_len": self.seq_len, "seed": self.seed}


class PaddedSequences(TokenisedDocuments):
    """A base class for datasets that pack whole pieces of text into sequences, with padding at the end.

    Attributes:
        padding: the fraction of padding among all tokens.
        sequences_per_epoch: a multiple of `group_size`.
        group_size: the number of consecutive sequences with a similar cost of attention, or 1.
    """

    def _begin(self, num_sequences: int, num_tokens: int, group_size: int) -> None:
        self._num_sequences, self._epoch_order = num_sequences, (-1, np.arange(0))
        self.padding = 1 - num_tokens / (num_sequences * self.seq_len)
        self.group_size = group_size if group_size <= num_sequences else 1
        self.sequences_per_epoch = num_sequences - num_sequences % self.group_size

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return the tokens and labels of a sequence, both int64 (S,), and the lengths of its pieces and of its padding."""
        epoch, position = divmod(index, self.sequences_per_epoch)
        tokens, labels = np.zeros(self.seq_len, dtype=np.int64), np.full(self.seq_len, IGNORE)
        begin, lengths = 0, list[int]()
        for piece in self._pieces_of(int(self._order_of(epoch)[position])):
            lengths.append(len(piece[0]))
            rows = slice(begin, begin + lengths[-1])
            tokens[rows], labels[rows] = piece
            begin = rows.stop
        rest = (self.seq_len - begin,) if begin < self.seq_len else ()
        return tokens, labels, (*lengths, *rest)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._epoch_order[0] != epoch:
            random = np.random.Philox(key=[self.seed % 2**64, epoch])
            order = random_order(random, self._num_sequences)
            self._epoch_order = (epoch, group_by_cost(random, order, self.group_size, self._costs))
        return self._epoch_order[1]

    def _pieces_of(self, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the tokens and the labels of every piece of a sequence."""
        raise NotImplementedError

    def _costs(self) -> np.ndarray:
        """Return the cost of attention of every sequence."""
        raise NotImplementedError


def random_order(random: np.random.Philox, count: int) -> np.ndarray:
    # numpy guarantees the raw numbers of Philox on every machine and in every release, but not its permutations.
    return np.argsort(random.random_raw(count), kind="stable")


def group_by_cost(random: np.random.Philox, order: np.ndarray, group_size: int, costs: Callable[[], np.ndarray]) -> np.ndarray:
    """Return sequences in groups of `group_size` with similar costs. An incomplete group is dropped."""
    if group_size == 1:
        return order
    order = order[: len(order) - len(order) % group_size]
    groups = order[np.argsort(costs()[order], kind="stable")].reshape(-1, group_size)
    return groups[random_order(random, len(groups))].ravel()
