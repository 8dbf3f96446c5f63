"""Documents to tokens to full sequences, read at random so that resuming needs one integer.

    documents --Dataset.map--> [EOS] + tokens, on disk
    epoch e  = all documents in an order drawn from (seed, e), joined into one stream of T tokens
    sequence = S tokens of the stream, and the one after them as the last label: floor((T - 1) / S) an epoch

EOS stands between documents, as the first token of each: the last token of one is followed by it, and it is followed by the
first of the next. No padding; the tail of an epoch that fills no sequence is dropped. Documents are cut where a sequence ends
and continue in the next. The only state is the number of sequences consumed.
"""

import functools
import glob
import inspect
import itertools
import json
import re
import sysconfig
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import torch
import torch.distributed as dist
from datasets.arrow_writer import SchemaInferenceError
from torch.distributed.distributed_c10d import _get_default_store

from ringattn.train.config import ConfigError, DataConfig
from ringattn.train.data.tokenizer import Tokenizer

TOKENS = datasets.Features(
    {"tokens": datasets.Sequence(datasets.Value("int32")), "length": datasets.Value("int64")},
)
SAMPLED = 64  # documents that stand for all of a corpus
_loads = itertools.count()  # the same on every rank
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib"}


@dataclass(frozen=True)
class Batch:
    """B sequences of S tokens.

    tokens: (B, S) int64.
    labels: (B, S) int64, the token after each: EOS after the last of a document. They are shifted here, before any sharding.
    documents: per row, the lengths of the parts of documents in it, in order; they sum to S.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: tuple[tuple[int, ...], ...]


class PackedDataset:
    """Sequences 0, 1, 2, ... without end, each a function of (documents, seq_len, seed, index) alone."""

    def __init__(self, documents: datasets.Dataset, seq_len: int, seed: int):
        """`documents` has a row a document: `tokens` int32, beginning with EOS, and their number `length`.

        Raises ConfigError when they do not fill one sequence.
        """
        self.seq_len = seq_len
        self.seed = seed
        self.splits = {name: split.num_examples for name, split in (documents.info.splits or {}).items()}  # documents in each
        self.lengths = np.asarray(documents.with_format("numpy")["length"][:], dtype=np.int64)
        self.tokens_per_epoch = int(self.lengths.sum())
        self.sequences_per_epoch = (self.tokens_per_epoch - 1) // seq_len
        self._documents = documents.with_format("arrow")  # rows are views of the file, not copies
        self._shuffle = (-1, self.lengths, self.lengths)
        if self.sequences_per_epoch < 1:
            raise ConfigError(
                f"the corpus has {self.tokens_per_epoch:,} tokens, data.seq_len={seq_len} needs {seq_len + 1:,}: "
                f"give more text or a shorter data.seq_len"
            )

    @functools.cached_property
    def sampled(self) -> int:
        """A number that other text would hardly have: of the tokens of some documents."""
        chosen = np.linspace(0, len(self.lengths) - 1, min(len(self.lengths), SAMPLED)).astype(int)
        rows = (self._documents[int(place)]["tokens"][0].values.to_numpy() for place in chosen)
        return functools.reduce(lambda crc, row: zlib.crc32(row.tobytes(), crc), rows, 0)

    def batch(self, indices: Iterable[int]) -> Batch:
        """The sequences of these indices, in this order."""
        tokens, labels, documents = zip(*(self.sequence(index) for index in indices), strict=True)
        return Batch(torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(labels)), documents)

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """One row of a Batch: tokens (S,) int64, labels (S,) int64, lengths of the parts of documents."""
        epoch, position = divmod(index, self.sequences_per_epoch)
        order, ends = self._shuffled(epoch)
        start, stop = position * self.seq_len, (position + 1) * self.seq_len
        first, last = np.searchsorted(ends, (start, stop), side="right")  # the documents of tokens start and stop
        parts = []
        for place in range(first, last + 1):
            tokens = self._documents[int(order[place])]["tokens"][0].values
            begin = int(ends[place]) - len(tokens)
            parts.append(tokens[max(start - begin, 0) : stop + 1 - begin].to_numpy())
        stream = np.concatenate(parts).astype(np.int64)
        edges = np.unique([0, *(ends[first:last] - start), self.seq_len])
        return stream[:-1], stream[1:].copy(), tuple(np.diff(edges).tolist())

    def _shuffled(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the documents in this epoch, and where each ends in its stream."""
        if self._shuffle[0] != epoch:
            # numpy promises the same raw Philox words everywhere and for ever, but not the same permutations.
            words = np.random.Philox(key=[self.seed % 2**64, epoch]).random_raw(len(self.lengths))
            order = np.argsort(words, kind="stable")
            self._shuffle = (epoch, order, np.cumsum(self.lengths[order]))
        return self._shuffle[1:]


