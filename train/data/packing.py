"""Turn documents into tokens, and pack the tokens into sequences without padding.

    document    one EOS token and the tokens of the text; or, if the tokenizer has a BOS token, BOS, the text and EOS
    epoch e     one stream of T tokens: all documents in a random order that depends on the seed and on e
    sequence    S consecutive tokens of the stream; the label of a token is the next token of the stream

An epoch has floor((T - 1) / S) sequences, which are read in another random order. In the order of the stream, consecutive steps
would often read the same long document. A document may continue in the next sequence of the stream.

With several data-parallel ranks, a micro-step takes as long as its most expensive sequence. Therefore, sequences can be
shuffled in groups, which give all ranks sequences of similar cost. A group contains G sequences whose attention has a similar
cost. An incomplete group is dropped.

A checkpoint stores the position in the data as the number of consumed sequences.
"""

import itertools
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ringattn.train.data import recall, sources
from ringattn.train.data.best_fit import BestFitDataset
from ringattn.train.data.documents import TokenisedDocuments, group_by_cost, random_order
from ringattn.train.data.duplicates import warn_of_duplicates
from ringattn.train.data.mixture import MixtureDataset, in_proportion
from ringattn.train.data.prepared import open_prepared
from ringattn.train.data.records import RecordDataset, split_records
from ringattn.train.data.shards import Documents, Shards
from ringattn.train.data.stream import StreamDataset, open_stream
from ringattn.train.data.tokenisation import check_counts, tokenise
from ringattn.train.data.tokenizer import Tokenizer
from ringattn.train.data.workers import log_once
from ringattn.train.parallel.ranks import ranks_per_host, sync_errors
from ringattn.train.settings.config import ConfigError, DataConfig

Loaded = TypeVar("Loaded")

# The number of a corpus is part of a key in the store. All ranks must therefore load corpora in the same order.
_corpus_numbers = itertools.count()


