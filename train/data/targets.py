"""Choose the target tokens of an evaluation, and pack them with their context into sequences.

The evaluation computes the loss of the target tokens. The target tokens do not depend on `data.seq_len`. The losses at
different lengths are therefore means over the same tokens. The target tokens form up to NUM_BLOCKS blocks:

    held-out text     ------------####------------####------------####          # target token

At length L, the model reads windows of at most L tokens. Only the losses of target tokens count. The document begins at
the bar.

    document          |................########                                 . earlier token of the document
    first window                  ....####
    second window                     ....####

A window has up to L / 2 target tokens. The window begins as early as L and the document allow. Without `data.mask_documents`,
the whole text is one document. All windows are packed into sequences of `data.seq_len` tokens, so that torch.compile compiles
the model only once. In the attention mask, each window is a document.
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringattn.train.data.batch import Batch
from ringattn.train.data.packing import Sequences
from ringattn.train.data.recall import RecallDataset
from ringattn.train.data.records import RecordDataset, pack_whole
from ringattn.train.model.loss import IGNORE

# The number of blocks of target tokens. More blocks reduce the statistical error, but at length S, the model reads up to S
# tokens per block.
NUM_BLOCKS = 32

# The minimum number of tokens per block. Many smaller blocks would slow down evaluations at very long lengths.
MIN_BLOCK = 256


@dataclass(frozen=True)
class Passage:
    """Holds a block of target tokens, and the earlier tokens to which the target tokens can attend.

    Attributes:
        tokens: (n,) int64.
        labels: (n,) int64, the next tokens, or IGNORE for tokens that are not targets.
        documents: (n,) int64, the document number of each token, in ascending order.
        first: the position of the first target token.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    first: int


class Window(NamedTuple):
    """The tokens `start` to `stop` - 1 of a passage. Tokens from `first` on are targets. `size` is `stop` - `start`."""

    size: int
    length: int  # the index of the length
    passage: int  # the index of the passage
    start: int
    first: int
    stop: int


