"""Turn documents into tokens, and pack the tokens into sequences without padding.

    document    one EOS token and the tokens of the text; or, if the tokenizer has a BOS token, BOS, the text and EOS
    epoch e     one stream of T tokens: all documents in a random order that depends on the seed and on e
    sequence    S consecutive tokens of the stream; the label of a token is the next token of the stream

An epoch has floor((T - 1) / S) sequences, which are read in a second random order. Without the second order, consecutive steps
would often read the same long document. A document may continue in the next sequence of the stream.

With several data-parallel ranks, a micro-step takes as long as its most expensive sequence. Therefore, the sequences may be
shuffled in groups. A group contains G sequences with similar costs of attention. Sequences that fill no group are dropped.

The only state of the data is the number of consumed sequences.
"""

import functools
import inspect
import itertools
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import datasets
import datasets.config
import numpy as np
import pyarrow
import torch.distributed as dist
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from datasets.utils import tqdm
from filelock import FileLock
from torch.distributed.distributed_c10d import _get_default_store

from ringattn.train.data import recall, sources
from ringattn.train.data.documents import TOKENS, TokenisedDocuments, group_by_cost, random_order
from ringattn.train.data.mixture import MixtureDataset, in_proportion
from ringattn.train.data.records import RecordDataset, RecordEncoder, split_records
from ringattn.train.data.stream import StreamDataset, open_stream
from ringattn.train.data.tokenizer import Tokenizer
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.settings.config import ConfigError, DataConfig

BATCH_TOKENS = 2**20  # tokens that are kept in memory before they are written to the cache
FILE_TOKENS = 2**26  # tokens in a file of the cache: a killed process loses at most this many
Loaded = TypeVar("Loaded")
END = "end.json"  # marks a complete cache; contains [number of rows by split, number of entries]
log = logging.getLogger(__name__)

# Numbers the corpora that this process loads. All ranks load their corpora in the same order.
_corpus_numbers = itertools.count()


