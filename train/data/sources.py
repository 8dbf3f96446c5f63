"""Read documents from Python's standard library, text files, JSON lines, Parquet files, or the Hugging Face hub.

Every error names the file, and the line or the row. Readers keep only one document of a file in memory.
"""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from glob import escape, glob
from pathlib import Path
from typing import IO, Any, cast

import datasets
import datasets.config
import pyarrow
import pyarrow.parquet

from ringattn.train.settings.config import ConfigError, DataConfig

# Folders of the standard library that contain tests or installed packages.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib"}

# If `data.path` is a folder, the files with these names are read.
NAMES_IN_FOLDERS = {"text": "*", "jsonl": "*.jsonl, *.json, *.ndjson", "parquet": "*.parquet"}
COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")

# The first bytes of compressed files. Except for "BZh91AY", UTF-8 text never begins with these bytes.
MAGIC = {b"\x1f\x8b": gzip.open, b"BZh91AY": bz2.open, b"\xfd7zXZ\x00": lzma.open}
ZSTANDARD = b"\x28\xb5\x2f\xfd"
ARCHIVE = re.compile(r"\.(zip|7z|rar|tar|tgz|tar\.\w+)$", re.IGNORECASE)

# A streamed dataset of the hub has at most this many held-out rows. An evaluation reads only a part of them.
HELD_OUT_ROWS = 10_000

# The place of a document, for error messages, and its text, or a record with `DataConfig.columns`. A row without text has the
# text "". A blank line of JSON lines has the text None, and does not count as a row in a slice such as "train[:90%]".
Entry = tuple[str, str | dict[str, Any] | None]


def read_documents(config: DataConfig) -> tuple[Iterator[Entry], dict[str, int] | None]:
    """Read the documents of a corpus.

    Returns:
        The documents, and the number of rows by split. The numbers are None for the whole split "train", because its rows are
        counted only at the end.

    Raises:
        ConfigError: a file or the column is missing, cannot be read or is not text, or a document is larger than
            `data.max_document_mb`. The iterator also raises this error.
        Exception: a dataset of the hub or a split cannot be read. The type depends on the reader.
    """
    if config.source == "hub":
        rows = load_hub(config)
        check_hub_columns(rows, config)
        return hub_rows(rows, config), {
            name: split.num_examples for name, split in (rows.info.splits or dict[str, Any]()).items()
        }
    if config.split in ("train", "all"):
        return _all_documents(config), None
    sizes = {"train": sum(text is not None for _, text in _all_documents(config))}
    return _select(config, _absolute_parts(config.split, sizes)), sizes


def identity(config: DataConfig) -> list[object]:
    """Return values that change if the documents of a corpus change."""
    if config.source == "hub":
        rows: Any = load_hub(config)
        return [rows._fingerprint, config.columns, config.max_document_mb]
    names = files(config) if config.path else library_files()
    states = [(name, os.stat(name).st_size, os.stat(name).st_mtime_ns) for name in names]
    return [config.source, config.split, config.columns, config.max_document_mb, states]


def _select(config: DataConfig, parts: list[Any]) -> Iterator[Entry]:
    for part in parts:
        row = 0
        for entry in _all_documents(config):
            if row >= part.to:
                break
            if row >= part.from_:
                yield entry
            row += entry[1] is not None


def _all_documents(config: DataConfig) -> Iterator[Entry]:
    match config.source:
        case "stdlib":
            for file in map(Path, library_files()):
                yield str(file), file.read_text("utf-8-sig", "replace")
        case "packages":
            for text in library_packages():
                yield "a package", text
        case "text":
            for file in files(config):
                yield file, _decode(file, _read_limited(file, config.max_document_mb), is_file=True)
        case "jsonl" | "parquet":
            for file in files(config):
                yield from read_file(file, config)
        case _:
            raise AssertionError(f"data.source={config.source} has no reader")


def read_file(file: str, config: DataConfig) -> Iterator[Entry]:
    """Read the documents of a file of JSON lines or of a Parquet file."""
    return _json_rows(file, config) if config.source == "jsonl" else _parquet_rows(file, config)