class Targets:
    """Packs the target tokens of an evaluation at several lengths into sequences.

    Attributes:
        tokens: (D,) int64, the target tokens in each of the D documents with target tokens.
        checksum: the CRC-32 of the target tokens' labels.
        num_groups: D times the number of lengths.
    """

    def __init__(self, held_out: Sequences, seq_len: int, lengths: list[int], eval_tokens: int, mask_documents: bool):
        """Choose the target tokens.

        Args:
            held_out: the held-out text.
            seq_len: the number S of tokens per packed sequence.
            lengths: the lengths of the evaluation in tokens, at most `seq_len`.
            eval_tokens: the number of target tokens, which is rounded up to a multiple of the number of blocks.
            mask_documents: whether a token attends only to tokens of its own document.
        """
        self._seq_len = seq_len
        self._passages = list(read_passages(held_out, eval_tokens, seq_len))
        labels = np.concatenate([passage.labels[passage.first :] for passage in self._passages])
        documents = np.concatenate([passage.documents[passage.first :] for passage in self._passages])[labels != IGNORE]
        self._documents, self.tokens = np.unique(documents, return_counts=True)
        self.num_groups = len(lengths) * len(self.tokens)
        self.checksum = zlib.crc32(labels.tobytes())
        windows = [
            Window(stop - start, index, number, start, first, stop)
            for index, length in enumerate(lengths)
            for number, passage in enumerate(self._passages)
            for start, first, stop in split_passage(passage, length, mask_documents)
            if (passage.labels[first:stop] != IGNORE).any()
        ]
        self._sequences = pack(windows, seq_len)
        self.num_sequences = len(self._sequences)

    def batch(self, numbers: Iterable[int]) -> tuple[Batch, Tensor]:
        """Return a batch of sequences, and the group of each token.

        Args:
            numbers: the indices of the sequences. Sequences with an index of `num_sequences` or more have no target tokens.

        Returns:
            The sequences, and an int64 tensor (B, S). Group i * D + d contains the target tokens of document d (of D),
            evaluated at length `lengths[i]`. Tokens for which no loss is computed have the group `num_groups`.
        """
        *parts, documents = zip(*map(self._sequence, numbers), strict=True)
        tokens, labels, groups = (torch.from_numpy(np.stack(part)) for part in parts)
        return Batch(tokens, labels, documents), groups

    def _sequence(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return tokens, labels and groups, all int64 (S,), and the document lengths."""
        windows = self._sequences[number] if number < self.num_sequences else []
        tokens = np.zeros(self._seq_len, dtype=np.int64)
        labels, groups = np.full_like(tokens, IGNORE), np.full_like(tokens, self.num_groups)
        begin = 0
        for window in windows:
            passage, rows = self._passages[window.passage], slice(window.first, window.stop)
            end = begin + window.size
            target = slice(end - (window.stop - window.first), end)
            tokens[begin:end] = passage.tokens[window.start : window.stop]
            labels[target] = passage.labels[rows]
            index = np.searchsorted(self._documents, passage.documents[rows])
            groups[target] = window.length * len(self._documents) + index
            begin = end
        groups[labels == IGNORE] = self.num_groups
        # The rest of the sequence is one more document, without target tokens.
        rest = (self._seq_len - begin,) if begin < self._seq_len else ()
        return tokens, labels, groups, (*(window.size for window in windows), *rest)


def read_passages(held_out: Sequences, eval_tokens: int, context: int) -> Iterator[Passage]:
    """Yield each block of target tokens with up to `context` tokens before the block.

    In the recall task, a block is a whole sequence, because the sequences are independent. In conversations and completions, a
    block extends from the first label of a record to its end.
    """
    if isinstance(held_out, RecordDataset):
        for number in held_out.random_records().tolist():
            tokens, labels = held_out.record(number)
            has_label = labels != IGNORE
            yield Passage(tokens, labels, np.full(len(tokens), number), first=int(has_label.argmax()))
            eval_tokens -= int(has_label.sum())
            if eval_tokens <= 0:
                return
        return
    if isinstance(held_out, RecallDataset):
        for number in range(-(-eval_tokens // held_out.seq_len)):
            tokens, labels, documents = held_out.sequence(number)
            # A sequence has at most as many documents as tokens.
            numbers = number * held_out.seq_len + np.repeat(np.arange(len(documents)), documents)
            yield Passage(tokens, labels, numbers, first=0)
        return
    total = held_out.tokens_per_epoch - 1  # The last token of the text has no label.
    count = min(NUM_BLOCKS, -(-eval_tokens // MIN_BLOCK)) if eval_tokens < total else 1
    for number in range(count):
        # Divide the text into `count` parts, each with a block of target tokens at its end.
        stop = (number + 1) * total // count
        first = max(stop - -(-eval_tokens // count), number * total // count)
        start = max(first - context, 0)
        tokens, labels, documents = held_out.stream(start, stop)
        labels[: first - start] = IGNORE
        numbers = held_out.document_number(start) + np.repeat(np.arange(len(documents)), documents)
        yield Passage(tokens, labels, numbers, first - start)


def split_passage(passage: Passage, length: int, mask_documents: bool) -> Iterator[tuple[int, int, int]]:
    """Divide a passage into windows. Yield the `start`, `first` and `stop` of each window."""
    edges = [0, *(np.flatnonzero(np.diff(passage.documents)) + 1).tolist(), len(passage.tokens)]
    edges = edges if mask_documents else [0, len(passage.tokens)]
    first = passage.first
    while first < len(passage.tokens):
        number = bisect_right(edges, first)
        begin, end = edges[number - 1], edges[number]
        # In a document's first window, all tokens may be target tokens.
        stop = min(end, max(begin + length, first + max(length // 2, 1)))
        yield max(begin, stop - length), first, stop
        first = stop


def pack(windows: list[Window], seq_len: int) -> list[list[Window]]:
    windows = sorted(windows, reverse=True)
    sizes = np.array([window.size for window in windows])
    return [[windows[index] for index in members] for members in pack_whole(sizes, seq_len)]