class PackedDataset(TokenisedDocuments):
    """An endless series of sequences. Sequence number i depends only on the arguments of the constructor and on i.

    Attributes:
        sequences_per_epoch: the number of sequences of an epoch, a multiple of `group_size`.
        group_size: the number G of sequences per group, or 1 if there are no groups.
    """

    def __init__(self, documents: datasets.Dataset, seq_len: int, seed: int, shuffle: bool = True, group_size: int = 1):
        """Create the sequences.

        Args:
            documents: one row per document, with the columns of TOKENS.
            seq_len: the number S of tokens per sequence.
            seed: the seed of the random orders.
            shuffle: True for a random order of the sequences of an epoch, False for the order of the stream.
            group_size: the number G of sequences per group. Without `shuffle`, or with fewer sequences, there are no groups.

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

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        epoch, position = divmod(index, self.sequences_per_epoch)
        start = int(self._order_of(epoch)[2][position]) * self.seq_len
        return self.stream(start, start + self.seq_len, epoch)

    def stream(self, start: int, stop: int, epoch: int = 0) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return the tokens `start` to `stop` - 1 of the stream of an epoch, in the same form as `sequence`."""
        order, ends, _ = self._order_of(epoch)
        # The last document contains the last label, token `stop`.
        first, last = np.searchsorted(ends, (start, stop), side="right")
        documents = [self._document(int(index)) for index in order[first : last + 1]]
        skipped = start - (int(ends[first]) - len(documents[0]))
        # The chunks are views, so only the tokens of the sequence are copied.
        stream = pyarrow.chunked_array(documents).slice(skipped, stop - start + 1).to_numpy().astype(np.int64)
        edges = np.unique([0, *(ends[first:last] - start), stop - start])
        return stream[:-1], stream[1:].copy(), tuple(np.diff(edges).tolist())

    def document_number(self, position: int) -> int:
        """Return the number of the document that contains this position of the stream of the first epoch, counted from 0."""
        return int(np.searchsorted(self._order_of(0)[1], position, side="right"))

    def beginning(self, num_tokens: int) -> list[int]:
        """Return the first tokens of the longest document, without the token that begins every document."""
        return self._document(int(self.lengths.argmax()))[1 : 1 + num_tokens].to_pylist()

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the order of an epoch: the numbers of the documents, the position in the stream at which each document ends,
        and the numbers of the sequences.
        """
        if self._epoch_order[0] != epoch:
            random = np.random.Philox(key=[self.seed % 2**64, epoch])
            order = random_order(random, len(self.lengths))
            ends = np.cumsum(self.lengths[order])
            sequences = random_order(random, self._num_filled) if self.shuffle else np.arange(self._num_filled)
            sequences = group_by_cost(random, sequences, self.group_size, lambda: self._costs(ends))
            self._epoch_order = (epoch, order, ends, sequences)
        return self._epoch_order[1:]

    def _costs(self, ends: np.ndarray) -> np.ndarray:
        """Return the cost of attention of each sequence of the stream: the sum of its squared document lengths."""
        bounds = np.arange(self._num_filled + 1) * self.seq_len
        # A stable sort merges sorted arrays in linear time. Two equal edges add 0 to a cost.
        edges = np.sort(np.concatenate([bounds, ends[ends < bounds[-1]]]), kind="stable")
        return np.add.reduceat(np.diff(edges) ** 2, np.searchsorted(edges, bounds[:-1]))


Sequences = PackedDataset | RecordDataset | recall.RecallDataset
TrainingData = Sequences | MixtureDataset | StreamDataset


def load_training(config: DataConfig, tokenizer: Tokenizer) -> TrainingData:
    """Load the training sequences. All ranks must call this function. Errors as in `load`."""
    if config.mix:
        sources = load_members(config, lambda member: load(member, tokenizer))
        return MixtureDataset(sources, config.weights, config.group_size or 1)
    return open_stream(config, tokenizer) if config.streaming else load(config, tokenizer)


def load(config: DataConfig, tokenizer: Tokenizer, shuffle: bool = True) -> Sequences:
    """Load the part of a corpus that is not held out. All ranks must call this function.

    Raises:
        ConfigError: a file, a column or a dataset is missing, cannot be read, or contains too little text.
    """
    if config.source == "recall":
        recall.check_vocabulary(tokenizer.vocab_size)
        return recall.RecallDataset(config.seq_len, config.seed)
    documents = load_documents(config, tokenizer)
    if config.resolved_eval_fraction > 0:
        documents, _ = _split(documents, config, config.seq_len)
    if config.format != "text":
        return _pack_records(documents, config, config.seed, config.group_size or 1)
    return PackedDataset(documents, config.seq_len, config.seed, shuffle, config.group_size or 1)


def load_members(config: DataConfig, load_member: Callable[[DataConfig], Loaded]) -> dict[str, Loaded]:
    """Load every source of a mixture with a function. All ranks must call this function.

    Raises:
        ConfigError: on every rank, if a source cannot be loaded. The message contains its name.
    """
    loaded = dict[str, Loaded]()
    for name, member in config.members.items():
        # In each call, the other ranks wait for rank 0, which must therefore report its errors before the next call.
        with sync_errors():
            try:
                loaded[name] = load_member(member)
            except ConfigError as error:
                raise ConfigError(f"data.mix: {name}: {error}") from error
    return loaded


def load_fraction(config: DataConfig, tokenizer: Tokenizer, trained_len: int) -> PackedDataset | RecordDataset:
    """Load the held-out fraction of a corpus. The fraction of a text depends on the `data.seq_len` of the training."""

    def load_part(config: DataConfig) -> datasets.Dataset:
        return _split(load_documents(config, tokenizer), config, trained_len)[1]

    if config.mix:
        parts = load_members(config, load_part)
        documents = in_proportion(list(parts.values()), config.weights)
    else:
        documents = load_part(config)
    if config.format != "text":
        return _pack_records(documents, config, seed=0)
    return PackedDataset(documents, config.seq_len, seed=0, shuffle=False)


def _pack_records(documents: datasets.Dataset, config: DataConfig, seed: int, group_size: int = 1) -> RecordDataset:
    packed = RecordDataset(documents, config.seq_len, seed, group_size)
    if packed.num_dropped and dist.get_rank() == 0:
        counts = f"{packed.num_dropped:,} of {len(packed.lengths):,} records of {config.description}"
        _log_once(f"{'dropped':<12}{counts}, because they have more than data.seq_len={config.seq_len} tokens")
    return packed


def _split(documents: datasets.Dataset, config: DataConfig, seq_len: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    if config.format != "text":
        return split_records(documents, config.eval_fraction)
    return split_documents(documents, config.eval_fraction, seq_len)


def load_documents(config: DataConfig, tokenizer: Tokenizer) -> datasets.Dataset:
    """Return the tokenised documents of a corpus, with the columns of TOKENS. All ranks must call this function.

    The first call tokenises the documents into a folder in the cache of `datasets`. If this call is killed, the next call
    repeats only the incomplete file.

    Raises:
        ConfigError: a file, a column or a dataset is missing, cannot be read, or contains no text.
    """
    with _rank_zero_first():
        try:
            tokens, skipped, total = _cached_tokens(config, tokenizer)
        except ConfigError:
            raise
        except Exception as error:  # The type of the error depends on the reader.
            raise sources.cannot_read(config, error) from error
    if skipped and config.path and dist.get_rank() == 0:
        units = {"text": "files", "jsonl": "lines"}.get(config.source, "rows")
        _log_once(f"{'skipped':<12}{skipped:,} of {total:,} {units} of {config.description}, because they contain no text")
    if len(tokens) == 0:
        raise ConfigError(f"{config.description} contains no text: provide files or rows that are not empty")
    return tokens


def split_documents(documents: Any, fraction: float, seq_len: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split documents into a part for training and a held-out part.

    The held-out part contains random documents and the beginning of one further document. The split depends only on the lengths
    of the documents and on the arguments.

    Args:
        documents: one row per document, with the columns of TOKENS.
        fraction: the fraction of the tokens that is held out.
        seq_len: the number of tokens per sequence. Each part must fill at least one sequence.

    Raises:
        ConfigError: the documents do not fill one sequence in each part.
    """
    lengths = np.asarray(documents.with_format("numpy")["length"][:], dtype=np.int64)
    total, eval_tokens = int(lengths.sum()), max(round(fraction * int(lengths.sum())), seq_len + 1)
    if total - eval_tokens < seq_len + 1:
        raise ConfigError(
            f"the corpus has {total:,} tokens, but data.seq_len={seq_len} requires {2 * (seq_len + 1):,}, half of them as "
            "held-out text: provide more text, use a smaller data.seq_len, or set data.eval_fraction=0"
        )
    order = np.argsort(np.random.Philox(key=[0, 0]).random_raw(len(lengths)), kind="stable")
    ends = np.cumsum(lengths[order])
    num_whole = int(np.searchsorted(ends, eval_tokens, side="right"))
    held_out, remaining = np.sort(order[:num_whole]), np.sort(order[num_whole + 1 :])
    divided, length = int(order[num_whole]), eval_tokens - int(lengths[order[:num_whole]].sum())
    beginning, remainder = _part(documents, divided, 0, length), _part(documents, divided, length, int(lengths[divided]))
    training = datasets.concatenate_datasets([documents.select(remaining), remainder])
    return training, datasets.concatenate_datasets([documents.select(held_out), beginning])