def _open(file: str) -> IO[bytes]:
    """Open a file that may be compressed."""
    if ARCHIVE.search(file):
        raise ConfigError(f"{file} is an archive: extract it, and set data.path to its files")
    with open(file, "rb") as stream:
        start = stream.read(7)
    if start.startswith(ZSTANDARD):
        return cast("IO[bytes]", io.BufferedReader(pyarrow.input_stream(file, compression="zstd")))
    opener: Any = next((opener for magic, opener in MAGIC.items() if start.startswith(magic)), open)
    return opener(file, "rb")


def _read_limited(file: str, limit_mb: int) -> bytes:
    try:
        with _open(file) as stream:
            content = stream.read(limit_mb * 10**6 + 1)
    except READ_ERRORS as error:
        raise _cannot_read_file(file, error) from error
    check_size(file, len(content), limit_mb)
    return content


def _json_rows(file: str, config: DataConfig) -> Iterator[Entry]:
    limit = config.max_document_mb * 10**6
    try:
        with _open(file) as stream:
            for number in itertools.count(1):
                # The length is limited, because a file without line breaks may be larger than the memory.
                line = stream.readline(limit + 2)
                if not line:
                    return
                where = f"{file}, line {number}"
                check_size(where, len(line.rstrip(b"\r\n")), config.max_document_mb)
                content = (
                    _json_text(where, line, config.column) if config.format == "text" else _json_record(where, line, config)
                )
                del line  # A document may have hundreds of megabytes.
                yield where, content
    except READ_ERRORS as error:
        raise _cannot_read_file(file, error) from error


def _parquet_rows(file: str, config: DataConfig) -> Iterator[Entry]:
    try:
        with pyarrow.parquet.ParquetFile(file) as reader:
            if reader.metadata.num_rows == 0:  # such a file may have no columns
                return
            schema = reader.schema_arrow
            check_columns(file, schema.names, config)
            texts = pyarrow.string(), pyarrow.large_string(), pyarrow.null()
            if config.format == "text" and (kind := schema.field(config.column).type) not in texts:
                raise no_text(file, config.column, kind)
            yield from _arrow_rows(file, reader.iter_batches(batch_size=64, columns=config.columns), config)
    except READ_ERRORS as error:
        raise _cannot_read_file(file, error) from error


def check_hub_columns(rows: Any, config: DataConfig) -> None:
    check_columns(config.description, rows.features, config)
    texts = "string", "large_string"
    if config.format == "text" and getattr(kind := rows.features[config.column], "dtype", None) not in texts:
        raise no_text(config.description, config.column, kind)


def hub_rows(rows: Any, config: DataConfig) -> Iterator[Entry]:
    """Read the documents of a Dataset or an IterableDataset."""
    yield from _arrow_rows(config.description, rows.select_columns(config.columns).with_format("arrow").iter(64), config)


def _arrow_rows(where: str, batches: Iterable[Any], config: DataConfig) -> Iterator[Entry]:
    number = itertools.count(1)
    for batch in batches:
        if config.format == "text":
            for value in batch[config.column]:
                yield _arrow_text(f"{where}, row {next(number)}", value, config.max_document_mb)
        else:
            for record in batch.to_pylist():
                yield f"{where}, row {next(number)}", record


def _arrow_text(where: str, value: pyarrow.Scalar, limit_mb: int) -> Entry:
    content = value.as_buffer().to_pybytes() if value.is_valid else b""
    check_size(where, len(content), limit_mb)
    return where, _decode(where, content)


def _decode(where: str, content: bytes, is_file: bool = False) -> str:
    try:
        return content.decode("utf-8-sig")  # without the byte-order mark at the beginning of a file
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        where += f", line {line}" if is_file else ""
        byte = f"{content[error.start]:#04x}"
        raise ConfigError(f"{where}: the byte {byte} is not UTF-8: convert the file to UTF-8, or remove it") from None


def check_size(where: str, size: int, limit_mb: int) -> None:
    if size > limit_mb * 10**6:
        raise ConfigError(
            f"{where} has more than data.max_document_mb={limit_mb} MB: split this document, or raise data.max_document_mb"
        )


