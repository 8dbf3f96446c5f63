"""Read documents from Python's standard library, text files, JSON lines, Parquet files, or the Hugging Face hub.

A corpus is divided into pieces, which several processes can read in parallel. The pieces depend only on the files.

Each error message names the file, and the line or the row. Readers keep only one document of a file in memory.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from glob import escape, glob
from logging import WARNING
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import pyarrow
import pyarrow.parquet

from ringattn.train.data.workers import log_once
from ringattn.train.settings.config import ConfigError, DataConfig

# The folders of the standard library that contain tests or installed packages
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib"}

# Maps `data.source` to patterns of the files that are read from a folder.
NAMES_IN_FOLDERS = {"text": "*", "jsonl": "*.jsonl, *.json, *.ndjson", "parquet": "*.parquet"}
COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")

# The first bytes of compressed files. Only "BZh91AY" (bzip2) may also begin a UTF-8 text.
MAGIC = {b"\x1f\x8b": gzip.open, b"BZh91AY": bz2.open, b"\xfd7zXZ\x00": lzma.open}
ZSTANDARD = b"\x28\xb5\x2f\xfd"
ARCHIVE = re.compile(r"\.(zip|7z|rar|tar|tgz|tar\.\w+)$", re.IGNORECASE)

# The columns of conversations that this package, unlike some libraries, does not pass to the chat template
IGNORED_COLUMNS = ("documents", "chat_template_kwargs")

# An encoding that removes the byte-order mark at the beginning of a file
ENCODING = "utf-8-sig"

# The maximum number of held-out rows of a streamed hub dataset
HELD_OUT_ROWS = 10_000

# An entry contains the place of a document, for error messages, and its content. The content is a text, or a record with the
# columns `DataConfig.columns`. The content of a row without text is "". For a faulty document, the entry contains a
# ConfigError. For a blank line of a JSON file, the entry contains None. Slices such as "train[:90%]" do not count blank lines.
Content = str | dict[str, Any] | ConfigError | None
Entry = tuple[object, Content]

# Processes read a corpus in pieces. A piece has at most PIECE_BYTES, and by default at least MIN_PIECE_BYTES.
PIECE_BYTES, MIN_PIECE_BYTES = 2**25, 2**20
COMPRESSION = 4  # the usual ratio of the sizes of a text and its compressed file, to estimate the remaining time


class State(NamedTuple):
    """Holds the path, the size and the time of a file, which show whether the file has changed."""

    path: str
    size: int
    modified: int

    @classmethod
    def of(cls, path: str) -> "State":
        found = os.stat(path)
        return cls(path, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class Piece:
    """Describes a part of a corpus that one process reads."""

    files: tuple[State, ...]  # several whole files, or one file of which a range is read; () for a dataset of the hub
    size: int  # the approximate size in bytes
    begin: int = 0  # the start of the range, in bytes (JSON lines), row groups (Parquet) or rows (hub)
    end: int | None = None  # the end of the range


class Line(NamedTuple):
    """A line of a file, for error messages. Line number 1 begins at byte `begin`."""

    file: str
    begin: int
    number: int

    def __str__(self) -> str:
        return f"{self.file}, line {_lines_before(self.file, self.begin) + self.number}"


@lru_cache(1)
def _lines_before(file: str, begin: int) -> int:
    if not begin:
        return 0
    with open(file, "rb") as stream:
        blocks = (stream.read(min(2**20, begin - start)) for start in range(0, begin, 2**20))
        return sum(block.count(b"\n") for block in blocks)


class Corpus:
    """Divides the documents of a source into pieces.

    Args:
        num_pieces: the wanted number of pieces, each of `min_bytes` to PIECE_BYTES bytes.

    Attributes:
        pieces: in the order of the documents.
        identity: changes with the content of a hub dataset; "" for files.
        known_sizes: rows per split, if known without reading the corpus.

    Raises:
        ConfigError: there is no such file or dataset.
        Exception: the package `datasets` cannot read the dataset or its split.
    """

    def __init__(self, config: DataConfig, num_pieces: int = 1, min_bytes: int = MIN_PIECE_BYTES):
        self._config, self._rows = config, load_hub(config) if config.source == "hub" else None
        self.identity, self.known_sizes = "", None
        if self._rows is not None:
            check_hub_columns(self._rows, config)
            self.identity = self._rows._fingerprint
            self.known_sizes = {
                name: split.num_examples for name, split in (self._rows.info.splits or dict[str, Any]()).items()
            }
            count, size = self._rows.num_rows, int(self._rows.data.nbytes)
            step = max(count * _piece_bytes(size, num_pieces, min_bytes) // max(size, 1), 1)
            ranges = [(start, min(start + step, count)) for start in range(0, count, step)]
            self.pieces = [Piece((), size * (end - start) // count, start, end) for start, end in ranges]
        else:
            self.pieces = list(_pieces_of_files(config, num_pieces, min_bytes))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pieces": []}  # Every task contains its piece.

    def read(self, piece: Piece) -> Iterator[Entry]:
        """Read the documents of a piece. After a faulty document, the iterator continues."""
        config, names = self._config, [state.path for state in piece.files]
        match config.source:
            case "hub":
                rows: Any = self._rows
                yield from hub_rows(rows.select(range(piece.begin, piece.end or 0)), config, piece.begin)
            case "stdlib" | "text" if config.join == "folder":
                for folder, members in itertools.groupby(names, key=_folder_of(config)):
                    yield from _joined(folder, list(members), config)
            case "stdlib":
                for name in names:
                    yield name, _read_library_file(name, config.max_document_mb)
            case "packages":
                for text in library_packages(names):
                    yield "a package", text
            case "text":
                for name in names:
                    yield name, _attempt(_read_text, name, config.max_document_mb)
            case "jsonl":
                for name in names:
                    yield from _json_rows(name, config, piece.begin, piece.end)
            case "parquet":
                for name in names:
                    yield from _parquet_rows(name, config, piece.begin, piece.end)
            case _:
                raise AssertionError(f"data.source={config.source} has no reader")


def selects_all(config: DataConfig) -> bool:
    """`datasets` has already selected the rows of a hub dataset."""
    return config.source == "hub" or config.split in ("train", "all")


PieceRows = tuple[Piece, int, int]  # the first row, and the row after the last one


def select_rows(config: DataConfig, pieces: list[Piece], counts: list[int]) -> tuple[dict[str, int], list[PieceRows]]:
    """Return the number of rows per split, and the ranges of rows that `data.split` selects.

    `counts` contains the number of rows of each piece.
    """
    sizes, selected = {"train": sum(counts)}, list[PieceRows]()
    for part in absolute_parts(config.split, sizes):
        start = 0
        for piece, count in zip(pieces, counts, strict=True):
            if part.from_ < start + count and start < part.to:
                selected.append((piece, max(part.from_ - start, 0), min(part.to - start, count)))
            start += count
    return sizes, selected


def count_rows(entries: Iterable[Entry]) -> int:
    return sum(content is not None for _, content in entries)


def slice_rows(entries: Iterable[Entry], first: int, last: int | None) -> Iterator[Entry]:
    """Yield the entries of the rows `first` to `last` - 1. If `last` is None, yield all entries from row `first` on."""
    row = 0
    for where, content in entries:
        if last is not None and row >= last:
            return
        if row >= first:
            yield where, content
        row += content is not None


def _folder_of(config: DataConfig) -> Callable[[str], str]:
    library = Path(sysconfig.get_path("stdlib"))
    root = library if config.source == "stdlib" else Path(config.path or "").expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(f"data.path={config.path} is not a folder, but data.join=folder joins the folders in data.path")

    links = {str(child.resolve()): str(child) for child in root.iterdir() if child.is_dir() and child.is_symlink()}

    def folder_of(file: str) -> str:
        if Path(file).is_relative_to(root):
            return str(root / Path(file).relative_to(root).parts[0])
        return next((links[str(parent)] for parent in Path(file).parents if str(parent) in links), file)

    return folder_of


def _joined(folder: str, members: list[str], config: DataConfig) -> Iterator[Entry]:
    """Yield an error for each faulty file of a folder. Then yield one document that contains all other files, each after a line
    with its name.
    """
    read: Any = _read_library_file if config.source == "stdlib" else _read_text
    texts, size = list[str](), 0
    for name in members:
        content = _attempt(read, name, config.max_document_mb)
        if isinstance(content, ConfigError):
            yield name, content
        elif isinstance(content, str) and content:
            texts.append(f"===== {os.path.relpath(name, os.path.dirname(os.path.realpath(folder)))} =====\n{content}")
            size += len(content.encode())
            try:
                check_size(folder, size, config.max_document_mb)
            except ConfigError as error:
                yield folder, error
                return
    yield folder, "\n".join(texts)


def _read_library_file(file: str, _: int) -> str:
    return Path(file).read_text(ENCODING, "replace")


def _attempt(read: Callable[..., Content], where: object, *arguments: Any) -> Content:
    """Return `read(where, ...)`, or its error."""
    try:
        return read(where, *arguments)
    except UnicodeDecodeError as error:
        line = f", line {error.object.count(10, 0, error.start) + 1}" if read is _read_text else ""
        byte = f"{error.object[error.start]:#04x}"
        return ConfigError(f"{where}{line}: the byte {byte} is not UTF-8: convert the file to UTF-8, or remove it")
    except ConfigError as error:
        return error


def _piece_bytes(size: int, num_pieces: int, min_bytes: int) -> int:
    return min(max(size // num_pieces, min_bytes), PIECE_BYTES)


def _pieces_of_files(config: DataConfig, num_pieces: int, min_bytes: int) -> Iterator[Piece]:
    states = list(map(State.of, library_files() if config.source in ("stdlib", "packages") else files(config)))
    piece_bytes = _piece_bytes(sum(state.size for state in states), num_pieces, min_bytes)
    limit = 2**62 if config.source == "packages" else piece_bytes
    group, size = list[State](), 0
    for parts in _parts(states, config, piece_bytes):
        is_divided = len(parts) > 1
        if group and (is_divided or size + parts[0].size > limit):
            yield Piece(tuple(group), size)
            group, size = list[State](), 0
        if is_divided:
            yield from parts
        else:
            group += parts[0].files
            size += parts[0].size
    if group:
        yield Piece(tuple(group), size)


def _parts(states: list[State], config: DataConfig, piece_bytes: int) -> Iterator[list[Piece]]:
    if config.join == "folder":
        folder_of = _folder_of(config)
        for _, folder in itertools.groupby(states, key=lambda state: folder_of(state.path)):
            members = tuple(folder)
            yield [Piece(members, sum(state.size for state in members))]
    else:
        is_divisible = config.source in ("jsonl", "parquet")
        for state in states:
            yield _pieces_of_file(state, config, piece_bytes) if is_divisible else [Piece((state,), state.size)]


def _pieces_of_file(state: State, config: DataConfig, piece_bytes: int) -> list[Piece]:
    try:
        if config.source == "parquet":
            with pyarrow.parquet.ParquetFile(state.path) as reader:
                sizes = [reader.metadata.row_group(index).total_byte_size for index in range(reader.num_row_groups)]
            ends = list(itertools.accumulate(sizes))
            groups = itertools.groupby(range(len(sizes)), key=lambda index: ends[index] // piece_bytes)
            parts = [list(indices) for _, indices in groups]
            return [Piece((state,), sum(sizes[i] for i in part), part[0], part[-1] + 1) for part in parts] or [
                Piece((state,), 0)
            ]
        if _compression(state.path):
            return [Piece((state,), state.size * COMPRESSION)]
        begins = range(0, state.size, piece_bytes)
        parts = [(begin, min(begin + piece_bytes, state.size)) for begin in begins]
        return [Piece((state,), end - begin, begin, end) for begin, end in parts] or [Piece((state,), 0)]
    except (ConfigError, *READ_ERRORS):  # `Corpus.read` describes the fault.
        return [Piece((state,), state.size)]


def begins_line(piece: Piece) -> bool:
    if not piece.begin:
        return True
    with open(piece.files[0].path, "rb") as stream:
        stream.seek(piece.begin - 1)
        return piece.begin - 1 + _skip_line(stream) < (piece.end or 0)


def find_change(piece: Piece) -> ConfigError | None:
    for state in piece.files:
        try:
            found = State.of(state.path)
        except OSError:
            found = None
        if found != state:
            return ConfigError(f"{state.path} has changed while it was read: wait until it is complete, and launch again")
    return None


def _compression(file: str) -> Any:
    if ARCHIVE.search(file):
        raise ConfigError(f"{file} is an archive: extract it, and set data.path to its files")
    with open(file, "rb") as stream:
        start = stream.read(7)
    if start.startswith(ZSTANDARD):
        return _open_zstandard
    return next((opener for magic, opener in MAGIC.items() if start.startswith(magic)), None)


def _open_zstandard(file: str, _: str) -> IO[bytes]:
    return cast("IO[bytes]", io.BufferedReader(pyarrow.input_stream(file, compression="zstd")))


def _open(file: str) -> IO[bytes]:
    return cast("IO[bytes]", (_compression(file) or open)(file, "rb"))


def _read_text(file: str, limit_mb: int) -> str:
    try:
        with _open(file) as stream:
            content = stream.read(limit_mb * 10**6 + 1)
    except READ_ERRORS as error:
        raise _cannot_read_file(file, error) from error
    check_size(file, len(content), limit_mb)
    return content.decode(ENCODING)


def _json_rows(file: str, config: DataConfig, begin: int = 0, end: int | None = None) -> Iterator[Entry]:
    """Read the lines that start at byte `begin` or later, but before byte `end`. A compressed file is read as a whole."""
    limit, read = config.max_document_mb * 10**6, _json_text if config.format == "text" else _json_record
    number, position = 0, begin
    try:
        with _open(file) as stream:
            if begin:  # The line that contains byte `begin` - 1 belongs to the previous piece.
                stream.seek(begin - 1)
                position += _skip_line(stream) - 1
            start = position
            while end is None or position < end:
                # Limit the length, because a file without line breaks may exceed the memory.
                line = stream.readline(limit + 2)
                if not line:
                    break
                number, position, where = number + 1, position + len(line), Line(file, start, number + 1)
                yield where, _attempt(read, where, line, config)
                if not line.endswith(b"\n"):
                    position += _skip_line(stream)
                del line  # A document may have more than 100 MB.
    except ConfigError as error:
        yield file, error
    except READ_ERRORS as error:
        yield file, _cannot_read_file(file, error)
    else:
        if not number and not begin:
            yield file, _empty(file)


def _skip_line(stream: IO[bytes]) -> int:
    size = 0
    while part := stream.readline(2**20):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def _parquet_rows(file: str, config: DataConfig, begin: int = 0, end: int | None = None) -> Iterator[Entry]:
    try:
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as reader:
            if reader.metadata.num_rows == 0:  # An empty Parquet file may lack columns.
                raise _empty(file)
            schema = reader.schema_arrow
            columns = choose_columns(file, schema.names, config)
            texts = pyarrow.string(), pyarrow.large_string(), pyarrow.null()
            if config.format == "text" and (kind := schema.field(config.column).type) not in texts:
                raise no_text(file, config.column, kind)
            first = sum(reader.metadata.row_group(index).num_rows for index in range(begin))
            for index in range(begin, reader.num_row_groups if end is None else end):
                try:
                    yield from _arrow_rows(file, reader.iter_batches(64, [index], columns), config, first)
                except READ_ERRORS as error:
                    yield file, _cannot_read_file(file, error)
                first += reader.metadata.row_group(index).num_rows
    except ConfigError as error:
        yield file, error
    except READ_ERRORS as error:
        yield file, _cannot_read_file(file, error)


def check_hub_columns(rows: Any, config: DataConfig) -> None:
    choose_columns(config.description, rows.features, config)
    texts = "string", "large_string"
    if config.format == "text" and getattr(kind := rows.features[config.column], "dtype", None) not in texts:
        raise no_text(config.description, config.column, kind)


def hub_rows(rows: Any, config: DataConfig, first: int = 0) -> Iterator[Entry]:
    """Read the documents of a Dataset or an IterableDataset. After a faulty document, the iterator continues.

    `first` is the number of the first row, for error messages.
    """
    columns = choose_columns(config.description, rows.features, config)
    return _arrow_rows(config.description, rows.select_columns(columns).with_format("arrow").iter(64), config, first)


def _arrow_rows(where: str, batches: Iterable[Any], config: DataConfig, first: int) -> Iterator[Entry]:
    number = itertools.count(first + 1)
    for batch in batches:
        is_text = config.format == "text"
        for row in batch[config.column] if is_text else map(batch.slice, range(batch.num_rows), itertools.repeat(1)):
            place = f"{where}, row {next(number)}"
            yield place, _attempt(_arrow_text if is_text else _arrow_record, place, row, config.max_document_mb)


def _arrow_text(where: str, value: pyarrow.Scalar, limit_mb: int) -> str:
    content = value.as_buffer().to_pybytes() if value.is_valid else b""
    check_size(where, len(content), limit_mb)
    return content.decode()


def _arrow_record(_: str, row: Any, __: int) -> dict[str, Any]:
    return row.to_pylist()[0]


def check_size(where: object, size: int, limit_mb: int) -> None:
    if size > limit_mb * 10**6:
        raise ConfigError(
            f"{where} has more than data.max_document_mb={limit_mb} MB: split this document, or raise data.max_document_mb"
        )


# The errors of readers for unreadable files. The only common base class of zlib.error and lzma.LZMAError is Exception.
READ_ERRORS = (OSError, EOFError, pyarrow.ArrowException, lzma.LZMAError, zlib.error)


def _empty(file: str) -> ConfigError:
    return ConfigError(f"{file} is empty: download it again, or remove it")


def _cannot_read_file(file: str, error: Exception) -> ConfigError:
    reason = next(iter(str(error).splitlines()), "").rstrip(".")
    return ConfigError(f"{file} cannot be read: {type(error).__name__}: {reason}; check the file, or remove it")


def library_files() -> list[str]:
    found = list[str]()
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        # Skip excluded folders, because site-packages may contain thousands of files.
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def library_packages(names: list[str]) -> list[str]:
    """Return one text per package or module of Python's standard library, in the order of `names`."""
    root = Path(sysconfig.get_path("stdlib"))
    packages = itertools.groupby(map(Path, names), key=lambda file: file.relative_to(root).parts[0])
    return ["\n".join(file.read_text(ENCODING, "replace") for file in package) for _, package in packages]


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
        names = [name for name in find_paths(f"{escape(str(path))}/**") if name.endswith(endings)]
    else:
        names = [str(path)] if path.exists() else find_paths(str(path))
    # Earlier versions sorted the escaped paths. Checkpoints depend on this order.
    found = sorted({str(Path(name).resolve()) for name in names if Path(name).is_file()}, key=escape)
    if not found:
        matches = f"is a folder without a file {pattern}" if pattern else "matches no file"
        raise ConfigError(f"data.path={config.path} {matches}: pass a file, a folder or a glob such as 'corpus/**/*.txt'")
    return found


