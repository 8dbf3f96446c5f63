"""Turn documents into tokens and pack them into full sequences. Any sequence can be read directly, by its number.

    documents  --tokenise-->  EOS + tokens of each document, cached on disk
    epoch e    =  all documents, in an order drawn from (seed, e), joined into one stream of T tokens
    sequence   =  S tokens of the stream, and the token after them as the last label: floor((T - 1) / S) per epoch,
                  which are read in a second order drawn from (seed, e)

EOS is the first token of every document, so that the last token of a document is followed by EOS. There is no padding. The end
of an epoch that does not fill a sequence is dropped. A document that does not fit into a sequence continues in the next one.
Without the second order, consecutive steps and all entries of a batch would often come from the same long document. The number
of sequences consumed so far is the only state, so one integer is enough to resume.
"""

import functools
import inspect
import itertools
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import datasets
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ringattn.train.config import ConfigError, DataConfig
from ringattn.train.data import sources
from ringattn.train.data.tokenizer import Tokenizer

TOKENS = datasets.Features({"tokens": datasets.Sequence(datasets.Value("int32")), "length": datasets.Value("int64")})
NUM_SAMPLED = 64  # documents whose tokens identify a corpus
_loads = itertools.count()  # numbers the corpora that this process loads, in the same order on every rank