# All errors that a reader may raise. The only common base class of zlib.error and lzma.LZMAError is Exception.
READ_ERRORS = (OSError, EOFError, pyarrow.ArrowException, lzma.LZMAError, zlib.error)


def _cannot_read_file(file: str, error: Exception) -> ConfigError:
    reason = next(iter(str(error).splitlines()), "").rstrip(".")
    return ConfigError(f"{file} cannot be read: {type(error).__name__}: {reason}; check the file, or remove it")


def library_files() -> list[str]:
    found = list[str]()
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        # Excluded folders must not be searched, because site-packages may contain many thousand files.
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def library_packages() -> list[str]:
    """Return one text per package of Python's standard library, or per module outside of packages, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    packages = itertools.groupby(map(Path, library_files()), key=lambda file: file.relative_to(root).parts[0])
    return ["\n".join(file.read_text("utf-8-sig", "replace") for file in package) for _, package in packages]


def files(config: DataConfig) -> list[str]:
    """Return the files that `data.path` names, as sorted absolute paths.

    Raises:
        ConfigError: data.path is missing, or names no file.
    """
    if not config.path:
        raise ConfigError(f"data.source={config.source} requires data.path: a file, a folder or a glob such as 'corpus/*.txt'")
    path, pattern = Path(config.path).expanduser(), ""
    if path.is_dir():
        pattern = NAMES_IN_FOLDERS[config.source]
        endings = tuple(f"{ending}{suffix}" for ending in pattern.replace("*", "").split(", ") for suffix in COMPRESSED)
        names = [name for name in glob(f"{escape(str(path))}/**", recursive=True) if name.endswith(endings)]
    else:
        names = [str(path)] if path.exists() else glob(str(path), recursive=True)
    # Earlier versions sorted the escaped paths, and their checkpoints contain a position in this order.
    found = sorted({str(Path(name).resolve()) for name in names if Path(name).is_file()}, key=escape)
    if not found:
        matches = f"is a folder without a file {pattern}" if pattern else "matches no file"
        raise ConfigError(f"data.path={config.path} {matches}: pass a file, a folder or a glob such as 'corpus/**/*.txt'")
    return found


def load_hub(config: DataConfig) -> datasets.Dataset:
    """Download a dataset of the hub. With `data.streaming`, download only the first HELD_OUT_ROWS rows of the split."""
    if not config.streaming:
        name = _hub_name(config)
        return datasets.load_dataset(name, config.subset, split=config.split)
    rows = open_hub(config)
    # The cache of `datasets` finds the rows by these arguments.
    arguments = {"config": config, "revision": hub_commit(config)}
    found: Any = datasets.Dataset.from_generator(_first_rows, features=rows.features, gen_kwargs=arguments)
    return found


def _first_rows(config: DataConfig, revision: str) -> Iterator[dict[str, Any]]:
    yield from open_hub(config, revision).take(HELD_OUT_ROWS)


def open_hub(config: DataConfig, revision: str | None = None) -> Any:
    """Open a dataset of the hub as an IterableDataset, which is downloaded while it is read."""
    settings: dict[str, Any] = {"split": config.split, "revision": revision, "streaming": True}
    rows: Any = datasets.load_dataset(_hub_name(config), config.subset, **settings)
    # Without a description of the columns, the first rows must be read.
    return rows if rows.features is not None else rows._resolve_features()


def hub_commit(config: DataConfig) -> str:
    return str(datasets.load_dataset_builder(_hub_name(config), config.subset).hash)


def _hub_name(config: DataConfig) -> str:
    # Releases of `datasets` before 4 would otherwise ask whether to run the code of a dataset.
    settings: Any = datasets.config
    settings.HF_DATASETS_TRUST_REMOTE_CODE = False
    # `datasets` would interpret a name without an owner as a reader for local files. One of these readers unpickles files,
    # which may run any code.
    if config.path is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", config.path) or Path(config.path).exists():
        raise ConfigError(f"data.path={config.path} is not a dataset of the hub: it must have the form owner/name")
    return config.path


def _json_row(where: str, line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None for a blank line. Raise ConfigError for any other line."""
    content = _decode(where, line)
    if not (content := content.strip()):
        return None
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)
        raise ConfigError(f"{where} is not valid JSON ({reason}): check the line, which begins with {content[:30]!r}") from None
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where} is not a JSON object with a text column: check the line, which begins with {content[:30]!r}"
        )
    return row