def find_paths(pattern: str) -> list[str]:
    """Return the paths that a pattern matches. Unlike `glob`, this function follows no cycles of symbolic links."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob(pattern)
    index, seen, found = parts.index("**"), set[str](), list[str]()
    rest = str(Path(*parts[index + 1 :] or "*"))
    for root in glob(str(Path(*parts[:index]))):
        for folder, subfolders, _ in os.walk(root, followlinks=True):
            if (real := os.path.realpath(folder)) in seen:
                subfolders.clear()
                continue
            seen.add(real)
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            found += find_paths(f"{escape(folder)}/{rest}")
    return found


def load_hub(config: DataConfig) -> Any:
    """Download a dataset of the hub. With `data.streaming`, download only the first HELD_OUT_ROWS rows of the split."""
    import datasets

    if not config.streaming:
        name = _hub_name(config)
        return datasets.load_dataset(name, config.subset, split=config.split)
    rows = open_hub(config)
    # `datasets` caches the rows under a key made of these arguments.
    arguments = {"config": config, "revision": hub_commit(config)}
    found: Any = datasets.Dataset.from_generator(_first_rows, features=rows.features, gen_kwargs=arguments)
    return found


def _first_rows(config: DataConfig, revision: str) -> Iterator[dict[str, Any]]:
    yield from open_hub(config, revision).take(HELD_OUT_ROWS)


def open_hub(config: DataConfig, revision: str | None = None) -> Any:
    """Open a dataset of the hub as an IterableDataset, which is downloaded while it is read."""
    import datasets

    settings: dict[str, Any] = {"split": config.split, "revision": revision, "streaming": True}
    rows: Any = datasets.load_dataset(_hub_name(config), config.subset, **settings)
    # If the dataset does not describe its columns, `datasets` infers them from the first rows.
    return rows if rows.features is not None else rows._resolve_features()


def hub_commit(config: DataConfig) -> str:
    import datasets

    return str(datasets.load_dataset_builder(_hub_name(config), config.subset).hash)


def _hub_name(config: DataConfig) -> str:
    import datasets.config

    # By default, `datasets` before release 4 asks the user whether to run a dataset's code.
    settings: Any = datasets.config
    settings.HF_DATASETS_TRUST_REMOTE_CODE = False
    # `datasets` would interpret a name without an owner as a reader for local files. One of these readers unpickles files,
    # which may run any code.
    if config.path is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", config.path) or Path(config.path).exists():
        raise ConfigError(f"data.path={config.path} is not a dataset of the hub: it must have the form owner/name")
    return config.path


def _json_record(where: object, line: bytes, config: DataConfig) -> dict[str, Any] | None:
    """Return the required columns of a JSON line, or None for a blank line."""
    check_size(where, len(line.rstrip(b"\r\n")), config.max_document_mb)
    if not (content := line.decode(ENCODING).strip()):
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
    return {column: row[column] for column in choose_columns(where, row, config)}


def _json_text(where: object, line: bytes, config: DataConfig) -> str | None:
    """Return the text in `data.column` of a JSON line, "" for null, or None for a blank line.

    Raises:
        ConfigError: the line is too long, is not a JSON object, or does not contain text in `data.column`.
    """
    if (record := _json_record(where, line, config)) is None:
        return None
    text = record[config.column]
    if not isinstance(text, str | None):
        raise no_text(where, config.column, f"{text!r:.60}")
    check_surrogates(where, text or "")
    return text or ""


def check_surrogates(where: object, text: str) -> None:
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

    Two corpora without a common file are disjoint. Corpora with the same files are disjoint if their splits are disjoint.
    Two corpora that share some of their files are not disjoint.
    """
    first, second = _paths(training), _paths(held_out)
    if first == second:
        return not splits_overlap(training.split, held_out.split, sizes)
    return not set(first) & set(second)