def _part(documents: datasets.Dataset, index: int, start: int, stop: int) -> datasets.Dataset:
    """Return the tokens from `start` to `stop` of a document as a new document, which may be empty, without a copy."""
    tokens = documents.with_format("arrow")[index]["tokens"][0].values.slice(start, stop - start)
    rows = min(len(tokens), 1)
    table = pyarrow.table(
        {"tokens": pyarrow.ListArray.from_arrays([0, len(tokens)][: rows + 1], tokens), "length": [len(tokens)] * rows},
        schema=TOKENS.arrow_schema,
    )
    return datasets.Dataset(InMemoryTable(table), datasets.DatasetInfo(features=TOKENS))


def load_held_out(config: DataConfig, tokenizer: Tokenizer, training: TrainingData) -> Sequences | None:
    """Load the held-out text in the order of the stream, or return None if there is none. All ranks must call this function.

    Args:
        config: the settings of the training text, which also determine the held-out text.
        training: the training text.

    Raises:
        ConfigError: the held-out text cannot be loaded, or the training text contains some of it.
    """
    if config.source == "recall":
        return recall.RecallDataset(config.seq_len, recall.EVALUATION_SEED)
    if config.resolved_eval_fraction > 0:
        return load_fraction(config, tokenizer, config.seq_len)
    if config.held_out is None:
        return None
    try:
        held_out = load(config.held_out, tokenizer, shuffle=False)
    except ConfigError as error:
        settings = r"data\.(split|path)\b" if config.eval_path else r"data\.(split)\b"
        message = re.sub(settings, r"data.eval_\1", str(error))
        raise ConfigError(f"held-out text: {message}; or leave out data.eval_split and data.eval_path") from None
    assert isinstance(training, TokenisedDocuments | StreamDataset)
    if not sources.are_disjoint(config, config.held_out, training.splits):
        raise ConfigError(
            f"the training text contains some of the held-out text, data.eval_split={config.eval_split} "
            f"data.eval_path={config.eval_path}: hold out other files, or another part, such as 'data.split=\"train[:95%]\"' "
            "and 'data.eval_split=\"train[95%:]\"'"
        )
    return held_out


@functools.cache
def _log_once(message: str) -> None:
    log.info(message)