def _json_record(where: str, line: bytes, config: DataConfig) -> dict[str, Any] | None:
    if (row := _json_row(where, line)) is None:
        return None
    check_columns(where, row, config)
    return {column: row[column] for column in config.columns}


def _json_text(where: str, line: bytes, column: str) -> str | None:
    """Return the text of a line of JSON under the name `column`, "" for null, or None for a blank line.

    Raises:
        ConfigError: the line is not a JSON object, or does not contain text under this name.
    """
    if (row := _json_row(where, line)) is None:
        return None
    if column not in row:
        raise no_column(where, column, row)
    if not isinstance(row[column], str | None):
        raise no_text(where, column, f"{row[column]!r:.60}")
    text = row[column] or ""
    check_surrogates(where, text)
    return text


def check_surrogates(where: str, text: str) -> None:
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        escaped = f"\\u{ord(text[error.start]):x}"
        raise ConfigError(
            f"{where} contains {escaped}, half of a surrogate pair, which is not text: correct the line"
        ) from None


def are_disjoint(training: DataConfig, held_out: DataConfig, sizes: dict[str, int]) -> bool:
    """Return whether two corpora of the same `source` have no document in common.

    Corpora without a common file are disjoint. Corpora with the same files are disjoint if their splits are disjoint. Corpora
    that share only some files are not disjoint. `sizes` contains the number of rows in each split of the training text.
    """
    if training.path and training.source != "hub":
        first, second = files(training), files(held_out)
    else:
        first, second = [training.path], [held_out.path]
    if first == second:
        return not splits_overlap(training.split, held_out.split, sizes)
    return not set(first) & set(second)


def splits_overlap(first: str, second: str, sizes: dict[str, int]) -> bool:
    """Return whether two splits, such as "train[:90%]", have a row in common. `sizes` contains the rows of whole splits."""
    parts = [_absolute_parts(split, sizes) for split in (first, second)]
    return any(a.splitname == b.splitname and max(a.from_, b.from_) < min(a.to, b.to) for a, b in itertools.product(*parts))


def _absolute_parts(split: str, sizes: dict[str, int]) -> list[Any]:
    """Return the parts of a split. Each part has the attributes `splitname`, `from_` and `to`."""
    return datasets.ReadInstruction.from_spec("+".join(sizes) if split == "all" else split).to_absolute(sizes)


def check_columns(where: str, found: Iterable[str], config: DataConfig) -> None:
    """Raise ConfigError unless all `config.columns` are among the columns `found`."""
    for column in config.columns:
        if column not in found:
            raise no_column(where, column, found, config.format)


def no_column(where: str, column: str, columns: Iterable[str], form: str = "text") -> ConfigError:
    if form == "prompt_completion":
        return ConfigError(
            f"{where} has no column {column!r}: rename one of {', '.join(columns)}, or choose another data.format"
        )
    setting = "data.column" if form == "text" else "data.messages_column"
    return ConfigError(f"{where} has no column {column!r}: set {setting} to one of {', '.join(columns)}")


def no_text(where: str, column: str, found: object) -> ConfigError:
    return ConfigError(f"{where}: column {column!r} contains {found}, but text is required: set data.column")


def cannot_read(config: DataConfig, error: BaseException) -> ConfigError:
    """Return the error for a corpus that cannot be read. The message contains the first cause of `error` in one line."""
    while error.__cause__:
        error = error.__cause__
    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '').rstrip('.')}"
    advice = "check the file, its encoding (UTF-8) and data.split"
    if config.source == "hub":
        advice = "check data.path, data.subset, data.split and the network, or download the dataset and use data.source=parquet"
    return ConfigError(f"{config.description} cannot be read: {reason}; {advice}")