def _paths(config: DataConfig) -> list[str | None]:
    if config.path and config.source == "prepared":
        return [str(Path(config.path).expanduser().resolve())]
    return [*files(config)] if config.path and config.source != "hub" else [config.path]


def overlap(first: DataConfig, second: DataConfig, sizes: dict[str, int]) -> bool:
    """Return whether two sources share some text. Return False if the sources are identical.

    `sizes` as in `splits_overlap`.
    """
    library = ("stdlib", "packages")
    kinds = [("library" if each.source in library else each.source, each.subset, each.columns) for each in (first, second)]
    # Some datasets of the hub do not state the sizes of their splits.
    unknown = {re.split(r"\W", part)[0]: 2**40 for each in (first, second) for part in each.split.split("+")}
    if kinds[0] != kinds[1] or are_disjoint(first, second, unknown | sizes):
        return False
    texts = [(each.source, each.join, each.split, _paths(each)) for each in (first, second)]
    return texts[0] != texts[1]


def splits_overlap(first: str, second: str, sizes: dict[str, int]) -> bool:
    """Return whether two splits, such as "train[:90%]", share a row. The dict `sizes` maps each whole split to its number of
    rows.
    """
    parts = [absolute_parts(split, sizes) for split in (first, second)]
    return any(a.splitname == b.splitname and max(a.from_, b.from_) < min(a.to, b.to) for a, b in itertools.product(*parts))