def _cached_tokens(config: DataConfig, tokenizer: Tokenizer) -> tuple[datasets.Dataset, int, int]:
    """Return the tokenised documents, the number of lines or rows without text, and the number of all lines or rows."""
    encoder = None if config.format == "text" else RecordEncoder(config, tokenizer)
    key = Hasher.hash([sources.identity(config), tokenizer, _code(tokenizer), *(encoder.identity if encoder else [])])
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "ringattn" / key
    if not (folder / END).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock:
            # Some file systems do not support locks. On these, two processes may tokenise the same text.
            with suppress(OSError):
                lock.enter_context(FileLock(folder / ".lock", fallback_to_soft=False))
                for partial in folder.glob("*.partial"):  # the file that a killed process was writing
                    partial.unlink()
            if not (folder / END).exists():
                _fill_cache(config, encoder or (lambda _, text: _tokenise(text, tokenizer)), folder)
    files = sorted(folder.glob("*.arrow"))
    tokens = datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
    sizes, total = json.loads((folder / END).read_text())
    splits = {name: datasets.SplitInfo(name=name, num_examples=size) for name, size in sizes.items()}
    tokens.info.splits = datasets.SplitDict(splits)
    return tokens, total - len(tokens), total


def _fill_cache(config: DataConfig, encode: Callable[[str, Any], np.ndarray], folder: Path) -> None:
    """Tokenise the entries of a corpus that are not in the cache yet.

    The name of a file contains the number of the file, and the number of entries in this file and all earlier ones.
    """
    files = sorted(folder.glob("*.arrow"))
    documents, sizes = sources.read_documents(config)
    batches = _tokenised_batches(documents, encode, int(files[-1].stem.split("-")[1]) if files else 0)
    entries, rows = 0, 0
    for number, first in enumerate(batches, len(files)):
        partial, size = folder / f"{uuid.uuid4().hex}.partial", 0
        with pyarrow.OSFile(str(partial), "wb") as file, pyarrow.ipc.new_stream(file, TOKENS.arrow_schema) as writer:
            for last in itertools.chain([first], batches):
                entries, rows, batch = last
                writer.write_batch(batch)
                size += len(batch["tokens"].values)
                if size >= FILE_TOKENS:
                    break
        partial.replace(folder / f"{number:06}-{entries:012}.arrow")
    partial = folder / f"{uuid.uuid4().hex}.partial"
    partial.write_text(json.dumps([sizes or {"train": rows}, entries]))
    partial.replace(folder / END)


def _tokenised_batches(
    documents: Iterable[sources.Entry], encode: Callable[[str, Any], np.ndarray], done: int
) -> Iterator[tuple[int, int, pyarrow.RecordBatch]]:
    """Tokenise the documents after the first `done` entries.

    Yields:
        The number of entries so far, the number of rows among them, and a batch with the columns of TOKENS.
    """
    batch, size, entries, rows = list[np.ndarray](), 0, 0, 0
    for where, text in tqdm(documents, desc="tokenise", unit=" documents"):
        entries, rows = entries + 1, rows + (text is not None)
        if text and entries > done:
            batch.append(encode(where, text))
            size += len(batch[-1])
        del text  # A document may have hundreds of megabytes.
        if size >= BATCH_TOKENS:
            yield entries, rows, _to_arrow(batch)
            batch, size = list[np.ndarray](), 0
    yield entries, rows, _to_arrow(batch)


def _to_arrow(batch: list[np.ndarray]) -> pyarrow.RecordBatch:
    lengths = [len(tokens) for tokens in batch]
    tokens = batch[0] if len(batch) == 1 else np.concatenate([np.empty(0, np.int32), *batch])
    starts = pyarrow.array(np.cumsum([0, *lengths]), pyarrow.int32())
    columns = [pyarrow.ListArray.from_arrays(starts, pyarrow.array(tokens)), pyarrow.array(lengths, pyarrow.int64())]
    return pyarrow.record_batch(columns, schema=TOKENS.arrow_schema)


def _code(tokenizer: Tokenizer) -> str:
    """Return the source code that turns files into tokens. A change of this code must invalidate the cache."""
    return inspect.getsource(_tokenise) + inspect.getsource(sources) + inspect.getsource(type(tokenizer))


def _tokenise(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a document, with the tokens that begin and end it: int32 (N,)."""
    tokens = np.insert(tokenizer.encode(text), 0, tokenizer.bos)
    return tokens if tokenizer.bos == tokenizer.eos else np.append(tokens, np.int32(tokenizer.eos))


@contextmanager
def _rank_zero_first() -> Generator[None]:
    """Run the body on rank 0, which fills the cache, and then on the other ranks.

    The other ranks poll the store, because a collective would have a time limit.
    """
    store, filled = _get_default_store(), f"corpus/{next(_corpus_numbers)}"
    if dist.get_rank() != 0:
        datasets.disable_progress_bars()
        while not store.check([filled]):
            time.sleep(0.1)
    try:
        yield
    finally:
        store.set(filled, "")
