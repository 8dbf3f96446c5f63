"""Pack pieces of documents into sequences so that few documents are cut (Ding et al. 2024, arXiv:2404.10830).

    piece       a document with at most S tokens; longer documents are cut into pieces of S tokens and a shorter rest
    sequence    pieces that together have at most S tokens; padding fills the rest
    epoch       all sequences in a random order

Pieces are packed from the longest to the shortest. Each piece goes to the fullest sequence that still has space for it. A
checkpoint stores the position in the data as the number of consumed sequences.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from ringattn.train.data.documents import PACKING, PaddedSequences, random_order
from ringattn.train.data.shards import Documents


class BestFitDataset(PaddedSequences):
    """Packs an endless series of sequences so that few documents are cut. The arguments and the index i determine sequence i.

    Every document begins with the same token, which is also the label of every document's last token.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int, group_size: int = 1):
        """Pack the documents into sequences of `seq_len` tokens.

        `seed` is the seed of the random orders. A `group_size` above the number of sequences per epoch is ignored.
        """
        super().__init__(documents, seq_len, seed)
        counts = -(-self.lengths // seq_len)
        self._number = np.repeat(np.arange(len(counts)), counts)  # the document of each piece
        self._start = seq_len * (np.arange(len(self._number)) - np.repeat(counts.cumsum() - counts, counts))
        self._size = np.minimum(self.lengths[self._number] - self._start, seq_len)
        order = random_order(np.random.Philox(key=[seed % 2**64, PACKING]), len(self._size))
        sequence = pack_best_fit(self._size[order], seq_len)
        # The pieces of one sequence are neighbours in `_pieces`. For each sequence, `_first` contains the index of the first
        # piece.
        self._pieces = order[sequence.argsort(kind="stable")]
        self._first = np.concatenate([[0], np.bincount(sequence).cumsum()])
        self._begin(len(self._first) - 1, self.tokens_per_epoch, group_size)

    @property
    def fingerprint(self) -> dict[str, int | str]:
        return super().fingerprint | {"sequences": f"best fit, shuffled in groups of {self.group_size}"}

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the length of every piece, and whether it begins a document. Pieces of a document are neighbours."""
        return self._size, self._start == 0

    def _pieces_of(self, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for piece in self._pieces[self._first[number] : self._first[number + 1]].tolist():
            start, size = int(self._start[piece]), int(self._size[piece])
            document = self._documents[int(self._number[piece])]
            following = np.append(document[start + 1 : start + 1 + size], self.begin_token)
            yield document[start : start + size], following[:size]

    def _costs(self) -> np.ndarray:
        size = self._size[self._pieces]
        padding = self.seq_len - np.add.reduceat(size, self._first[:-1])
        return np.add.reduceat(size**2, self._first[:-1]) + padding**2


def pack_best_fit(sizes: np.ndarray, seq_len: int) -> np.ndarray:
    """Assign every piece to a sequence. Return the sequence index of each piece, int64 (pieces,).

    Args:
        sizes: (pieces,) int64, from 1 to `seq_len`. Pieces of equal size keep their order.
    """
    order = (-sizes).argsort(kind="stable")
    result = np.empty_like(sizes)
    # `by_space` lists the sequences by their free space, and `spaces` contains the sorted keys.
    by_space, spaces, count = dict[int, list[int]](), list[int](), 0
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        index = bisect_left(spaces, size)
        if index < len(spaces):
            space = spaces[index]
            sequence = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[index]
        else:
            space, sequence, count = seq_len, count, count + 1
        result[piece] = sequence
        if space > size:
            if space - size not in by_space:
                insort(spaces, space - size)
            by_space.setdefault(space - size, []).append(sequence)
    return result