def absolute_parts(split: str, sizes: dict[str, int]) -> list[Any]:
    import datasets

    return datasets.ReadInstruction.from_spec("+".join(sizes) if split == "all" else split).to_absolute(sizes)


def choose_columns(where: object, found: Iterable[str], config: DataConfig) -> list[str]:
    """Return the columns to read, among the columns `found`.

    Raises:
        ConfigError: a required column is missing.
    """
    for column in config.columns:
        if column not in found:
            raise no_column(where, column, found, config.format)
    if config.format != "chat":
        return config.columns
    if ignored := [column for column in IGNORED_COLUMNS if column in found]:
        what = f"{' and '.join(ignored)} of {config.description}"
        log_once(f"{'ignored':<12}{what}, because only messages and tools are given to the chat template", WARNING)
    return [*config.columns, *({"tools"} & {*found})]


def no_column(where: object, column: str, columns: Iterable[str], form: str = "text") -> ConfigError:
    if form == "prompt_completion":
        return ConfigError(
            f"{where} has no column {column!r}: rename one of {', '.join(columns)}, or choose another data.format"
        )
    setting = "data.column" if form == "text" else "data.messages_column"
    return ConfigError(f"{where} has no column {column!r}: set {setting} to one of {', '.join(columns)}")


def no_text(where: object, column: str, found: object) -> ConfigError:
    return ConfigError(f"{where}: column {column!r} contains {found}, but text is required: set data.column")


def cannot_read(config: DataConfig, error: BaseException) -> ConfigError:
    while error.__cause__:
        error = error.__cause__
    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '').rstrip('.')}"
    advice = "check the file, its encoding (UTF-8) and data.split"
    if config.source == "hub":
        advice = "check data.path, data.subset, data.split and the network, or download the dataset and use data.source=parquet"
    return ConfigError(f"{config.description} cannot be read: {reason}; {advice}")