class PackedDataset(TokenisedDocuments):
    """An endless series of sequences. The constructor's arguments and the index i determine sequence i.

    Attributes:
        sequences_per_epoch: a multiple of `group_size`.
        group_size: the number G of sequences per group; 1 for no groups.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int, shuffle: bool = True, group_size: int = 1):
        """Create the sequences.

        Args:
            documents: the tokenised documents.
            seq_len: the number S of tokens per sequence.
            seed: the seed of the random orders.
            shuffle: True for a random order of the sequences of an epoch, False for the order of the stream.
            group_size: the number G of sequences per group. With `shuffle=False`, or with fewer than G sequences, there are no
                groups.

        Raises:
            ConfigError: the documents do not fill one sequence.
        """
        super().__init__(documents, seq_len, seed)
        self.shuffle = shuffle
        self._num_filled = (self.tokens_per_epoch - 1) // seq_len
        self.group_size = group_size if shuffle and group_size <= self._num_filled else 1
        self.sequences_per_epoch = self._num_filled - self._num_filled % self.group_size
        self._epoch_order = (-1, self.lengths, self.lengths, self.lengths)
        if self.sequences_per_epoch < 1:
            raise ConfigError(
                f"the corpus has {self.tokens_per_epoch:,} tokens, but data.seq_len={seq_len} requires {seq_len + 1:,}: "
                "provide more text or use a smaller data.seq_len"
            )

    @property
    def fingerprint(self) -> dict[str, int | str]:
        sequences = "shuffled" if self.shuffle else "in order"
        if self.group_size > 1:
            sequences = f"shuffled in groups of {self.group_size}"
        return super().fingerprint | {"sequences": sequences}

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the length of each document part in the first epoch, and whether the part begins its document."""
        _, ends, _ = self._order_of(0)
        bounds = np.arange(self._num_filled + 1) * self.seq_len
        # NumPy's stable sort merges two sorted arrays fast, but `np.unique` takes many seconds for millions of documents.
        edges = np.sort(np.concatenate([bounds, ends[ends < bounds[-1]]]), kind="stable")
        edges = edges[np.diff(edges, prepend=-1) > 0]
        starts = edges[:-1]
        return np.diff(edges), (ends[np.searchsorted(ends, starts)] == starts) | (starts == 0)

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        epoch, position = divmod(index, self.sequences_per_epoch)
        start = int(self._order_of(epoch)[2][position]) * self.seq_len
        return self.stream(start, start + self.seq_len, epoch)

    def stream(self, start: int, stop: int, epoch: int = 0) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return tokens `start` to `stop` - 1 of an epoch's stream, in the form of `sequence`."""
        order, ends, _ = self._order_of(epoch)
        # Also read the document with token `stop`, because this token is the last label.
        first, last = np.searchsorted(ends, (start, stop), side="right")
        documents = [self._documents[int(index)] for index in order[first : last + 1]]
        skipped = start - (int(ends[first]) - len(documents[0]))
        # `documents` contains views of memory maps, so only the tokens of this sequence are read.
        documents[-1] = documents[-1][: len(documents[-1]) - (int(ends[last]) - stop - 1)]
        documents[0] = documents[0][skipped:]
        stream = np.concatenate(documents, dtype=np.int64)
        edges, labels = np.unique([0, *(ends[first:last] - start), stop - start]), stream[1:].copy()
        if self._documents.skipped:
            labels[ends[first:last] - start - 1] = self.begin_token
        return stream[:-1], labels, tuple(np.diff(edges).tolist())

    def document_number(self, position: int) -> int:
        return int(np.searchsorted(self._order_of(0)[1], position, side="right"))

    def beginning(self, num_tokens: int) -> list[int]:
        """Return the first tokens of the longest document, without the token that begins every document."""
        return self._documents[int(self.lengths.argmax())][1 : 1 + num_tokens].tolist()

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the order of the documents, their ends in the stream, and the order of the sequences."""
        if self._epoch_order[0] != epoch:
            random = np.random.Philox(key=[self.seed % 2**64, epoch])
            order = random_order(random, len(self.lengths))
            ends = np.cumsum(self.lengths[order])
            sequences = random_order(random, self._num_filled) if self.shuffle else np.arange(self._num_filled)
            sequences = group_by_cost(random, sequences, self.group_size, lambda: self._costs(ends))
            self._epoch_order = (epoch, order, ends, sequences)
        return self._epoch_order[1:]

    def _costs(self, ends: np.ndarray) -> np.ndarray:
        bounds = np.arange(self._num_filled + 1) * self.seq_len
        edges = np.sort(np.concatenate([bounds, ends[ends < bounds[-1]]]), kind="stable")
        return np.add.reduceat(np.diff(edges) ** 2, np.searchsorted(edges, bounds[:-1]))


Sequences = PackedDataset | RecordDataset | recall.RecallDataset
TrainingData = Sequences | BestFitDataset | MixtureDataset | StreamDataset


def load_training(config: DataConfig, tokenizer: Tokenizer) -> TrainingData:
    """Load the training sequences. All ranks must call this function. Errors as in `load`."""
    if config.mix:
        sources = load_members(config, lambda member: load_training(member, tokenizer))
        return MixtureDataset(sources, config.weights, config.group_size or 1)
    if config.packing == "best-fit":
        return BestFitDataset(_load_part(config, tokenizer), config.seq_len, config.seed, config.group_size or 1)
    return open_stream(config, tokenizer) if config.streaming else load(config, tokenizer)


def load(config: DataConfig, tokenizer: Tokenizer, shuffle: bool = True) -> Sequences:
    """Load the part of a corpus that is not held out. All ranks must call this function.

    Raises:
        ConfigError: a file, a column or a dataset is missing, cannot be read, or contains too little text.
    """
    if config.source == "recall":
        recall.check_vocabulary(tokenizer.vocab_size)
        return recall.RecallDataset(config.seq_len, config.seed)
    documents = _load_part(config, tokenizer)
    if config.format != "text":
        return _pack_records(documents, config, config.seed, config.group_size or 1)
    return PackedDataset(documents, config.seq_len, config.seed, shuffle, config.group_size or 1)


def _load_part(config: DataConfig, tokenizer: Tokenizer) -> Documents:
    documents = load_documents(config, tokenizer)
    return _split(documents, config, config.seq_len)[0] if config.resolved_eval_fraction > 0 else documents


def load_members(config: DataConfig, load_member: Callable[[DataConfig], Loaded]) -> dict[str, Loaded]:
    """All ranks must call this function.

    Raises:
        ConfigError: on every rank, if a source cannot be loaded. The message contains its name.
    """
    loaded = dict[str, Loaded]()
    for name, member in config.members.items():
        # Synchronise errors after every source, so that no rank waits for a failed rank.
        with sync_errors():
            try:
                loaded[name] = load_member(member)
            except ConfigError as error:
                raise ConfigError(f"data.mix: {name}: {error}") from error
    return loaded


def load_fraction(config: DataConfig, tokenizer: Tokenizer, trained_len: int) -> PackedDataset | RecordDataset:
    """Load the held-out fraction of a corpus. The split depends on `trained_len`, the sequence length of the training."""

    def load_part(config: DataConfig) -> Documents:
        return _split(load_documents(config, tokenizer), config, trained_len)[1]

    if config.mix:
        parts = load_members(config, load_part)
        documents = in_proportion(list(parts.values()), config.weights)
    else:
        documents = load_part(config)
    if config.format != "text":
        return _pack_records(documents, config, seed=0)
    return PackedDataset(documents, config.seq_len, seed=0, shuffle=False)


def _pack_records(documents: Documents, config: DataConfig, seed: int, group_size: int = 1) -> RecordDataset:
    packed = RecordDataset(documents, config.seq_len, seed, group_size)
    if packed.num_dropped:
        counts = f"{packed.num_dropped:,} of {len(packed.lengths):,} records of {config.description}"
        log_once(f"{'dropped':<12}{counts}, because they have more than data.seq_len={config.seq_len} tokens")
    return packed


def _split(documents: Documents, config: DataConfig, seq_len: int) -> tuple[Documents, Documents]:
    if config.format != "text":
        return split_records(documents, config.eval_fraction)
    return split_documents(documents, config.eval_fraction, seq_len)


def load_documents(config: DataConfig, tokenizer: Tokenizer) -> Documents:
    """Return the tokenised documents of a corpus. All ranks must call this function.

    Raises:
        ConfigError: a file, a column or a dataset is missing, cannot be read, or contains no text.
    """
    if config.source == "prepared":
        documents, counts = open_prepared(config, tokenizer), dict[str, Any]()
    else:
        store = Shards(Path(_once_per_host(lambda: str(tokenise(config, tokenizer, ranks_per_host())))))
        counts = store.index["counts"]
        documents = Documents.of(store, counts["rows_by_split"])
    check_counts(config, len(documents), counts)
    return documents


def split_documents(documents: Documents, fraction: float, seq_len: int) -> tuple[Documents, Documents]:
    """Split documents into a part for training and a held-out part.

    The held-out part contains random documents and the beginning of one further document. The split depends only on the lengths
    of the documents and on the arguments.

    Args:
        fraction: the held-out fraction of the tokens.
        seq_len: the number of tokens per sequence. Each part must fill at least one sequence.

    Raises:
        ConfigError: one of the two parts would be shorter than a sequence.
    """
    lengths = documents.lengths
    total, eval_tokens = int(lengths.sum()), max(round(fraction * int(lengths.sum())), seq_len + 1)
    if total - eval_tokens < seq_len + 1:
        raise ConfigError(
            f"the corpus has {total:,} tokens, but data.seq_len={seq_len} requires {2 * (seq_len + 1):,}, half of them as "
            "held-out text: provide more text, use a smaller data.seq_len, or set data.eval_fraction=0"
        )
    order = random_order(np.random.Philox(key=[0, 0]), len(lengths))
    ends = np.cumsum(lengths[order])
    num_whole = int(np.searchsorted(ends, eval_tokens, side="right"))
    held_out, remaining = np.sort(order[:num_whole]), np.sort(order[num_whole + 1 :])
    divided, length = int(order[num_whole]), eval_tokens - int(lengths[order[:num_whole]].sum())
    number = int(documents.numbers[divided])
    training = documents.select(remaining).append_part(number, length, int(lengths[divided]) - length)
    return training, documents.select(held_out).append_part(number, 0, length)


def load_held_out(config: DataConfig, tokenizer: Tokenizer, training: TrainingData) -> Sequences | None:
    """Load the held-out text. Return None if there is no held-out text. All ranks must call this function.

    Args:
        config: the settings of the training text and of the held-out text.
        training: the training text.

    Raises:
        ConfigError: the held-out text cannot be loaded, or the training text contains held-out text.
    """
    if config.source == "recall":
        return recall.RecallDataset(config.seq_len, recall.EVALUATION_SEED)
    if config.resolved_eval_fraction > 0:
        if isinstance(training, MixtureDataset):
            check_mixture(config, training)
        held_out = load_fraction(config, tokenizer, config.seq_len)
        warn_of_duplicates(held_out, _sources(config, training))
        return held_out
    if config.held_out is None:
        return None
    try:
        held_out = load(config.held_out, tokenizer, shuffle=False)
    except ConfigError as error:
        settings = r"data\.(split|path)\b" if config.eval_path else r"data\.(split)\b"
        message = re.sub(settings, r"data.eval_\1", str(error))
        raise ConfigError(f"held-out text: {message}; or leave out data.eval_split and data.eval_path") from None
    assert isinstance(held_out, TokenisedDocuments)
    assert isinstance(training, TokenisedDocuments | StreamDataset)
    if not sources.are_disjoint(config, config.held_out, training.splits):
        raise ConfigError(
            f"the training text contains some of the held-out text, data.eval_split={config.eval_split} "
            f"data.eval_path={config.eval_path}: hold out other files, or another part, such as 'data.split=\"train[:95%]\"' "
            "and 'data.eval_split=\"train[95%:]\"'"
        )
    warn_of_duplicates(held_out, _sources(config, training))
    return held_out


def _sources(config: DataConfig, training: TrainingData) -> dict[str, TokenisedDocuments]:
    if isinstance(training, MixtureDataset):
        return training.sources
    return {config.description: training} if isinstance(training, TokenisedDocuments) else {}


def check_mixture(config: DataConfig, training: MixtureDataset) -> None:
    """Raise ConfigError if a source contains held-out text of another source."""
    for (name, first), (other, second) in itertools.combinations(config.members.items(), 2):
        if sources.overlap(first, second, training.sources[name].splits):
            raise ConfigError(
                f"data.mix: {name} and {other} read some of the same text, so the training text contains some of the held-out "
                "text: choose other files or disjoint splits, or set data.eval_fraction=0"
            )


def _once_per_host(prepare: Callable[[], str]) -> str:
    """Return the result of `prepare`. The first rank of every host computes the result. All ranks call this function.

    Raises:
        ConfigError: on all ranks of a host, if `prepare` raises a ConfigError.
    """
    store, rank = _get_default_store(), dist.get_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    name, result, error = f"corpus/{next(_corpus_numbers)}/{rank - local_rank}", "", "the first rank of this host has failed"
    if local_rank == 0:
        try:
            result, error = prepare(), ""
        except ConfigError as raised:
            error = str(raised)
        finally:
            store.set(name, json.dumps([result, error]))
    while not store.check([name]):
        time.sleep(0.1)
    result, error = json.loads(store.get(name))
    if error:
        raise ConfigError(error)
    return result
