"""Generate sequences of an associative recall task, whose answers lie far back in the sequence.

A document contains a block of facts and, at its end, a block of queries. All other tokens are random filler:

    ... filler ... | (k3,v3) .. (k1,v1) .. .. (k2,v2) | ... filler ... | k2 v2 k3 v3 k1 v1 |
                     facts, BLOCK tokens                                 queries, BLOCK tokens

A fact is a single token that contains a key and a value. The model reads the key of a query and must predict the value. Only
these predictions have labels. In the original task (Arora et al. 2023, arXiv:2312.04927), a fact consists of two tokens. The
values are random, and a document contains one query per key.

A seed and the number of a sequence determine its tokens, so nothing is stored.
"""

from collections.abc import Iterable

import numpy as np
import torch

from ringattn.train.data.batch import Batch
from ringattn.train.data.documents import NumberedSequences
from ringattn.train.model.loss import IGNORE
from ringattn.train.settings.config import ConfigError

# A document has BLOCK tokens of facts and BLOCK tokens of queries. Short documents have fewer.
BLOCK = 32

# The length in tokens of the shortest training documents.
MIN_LENGTH = 4

# The token ids of the task. The fact of key k and value v has the id k * NUM_VALUES + v.
NUM_KEYS, NUM_VALUES = 16, 12
FIRST_KEY = NUM_KEYS * NUM_VALUES
FIRST_VALUE = FIRST_KEY + NUM_KEYS
FIRST_FILLER = FIRST_VALUE + NUM_VALUES
VOCABULARY = 256

# The accuracy of a model that guesses the values.
CHANCE = 1 / NUM_VALUES

# The seed of all evaluations. `data.seed` is below 2**63, so no run trains on the sequences of an evaluation. NumPy rounds keys
# of 2**63 or more to float64, so seeds up to 2**63 + 1024 would be equal.
EVALUATION_SEED = 2**63

# The number of evenly spaced positions at which the evaluation places the facts
NUM_POSITIONS = 11


class RecallDataset(NumberedSequences):
    """An endless series of training sequences. Each sequence consists of documents of one length.

    The length is `seq_len` divided by a random power of two. A model learns the task quickly from short documents. The position
    of the facts in a document is random.

    Attributes:
        sequences_per_epoch: the number of different sequences.
    """

    sequences_per_epoch = 2**32

    def __init__(self, seq_len: int, seed: int):
        check_length(seq_len)
        self.seq_len = seq_len
        self._seed = seed

    @property
    def fingerprint(self) -> dict[str, int | str]:
        task = {"task": "recall", "keys": NUM_KEYS, "values": NUM_VALUES, "block": BLOCK, "shortest": MIN_LENGTH}
        return task | {"seq_len": self.seq_len, "seed": self._seed, "sequences": "generated"}

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return a sequence: its tokens and labels, both int64 (S,), and the length of each document.

        If a sequence ends with filler tokens, the last length counts the filler tokens.
        """
        random = np.random.Philox(key=[self._seed, index])
        lengths = document_lengths(self.seq_len)
        length = lengths[random.random_raw() % len(lengths)]
        count, rest = divmod(self.seq_len, length)
        starts = random.random_raw(count) % np.uint64(length - 2 * block_size(length) + 1)
        tokens, labels = _documents(random, length, starts.astype(np.int64))
        tokens = np.concatenate([tokens.ravel(), _filler(random, rest)])
        labels = np.concatenate([labels.ravel(), np.full(rest, IGNORE)])
        return tokens, labels, (length,) * count + (rest,) * (rest > 0)

    def beginning(self, num_tokens: int) -> list[int]:
        return self.sequence(0)[0][:num_tokens].tolist()


def document_lengths(seq_len: int) -> list[int]:
    """Return the lengths of documents: `seq_len` divided by powers of two, down to MIN_LENGTH."""
    return [seq_len >> halvings for halvings in range(seq_len.bit_length()) if seq_len >> halvings >= MIN_LENGTH]


def evaluation_lengths(seq_len: int) -> list[int]:
    """Return the document lengths that are at least 2 * BLOCK, or the longest length if all are shorter."""
    lengths = document_lengths(seq_len)
    return [length for length in lengths if length >= 2 * BLOCK] or lengths[:1]


def block_size(length: int) -> int:
    return min(length // 4 * 2, BLOCK)


def grid_batch(length: int, numbers: Iterable[int]) -> tuple[Batch, torch.Tensor]:
    """Return evaluation documents of `length` tokens, and an int64 tensor (B,) with their position indices.

    Each sequence is one document. Document n has its facts at position n modulo NUM_POSITIONS. At position 0, the facts are at
    the beginning of the document.
    """
    positions = np.array([number % NUM_POSITIONS for number in numbers])
    starts = positions * (length - 2 * block_size(length)) // (NUM_POSITIONS - 1)
    parts = [
        _documents(np.random.Philox(key=[EVALUATION_SEED, number]), length, start[None])
        for number, start in zip(numbers, starts, strict=True)
    ]
    tokens, labels = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    return Batch(tokens, labels, ((length,),) * len(parts)), torch.from_numpy(positions)


def check_length(seq_len: int) -> None:
    """Raise ConfigError unless a sequence has space for facts and queries."""
    if seq_len < MIN_LENGTH:
        raise ConfigError(f"data.seq_len={seq_len} must be at least {MIN_LENGTH} for the recall task: raise it")


def check_vocabulary(vocab_size: int) -> None:
    if vocab_size < VOCABULARY:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens, but the recall task requires {VOCABULARY}: use data.tokenizer=bytes"
        )


def _documents(random: np.random.Philox, length: int, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels, both int64 (documents, length). The facts begin at `starts`."""
    count, block = len(starts), block_size(length)
    num_keys = block // 2
    tokens = _filler(random, count * length).reshape(count, length)
    labels = np.full_like(tokens, IGNORE)
    keys = _choices(random, count, NUM_KEYS, num_keys)
    values = _integers(random, count * num_keys, NUM_VALUES).reshape(count, num_keys)
    documents = np.arange(count)[:, None]
    facts = starts[:, None] + _choices(random, count, block, num_keys)
    queries = length - block + 2 * _choices(random, count, num_keys, num_keys)
    tokens[documents, facts] = keys * NUM_VALUES + values
    tokens[documents, queries] = FIRST_KEY + keys
    tokens[documents, queries + 1] = FIRST_VALUE + values
    labels[documents, queries] = FIRST_VALUE + values
    return tokens, labels


def _choices(random: np.random.Philox, count: int, bound: int, size: int) -> np.ndarray:
    """Return `count` selections of `size` different integers below `bound`, int64 (count, size)."""
    words = random.random_raw(-(-count * bound // 4)).astype("<u8").view("<u2")[: count * bound].reshape(count, bound)
    return np.argsort(words, axis=1, kind="stable")[:, :size]


def _filler(random: np.random.Philox, count: int) -> np.ndarray:
    return FIRST_FILLER + _integers(random, count, VOCABULARY - FIRST_FILLER)


def _integers(random: np.random.Philox, count: int, bound: int) -> np.ndarray:
    return (random.random_raw(count) % np.uint64(bound)).astype(np.int64)
