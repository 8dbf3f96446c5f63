"""Read documents from Python's standard library, text files, JSON lines, Parquet files, or the Hugging Face hub.

The library `datasets` reads the files of every source. The library returns one row per document, and caches the rows.
"""

import glob
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
from datasets.arrow_writer import SchemaInferenceError

from ringattn.train.config import ConfigError, DataConfig

# Folders within the standard library whose files are not documents, because they contain tests or installed packages.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib"}


def read_documents(config: DataConfig) -> tuple[datasets.Dataset, str]:
    """Read the documents of a corpus.

    Returns:
        The documents, one per row, and the name of the column that contains their text. If the source is "jsonl", the column
        contains lines of JSON, and `json_text` extracts the text from a line.

    Raises:
        ConfigError: a file or the column is missing, or the column does not contain text.
        Exception: a file or a dataset cannot be read. The type of the error depends on the reader.
    """
    # Some datasets contain code. Without this setting, releases of `datasets` before 4 would ask the user, or read an
    # environment variable, to decide whether to run such code.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    rows, column = _read(config)
    if column not in rows.features:
        raise no_column(config.description, column, rows.features)
    if getattr(rows.features[column], "dtype", None) not in ("string", "large_string"):
        raise no_text(config.description, column, rows.features[column])
    return rows, column


def _read(config: DataConfig) -> tuple[datasets.Dataset, str]:
    match config.source:
        case "stdlib":
            return _text_files(library_files(), config.split, errors="replace"), "text"
        case "packages":
            return _select(datasets.Dataset.from_dict({"text": library_packages()}), config.split), "text"
        case "text":
            return _text_files(files(config), config.split, errors="strict"), "text"
        case "jsonl":
            # The JSON reader of `datasets` requires that all files have the same columns. Therefore each line is read as text
            # here, and `json_text` parses the line before it is tokenised.
            return _select(
                _not_blank(_text_files(files(config), "train", errors="strict", sample_by="line")), config.split
            ), "text"
        case "parquet":
            return _parquet_column(config), config.column
    # The only other source is "hub".
    return datasets.load_dataset(_hub_name(config), config.subset, split=config.split), config.column


def _text_files(names: list[str], split: str, errors: str, sample_by: str = "document") -> datasets.Dataset:
    # The encoding "utf-8-sig" skips the byte-order mark at the beginning of a file.
    encoding = dict(encoding="utf-8-sig", encoding_errors=errors)
    return datasets.load_dataset("text", data_files=names, sample_by=sample_by, split=split, **encoding)


def _not_blank(rows: datasets.Dataset) -> datasets.Dataset:
    """Remove blank lines from the lines of all files, so that blank lines do not count in a slice such as "train[:90%]"."""
    kept = rows.filter(lambda lines: [bool(line.strip()) for line in lines], input_columns=["text"], batched=True, desc="read")
    # `datasets` reads a filtered dataset through a list of indices, which is slower. Most files contain no blank lines.
    return rows if len(kept) == len(rows) else kept


def _select(rows: datasets.Dataset, split: str) -> datasets.Dataset:
    """Return a slice of `rows`, which are the complete split "train". `info.splits` contains the number of `rows`."""
    parts = _absolute_parts(split, {"train": len(rows)})
    selected = datasets.concatenate_datasets([rows.select(range(part.from_, part.to)) for part in parts])
    size = datasets.SplitInfo(name="train", num_examples=len(rows))
    selected.info.splits = datasets.SplitDict({"train": size})
    return selected


def _parquet_column(config: DataConfig) -> datasets.Dataset:
    """Read only the text column of Parquet files, because the files may differ in their other columns."""
    names = files(config)
    try:
        return datasets.load_dataset("parquet", data_files=names, split=config.split, columns=[config.column])
    except Exception:
        # If a file lacks the text column, the error of the reader does not name the file. Find this file for the error message.
        for file in itertools.chain.from_iterable(map(glob.glob, names)):
            columns = pyarrow.parquet.read_schema(file).names
            if config.column not in columns:
                raise no_column(file, config.column, columns) from None
        raise


def library_files() -> list[str]:
    """Return the source files of Python's standard library, sorted."""
    found = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        # Excluded folders must not be searched, because site-packages may contain many thousand files.
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        found += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def library_packages() -> list[str]:
    """Return one text per package of Python's standard library. A module that belongs to no package has a text of its own.

    The packages are sorted by their names, and each text contains the sorted files of its package.
    """
    root = Path(sysconfig.get_path("stdlib"))
    packages = itertools.groupby(map(Path, library_files()), key=lambda file: file.relative_to(root).parts[0])
    return ["\n".join(file.read_text("utf-8-sig", "replace") for file in package) for _, package in packages]


