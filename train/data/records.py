"""Pack whole records into sequences.

    record      the tokens of a conversation, or BOS, the prompt, the completion and EOS
    sequence    records that together have at most S tokens; padding fills the rest
    epoch       all sequences in a random order

Each sequence takes the longest records that still fit, so sequences need little padding. A checkpoint stores the position in
the data as the number of consumed sequences.
"""

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from ringattn.train.data.documents import EVALUATION, NUM_SAMPLED, PACKING, PaddedSequences, random_order
from ringattn.train.data.shards import Documents
from ringattn.train.model.loss import IGNORE
from ringattn.train.settings.config import ConfigError


class RecordDataset(PaddedSequences):
    """Packs whole records into an endless series of sequences. The arguments and the index i determine sequence i.

    Attributes:
        num_dropped: the number of records with more than `seq_len` tokens.
    """

    def __init__(self, records: Documents, seq_len: int, seed: int, group_size: int = 1):
        """Pack records into sequences of `seq_len` tokens. A `group_size` above the number of sequences is ignored.

        Args:
            group_size: the number of consecutive sequences with a similar cost of attention.

        Raises:
            ConfigError: no record has at most `seq_len` tokens.
        """
        super().__init__(records, seq_len, seed)
        kept = self.random_records(PACKING)
        self.num_dropped = len(self.lengths) - len(kept)
        if not len(kept):
            raise ConfigError(
                f"all {len(self.lengths):,} records have more than data.seq_len={seq_len} tokens, the shortest one "
                f"{self.lengths.min():,}: raise data.seq_len"
            )
        self._sequences = [kept[members] for members in pack_whole(self.lengths[kept], seq_len)]
        self._begin(len(self._sequences), int(self.lengths[kept].sum()), group_size)

    @property
    def fingerprint(self) -> dict[str, int | str]:
        return super().fingerprint | {"sequences": f"whole records, shuffled in groups of {self.group_size}"}

    def _pieces_of(self, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return map(self.record, self._sequences[number].tolist())

    def record(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the labels of a record, both int64 (N,). The last token has no label."""
        stored = self._documents[number].astype(np.int64)
        labels = np.append(stored[1:], -1)
        return np.where(stored < 0, ~stored, stored), np.where(labels < 0, IGNORE, labels)

    def random_records(self, key: int = EVALUATION) -> np.ndarray:
        """Return the numbers of all records with at most `seq_len` tokens, in a random order."""
        order = random_order(np.random.Philox(key=[self.seed, key]), len(self.lengths))
        return order[self.lengths[order] <= self.seq_len]

    def beginning(self, num_tokens: int) -> list[int]:
        """Return the prompt of a record. Choose a prompt of at most `num_tokens` tokens if possible."""
        prompts = list[list[int]]()
        for number in self.random_records()[:NUM_SAMPLED].tolist():
            tokens, labels = self.record(number)
            prompts.append(tokens[: 1 + int((labels != IGNORE).argmax())].tolist())
        return max(prompts, key=lambda prompt: (len(prompt) <= num_tokens, -abs(num_tokens - len(prompt))))

    def _costs(self) -> np.ndarray:
        lengths = [self.lengths[members] for members in self._sequences]
        return np.array([int((each**2).sum() + (self.seq_len - each.sum()) ** 2) for each in lengths])


def pack_whole(lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Distribute records over sequences of `seq_len` tokens. Each sequence takes the longest records that still fit.

    Args:
        lengths: (records,) int64, at most `seq_len`. Records of equal length keep their order.

    Returns:
        The indices of the records in each sequence.
    """
    waiting = dict[int, list[int]]()
    for index, length in reversed(list(enumerate(lengths.tolist()))):
        waiting.setdefault(length, []).append(index)
    available, sequences = sorted(waiting), list[list[int]]()
    while available:
        space, members = seq_len, list[int]()
        while num_fitting := bisect_right(available, space):
            length = available[num_fitting - 1]
            members.append(waiting[length].pop())
            space -= length
            if not waiting[length]:
                del available[num_fitting - 1]
        sequences.append(members)
    return sequences


def split_records(records: Documents, fraction: float) -> tuple[Documents, Documents]:
    """Split records into a training part and a held-out part.

    The held-out part contains random whole records. Each part has at least one record.

    Args:
        records: the tokenised records.
        fraction: the fraction of the tokens in the held-out part.

    Raises:
        ConfigError: there is only one record.
    """
    lengths = records.lengths
    if len(lengths) < 2:
        raise ConfigError(
            "the corpus has one record, but a held-out part requires two: add records, or set data.eval_fraction=0"
        )
    order = random_order(np.random.Philox(key=[0, 0]), len(lengths))
    count = int(np.searchsorted(np.cumsum(lengths[order]), fraction * lengths.sum())) + 1
    count = min(count, len(lengths) - 1)
    return records.select(np.sort(order[count:])), records.select(np.sort(order[:count]))