@dataclass(frozen=True)
class Batch:
    """B sequences of S tokens.

    tokens: (B, S) int64.
    labels: (B, S) int64, the token after each token; EOS after the last token of a document. Labels are computed before the
        sequence is sharded, so no rank needs a token of another rank.
    documents: for each sequence the lengths of the parts of documents in it, in order; they sum to S.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: tuple[tuple[int, ...], ...]


class PackedDataset:
    """Sequences 0, 1, 2, ... without end. Each one depends only on the documents, seq_len, seed and its number."""

    def __init__(self, documents: datasets.Dataset, seq_len: int, seed: int, shuffle: bool = True):
        """Create the sequences of tokenised documents.

        Args:
            documents: one row per document, with its `tokens` (int32, EOS first) and their number `length`.
            seq_len: S, the number of tokens per sequence.
            seed: of the order of documents and of sequences.
            shuffle: whether the sequences of an epoch are read in random order, and not in the order of the stream.

        Raises:
            ConfigError: the documents do not fill one sequence.
        """
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self.splits = {name: split.num_examples for name, split in (documents.info.splits or {}).items()}  # documents in each
        self.lengths = np.asarray(documents.with_format("numpy")["length"][:], dtype=np.int64)
        self.tokens_per_epoch = int(self.lengths.sum())
        self.sequences_per_epoch = (self.tokens_per_epoch - 1) // seq_len
        self._documents = documents.with_format("arrow")  # rows are views of the cached file, not copies
        self._epoch_order = (-1, self.lengths, self.lengths, self.lengths)
        if self.sequences_per_epoch < 1:
            raise ConfigError(
                f"the corpus has {self.tokens_per_epoch:,} tokens, but data.seq_len={seq_len} requires {seq_len + 1:,}: "
                "provide more text or use a smaller data.seq_len"
            )

    @functools.cached_property
    def sampled(self) -> int:
        """A checksum of the tokens of some documents, which identifies the text."""
        chosen = np.linspace(0, len(self.lengths) - 1, min(len(self.lengths), NUM_SAMPLED)).astype(int)
        rows = (self._documents[int(index)]["tokens"][0].values.to_numpy() for index in chosen)
        return functools.reduce(lambda crc, row: zlib.crc32(row.tobytes(), crc), rows, 0)

    def batch(self, indices: Iterable[int]) -> Batch:
        """Return the sequences with these numbers, in this order."""
        tokens, labels, documents = zip(*(self.sequence(index) for index in indices), strict=True)
        return Batch(torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(labels)), documents)

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return one sequence: tokens (S,) int64, labels (S,) int64, and the lengths of its parts of documents."""
        epoch, position = divmod(index, self.sequences_per_epoch)
        order, ends, sequences = self._order_of(epoch)
        position = int(sequences[position])
        start, stop = position * self.seq_len, (position + 1) * self.seq_len
        # The documents that contain token `start` and token `stop`; the latter is the last label.
        first, last = np.searchsorted(ends, (start, stop), side="right")
        parts = []
        for i in range(first, last + 1):
            tokens = self._documents[int(order[i])]["tokens"][0].values
            begin = int(ends[i]) - len(tokens)
            parts.append(tokens[max(start - begin, 0) : stop + 1 - begin].to_numpy())
        stream = np.concatenate(parts).astype(np.int64)
        edges = np.unique([0, *(ends[first:last] - start), self.seq_len])
        return stream[:-1], stream[1:].copy(), tuple(np.diff(edges).tolist())

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the order of documents in this epoch, the position where each document ends, and the order of sequences."""
        if self._epoch_order[0] != epoch:
            # numpy guarantees the raw words of Philox on every machine and in every release, but not its permutations.
            random = np.random.Philox(key=[self.seed % 2**64, epoch])
            order = np.argsort(random.random_raw(len(self.lengths)), kind="stable")
            sequences = np.arange(self.sequences_per_epoch)
            if self.shuffle:
                sequences = np.argsort(random.random_raw(self.sequences_per_epoch), kind="stable")
            self._epoch_order = (epoch, order, np.cumsum(self.lengths[order]), sequences)
        return self._epoch_order[1:]


def load(config: DataConfig, tokenizer: Tokenizer, shuffle: bool = True) -> PackedDataset:
    """Return the corpus of `config`. It is tokenised once and kept in the cache of `datasets`. All ranks must call it.

    Args:
        config: where the documents come from, seq_len and seed.
        tokenizer: encodes the documents.
        shuffle: whether the sequences of an epoch are read in random order.

    Raises:
        ConfigError: a file, a column or a dataset is missing, cannot be read, or contains no text.
    """
    with _rank_zero_first():
        try:
            documents, column = sources.documents(config)
            json_column = config.column if config.source == "jsonl" else None
            tokens = documents.map(
                _tokenise,
                input_columns=[column],
                fn_kwargs={"tokenizer": tokenizer, "code": _code(tokenizer), "json_column": json_column},
                batched=True,
                batch_size=100,
                remove_columns=documents.column_names,
                features=TOKENS,
                desc="tokenise",
            )
        except ConfigError:
            raise
        except Exception as error:  # the class depends on the reader
            raise sources.cannot_read(config, error) from error
    if len(tokens) == 0:
        raise ConfigError(f"{config.description} contains no text: provide files or rows that are not empty")
    return PackedDataset(tokens, config.seq_len, config.seed, shuffle)


def load_held_out(config: DataConfig, tokenizer: Tokenizer, training: PackedDataset) -> PackedDataset | None:
    """Return the held-out text of `config`, or None if it has none. All ranks must call it.

    Raises:
        ConfigError: as for `load`, or the training text contains some of the held-out text.
    """
    if config.held_out is None:
        return None
    try:
        held_out = load(config.held_out, tokenizer, shuffle=False)
    except ConfigError as error:
        settings = r"data\.(split|path)\b" if config.eval_path else r"data\.(split)\b"
        message = re.sub(settings, r"data.eval_\1", str(error))
        raise ConfigError(f"held-out text (to have none, set data.eval_split=null data.eval_path=null): {message}") from None
    if not sources.are_disjoint(config, config.held_out, training.splits):
        raise ConfigError(
            f"the training text contains some of the held-out text, data.eval_split={config.eval_split} "
            f"data.eval_path={config.eval_path}: hold out other files, or another part, such as 'data.split=\"train[:95%]\"' "
            "and 'data.eval_split=\"train[95%:]\"'"
        )
    return held_out


def _code(tokenizer: Tokenizer) -> str:
    """Return the source code that turns text into tokens. The cache itself identifies functions and classes only by name."""
    return inspect.getsource(_tokenise) + inspect.getsource(sources.json_text) + inspect.getsource(type(tokenizer))


def _tokenise(texts: list[str | None], tokenizer: Tokenizer, code: str, json_column: str | None) -> dict[str, list]:
    """Return rows of TOKENS. Rows without text are left out.

    Args:
        texts: of the documents.
        tokenizer: encodes them.
        code: is part of the cache key, so that tokens of other code are not reused.
        json_column: the column of the text if `texts` are lines of JSON; None if they are the text itself.
    """
    if json_column is not None:
        texts = [sources.json_text(line, json_column) for line in texts]
    tokens = [np.insert(tokenizer.encode(text), 0, tokenizer.eos) for text in texts if text]
    return {"tokens": tokens, "length": [len(document) for document in tokens]}


@contextmanager
def _rank_zero_first() -> Iterator[None]:
    """Run the body on rank 0 first, which fills the cache and shows its progress.

    The other ranks wait, however long that takes.
    """
    if not dist.is_initialized():
        yield
        return
    store, filled = _get_default_store(), f"corpus/{next(_loads)}"
    if dist.get_rank() != 0:
        datasets.disable_progress_bars()
        while not store.check([filled]):
            time.sleep(0.1)
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            store.set(filled, "")