def files(config: DataConfig) -> list[str]:
    """Return the files that `data.path` matches.

    Returns:
        The sorted absolute paths. In each path, characters with a special meaning in glob patterns are escaped.

    Raises:
        ConfigError: data.path is missing, is a folder, or matches no file.
    """
    if not config.path:
        raise ConfigError(f"data.source={config.source} requires data.path: a file or a glob such as 'corpus/**/*.txt'")
    if Path(config.path).expanduser().is_dir():
        raise ConfigError(f"data.path={config.path} is a folder: pass its files, such as '{config.path}/**/*.*'")
    pattern = str(Path(config.path).expanduser())
    names = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)
    found = sorted(name for name in names if Path(name).is_file())
    if not found:
        raise ConfigError(f"data.path={config.path} matches no file: pass a file or a glob such as 'corpus/**/*.txt'")
    return sorted({glob.escape(str(Path(name).resolve())) for name in found})


def _hub_name(config: DataConfig) -> str:
    # `datasets` interprets a name without an owner as the name of a reader for local files. One of these readers unpickles
    # files, and unpickling may run any code. Therefore the name must have an owner.
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", config.path or "") or Path(config.path).exists():
        raise ConfigError(f"data.path={config.path} is not a dataset of the hub: it must have the form owner/name")
    return config.path


def json_text(line: str, column: str) -> str | None:
    """Return the text that a line of JSON contains under the name `column`.

    The result is None if the line is empty or the text is null.

    Raises:
        ConfigError: the line is not a JSON object, or the line does not contain text under this name.
    """
    if not line.strip():
        return None
    shown = f"data.source=jsonl: the line {line[:60]!r}" + "..." * (len(line) > 60)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{shown} is not valid JSON ({error}): check the file") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{shown} is not a JSON object with a text column: check the file")
    if column not in row:
        raise no_column(shown, column, row)
    if not isinstance(row[column], str | None):
        raise no_text(shown, column, f"{row[column]!r:.60}")
    return row[column]


def are_disjoint(training: DataConfig, held_out: DataConfig, sizes: dict[str, int]) -> bool:
    """Return whether two corpora have no document in common.

    Two corpora without a common file are disjoint. Two corpora with the same files are disjoint if their splits are disjoint.
    Two corpora that have only some files in common are not disjoint.

    Args:
        training: the settings of the training text.
        held_out: the settings of the held-out text, which must have the same `source`.
        sizes: the number of documents in each split of the training text.
    """
    if training.path and training.source != "hub":
        first, second = files(training), files(held_out)
    else:
        first, second = [training.path], [held_out.path]
    if first == second:
        return not splits_overlap(training.split, held_out.split, sizes)
    return not set(first) & set(second)


def splits_overlap(first: str, second: str, sizes: dict[str, int]) -> bool:
    """Return whether two splits have a row in common.

    Args:
        first: a split in the notation of `datasets`, for example "train[:90%]".
        second: another split.
        sizes: the number of rows in each complete split.
    """
    parts = [_absolute_parts(split, sizes) for split in (first, second)]
    return any(a.splitname == b.splitname and max(a.from_, b.from_) < min(a.to, b.to) for a, b in itertools.product(*parts))


def _absolute_parts(split: str, sizes: dict[str, int]) -> list[Any]:
    """Return the parts of a split. Each part has the attributes `splitname`, `from_` and `to`."""
    return datasets.ReadInstruction.from_spec("+".join(sizes) if split == "all" else split).to_absolute(sizes)


def no_column(where: str, column: str, columns: Iterable[str]) -> ConfigError:
    """Return the error for a missing column."""
    return ConfigError(f"{where} has no column {column!r}: set data.column to one of {', '.join(columns)}")


def no_text(where: str, column: str, found: object) -> ConfigError:
    """Return the error for a column that does not contain text."""
    return ConfigError(f"{where}: column {column!r} contains {found}, but text is required: set data.column")


def cannot_read(config: DataConfig, error: BaseException) -> ConfigError:
    """Return the error for a corpus that cannot be read. The message contains the first cause of `error` in one line."""
    while error.__cause__:
        error = error.__cause__
    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '').rstrip('.')}"
    if isinstance(error, SchemaInferenceError):
        reason = "there is no text in it"  # `datasets` raises this error if the files contain no row.
    advice = "check the file, its encoding (UTF-8) and data.split"
    if config.source == "hub":
        advice = "check data.path, data.subset, data.split and the network, or download the dataset and use data.source=parquet"
    return ConfigError(f"{config.description} cannot be read: {reason}; {advice}")