def load(config: DataConfig, tokenizer: Tokenizer) -> PackedDataset:
    """The corpus of `config`, tokenised once and kept in the cache of `datasets`. All ranks call it.

    Raises ConfigError when a file, a column or a dataset is missing, cannot be read or holds no text.
    """
    with _rank_zero_first():
        try:
            documents, column = _documents(config)
            json_column = config.column if config.source == "jsonl" else None
            _check_column(documents, column, config)
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
        except Exception as error:  # each reader, and the hub, has its own
            raise ConfigError(f"{config.origin} cannot be read: {_reason(error)}; {_advice(config)}") from error
    if len(tokens) == 0:
        raise ConfigError(f"{config.origin} holds no text: give files or rows that are not empty")
    return PackedDataset(tokens, config.seq_len, config.seed)


def load_held_out(config: DataConfig, tokenizer: Tokenizer, training: PackedDataset) -> PackedDataset | None:
    """The held-out text of `config` beside what is trained on; None if it has none. All ranks call it.

    Raises ConfigError as `load` does, and where training reads some of it.
    """
    if config.held_out is None:
        return None
    try:
        held_out = load(config.held_out, tokenizer)
    except ConfigError as error:
        settings = r"data\.(split|path)\b" if config.eval_path else r"data\.(split)\b"
        message = re.sub(settings, r"data.eval_\1", str(error))
        raise ConfigError(f"held-out text (none by data.eval_split=null data.eval_path=null): {message}") from None
    if not _are_apart(config, config.held_out, training.splits):
        raise ConfigError(
            f"training reads some of the held-out text, data.eval_split={config.eval_split} data.eval_path={config.eval_path}: "
            "hold out other files, or another part, as 'data.split=\"train[:95%]\"' and 'data.eval_split=\"train[95%:]\"' do"
        )
    return held_out


def _are_apart(training: DataConfig, held_out: DataConfig, sizes: dict[str, int]) -> bool:
    """Whether no file is of both, or they are parts of the same files that have no document in common."""
    read = _files if training.path and training.source != "hub" else lambda config: [config.path]
    if read(training) == read(held_out):
        return not _overlap(training.split, held_out.split, sizes)
    return not set(read(training)) & set(read(held_out))


def _overlap(first: str, second: str, sizes: dict[str, int]) -> bool:
    """Whether two splits, as `datasets` writes them, have a row in common; `sizes` are those of the whole splits."""
    whole = "+".join(sizes)
    specs = [datasets.ReadInstruction.from_spec(whole if split == "all" else split) for split in (first, second)]
    parts = [spec.to_absolute(sizes) for spec in specs]
    return any(a.splitname == b.splitname and max(a.from_, b.from_) < min(a.to, b.to) for a, b in itertools.product(*parts))


def _documents(config: DataConfig) -> tuple[datasets.Dataset, str]:
    """The documents, a row each, and the name of their column of text."""
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # releases before 4 would ask, or obey the environment
    match config.source:
        case "stdlib":
            return _text_files(_library_files(), config.split, errors="replace"), "text"
        case "text":
            return _text_files(_files(config), config.split, errors="strict"), "text"
        case "jsonl":
            # line by line, and not by the reader of JSON: that wants the same columns in all files
            return _text_files(_files(config), config.split, errors="strict", sample_by="line"), "text"
        case "parquet":
            return _parquet_column(config), config.column
        case "hub":
            return datasets.load_dataset(_hub_name(config), config.subset, split=config.split), config.column
    raise ConfigError(f"data.source={config.source} is unknown: use stdlib, text, jsonl, parquet or hub")


def _text_files(files: list[str], split: str, errors: str, sample_by: str = "document") -> datasets.Dataset:
    reading = dict(encoding="utf-8-sig", encoding_errors=errors)  # without the mark that some files begin with
    return datasets.load_dataset("text", data_files=files, sample_by=sample_by, split=split, **reading)


def _parquet_column(config: DataConfig) -> datasets.Dataset:
    """The column of text alone: files may differ in the others."""
    files = _files(config)
    try:
        return datasets.load_dataset("parquet", data_files=files, split=config.split, columns=[config.column])
    except Exception:
        for file in itertools.chain.from_iterable(map(glob.glob, files)):
            names = pyarrow.parquet.read_schema(file).names
            if config.column not in names:
                raise _no_column(file, config.column, names) from None
        raise


def _library_files() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(str(file) for file in root.rglob("*.py") if not NOT_LIBRARY & {*file.relative_to(root).parts})


def _files(config: DataConfig) -> list[str]:
    if not config.path:
        raise ConfigError(f"data.source={config.source} needs data.path: a file or a glob such as 'corpus/**/*.txt'")
    if Path(config.path).expanduser().is_dir():
        raise ConfigError(f"data.path={config.path} is a folder: give its files, such as '{config.path}/**/*.*'")
    pattern = str(Path(config.path).expanduser())
    names = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)
    files = sorted(name for name in names if Path(name).is_file())
    if not files:
        raise ConfigError(f"data.path={config.path} matches no file: give a file or a glob such as 'corpus/**/*.txt'")
    return sorted({glob.escape(str(Path(name).resolve())) for name in files})


def _hub_name(config: DataConfig) -> str:
    # A bare name may mean a reader of local files, one of which unpickles them; a local path is no dataset of the hub.
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", config.path or "") or Path(config.path).exists():
        raise ConfigError(f"data.path={config.path} names no dataset of the hub: give owner/name")
    return config.path


def _check_column(documents: datasets.Dataset, column: str, config: DataConfig) -> None:
    columns = documents.features
    if column not in columns:
        raise _no_column(config.origin, column, columns)
    if getattr(columns[column], "dtype", None) not in ("string", "large_string"):
        raise _no_text(config.origin, column, columns[column])


def _no_column(where: str, column: str, columns: Iterable[str]) -> ConfigError:
    return ConfigError(f"{where} has no column {column!r}: set data.column to one of {', '.join(columns)}")


def _no_text(where: str, column: str, held: object) -> ConfigError:
    return ConfigError(f"{where}: column {column!r} holds {held}, not text: set data.column")


def _code(tokenizer: Tokenizer) -> str:
    """What makes tokens of a text: the cache knows functions and classes by name alone."""
    return inspect.getsource(_tokenise) + inspect.getsource(_text_of) + inspect.getsource(type(tokenizer))


def _tokenise(texts: list[str | None], tokenizer: Tokenizer, code: str, json_column: str | None) -> dict[str, list]:
    """Rows of TOKENS; a row without text makes none.

    code: for the cache, which keeps what other code made apart.
    json_column: where lines of JSON have their text; None: texts are no JSON.
    """
    if json_column is not None:
        texts = [_text_of(line, json_column) for line in texts]
    tokens = [np.insert(tokenizer.encode(text), 0, tokenizer.eos) for text in texts if text]
    return {"tokens": tokens, "length": [len(document) for document in tokens]}


def _text_of(line: str, column: str) -> str | None:
    """The text of a line of JSON, None if that is null or the line empty."""
    if not line.strip():
        return None
    shown = f"data.source=jsonl: the line {line[:60]!r}" + "..." * (len(line) > 60)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{shown} is no JSON ({error}): check the file") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{shown} is no JSON object with a column of text: check the file")
    if column not in row:
        raise _no_column(shown, column, row)
    if not isinstance(row[column], str | None):
        raise _no_text(shown, column, f"{row[column]!r:.60}")
    return row[column]


@contextmanager
def _rank_zero_first() -> Iterator[None]:
    """Rank 0 fills the cache, and shows its progress, while the others wait, however long; they then find it filled."""
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


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__:
        error = error.__cause__
    if isinstance(error, SchemaInferenceError):  # of a reader that looks for the first row
        return "it holds nothing"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '').rstrip('.')}"


def _advice(config: DataConfig) -> str:
    if config.source == "hub":
        return "check the name, the split and the network, or download it and use data.source=parquet"
    return "check the file, its encoding (UTF-8) and data.split"
