"""Tokenise a corpus into shards with several processes. A killed tokenisation continues where it stopped.

A task tokenises all or some rows of a piece of the corpus. One process writes the documents of a task into one or more shards.
The number of processes affects neither the tasks nor the shards.

    folder/plan.json             identifies the corpus and the tokenizer, until all tasks are done
    folder/TASK-SHARD.json       the counts and checksums of a complete shard; `is_last` is true in the last shard of a task
    folder/index.json            all counts and checksums; written last
"""

import inspect
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from filelock import FileLock, Timeout
from huggingface_hub.constants import HF_HOME

from ringattn.train.data import shards, sources
from ringattn.train.data.record_encoder import RecordEncoder
from ringattn.train.data.shards import INDEX, UNWRITABLE, ShardWriter, write_json
from ringattn.train.data.tokenizer import BytesTokenizer, Tokenizer
from ringattn.train.data.workers import Add, default_processes, log_once, run_tasks
from ringattn.train.settings.config import ConfigError, DataConfig

SHARD_TOKENS = 2**26  # a killed process loses at most this many tokens
SHARD_DOCUMENTS = 2**20  # limits the memory for the lengths of short documents
NUM_PIECES = 128  # enough pieces of a small text for many processes
NAMES = f"{'[0-9]' * 6}-{'[0-9]' * 4}.json"
SHOWN_FAULTS = 3
BLOCK = 2**20  # bytes that are read at once to compute a checksum
HASHED_BYTES = 2**28  # covered by one checksum
PLAN = "plan.json"


class Task(NamedTuple):
    """The rows `first` to `last` - 1 of a piece, or all rows from `first` on."""

    number: int
    piece: sources.Piece
    first: int
    last: int | None


class Job(NamedTuple):
    """Holds the data that all tokenising processes share."""

    config: DataConfig
    corpus: sources.Corpus
    tokenizer: Tokenizer
    encoder: RecordEncoder | None
    folder: Path
    shard_tokens: int

    def encode(self, where: object, content: Any) -> np.ndarray:
        return self.encoder(where, content) if self.encoder else tokenise_text(content, self.tokenizer)


def tokenise(config: DataConfig, tokenizer: Tokenizer, ranks: int = 1, folder: Path | None = None) -> Path:
    """Tokenise a corpus, unless its shards exist already, and return the folder with the shards.

    Args:
        ranks: the number of ranks on this host, which divide its cores unless `data.num_proc` is set.
        folder: the folder for the shards. The default is in the cache of `datasets`. Its name depends on the content of the
            corpus and on the tokenizer.

    Raises:
        ConfigError: a file, a column or a dataset is missing or unreadable, or the folder contains another corpus.
    """
    try:
        return _tokenise(config, tokenizer, config.num_proc or default_processes(ranks), folder)
    except ConfigError:
        raise
    except MemoryError as error:
        raise ConfigError(f"the host has too little memory to tokenise {config.description}: lower data.num_proc") from error
    except Exception as error:  # Each reader raises errors of its own types.
        target = folder or cache_folder()
        if isinstance(error, OSError) and (error.errno in UNWRITABLE or _concerns(error, target)):
            advice = "choose another output=..." if folder else "set HF_HOME to another folder"
            raise ConfigError(f"{target} cannot be written: {error}; free space on the disk, or {advice}") from error
        raise sources.cannot_read(config, error) from error


def _concerns(error: OSError, folder: Path) -> bool:
    """Return whether the error names a file in the folder, or a parent of the folder."""
    path = Path(f"{error.filename}")
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def _tokenise(config: DataConfig, tokenizer: Tokenizer, num_proc: int, folder: Path | None) -> Path:
    corpus = sources.Corpus(config, num_pieces=1 if isinstance(tokenizer, BytesTokenizer) else NUM_PIECES)
    encoder = None if config.format == "text" else RecordEncoder(config, tokenizer)
    settings = [config.source, config.split, config.columns, config.max_document_mb, config.on_error, config.join]
    numbers = {name: value for name, value in vars(tokenizer).items() if isinstance(value, int)}
    known = describe_tokenizer(tokenizer) | numbers
    content = corpus.identity or _content(corpus, config, num_proc)
    key = hash_of([settings, content, known, code(tokenizer), *(encoder.identity if encoder else [])])
    folder = folder or cache_folder() / key
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as lock:
        # On a file system without locks, two processes may tokenise the same text, with the same result.
        with suppress(OSError):
            lock.enter_context(_lock(folder))
            if not (folder / INDEX).exists():
                for partial in folder.glob("*.partial"):  # files that a killed process was writing
                    partial.unlink()
        _check_key(folder, key)
        if not (folder / INDEX).exists():
            _fill(Job(config, corpus, tokenizer, encoder, folder, SHARD_TOKENS), key, num_proc)
        for path in [folder / PLAN, *folder.glob(NAMES)]:
            path.unlink(missing_ok=True)
    return folder


def _lock(folder: Path) -> AbstractContextManager[Any]:
    lock = FileLock(folder / ".lock", fallback_to_soft=False)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        log_once(f"{'waiting':<12}for another process, which prepares the same text in {folder}")
        return lock.acquire()


def cache_folder() -> Path:
    # The import of `datasets` takes more than a second. A program that has imported `datasets` may have changed the cache
    # folder.
    config = sys.modules.get("datasets.config")
    folder = config.HF_DATASETS_CACHE if config else os.environ.get("HF_DATASETS_CACHE", f"{HF_HOME}/datasets")
    return Path(folder) / "ringattn"


def hash_of(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(value).encode())


def _check_key(folder: Path, key: str) -> None:
    path = folder / (INDEX if (folder / INDEX).exists() else PLAN)
    if path.exists():
        if json.loads(path.read_text())["key"] != key:
            raise ConfigError(
                f"{folder} contains another corpus, or the same corpus with other settings or another tokenizer: choose "
                "another folder, or delete it"
            )
    elif any(path.name != ".lock" and not path.name.endswith(".partial") for path in folder.iterdir()):
        raise ConfigError(f"{folder} contains other files: choose a new or empty folder")


def _content(corpus: sources.Corpus, config: DataConfig, num_proc: int) -> str:
    states = list(dict.fromkeys(state for piece in corpus.pieces for state in piece.files))
    names = [state.path for state in states] if config.source == "packages" or config.join == "folder" else []
    # Programs can change the modification time of a file, but not the ctime.
    known = [[*state, os.stat(state.path).st_ctime_ns] for state in states]
    path = cache_folder() / "content" / f"{hash_of(known)}.json"
    if not path.exists():
        parts = [
            (state.path, begin, min(state.size - begin, HASHED_BYTES))
            for state in states
            for begin in range(0, state.size or 1, HASHED_BYTES)
        ]
        hashes = run_tasks("read", _hash_part, None, parts, [size for *_, size in parts], num_proc, is_fast=True)
        for piece in corpus.pieces:
            if error := sources.find_change(piece):
                raise error
        content = hash_of([names, [state.size for state in states], hashes])
        with suppress(OSError):  # If the checksum is not stored, the next launch reads the text again.
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, content)
        return content
    return json.loads(path.read_text())


def _hash_part(_: None, part: tuple[str, int, int], add: Add) -> str:
    known, (path, begin, size) = xxhash.xxh3_128(), part
    with suppress(OSError), open(path, "rb") as file:  # If a file cannot be read, the tokenisation reports the error later.
        file.seek(begin)
        while block := file.read(min(BLOCK, begin + size - file.tell())):
            known.update(block)
            add(len(block))
    return known.hexdigest()


def _fill(job: Job, key: str, num_proc: int) -> None:
    config, corpus, folder, tokenizer = job.config, job.corpus, job.folder, job.tokenizer
    write_json(folder / PLAN, {"key": key})
    sizes, tasks = corpus.known_sizes, [Task(number, piece, 0, None) for number, piece in enumerate(corpus.pieces)]
    if not sources.selects_all(config):
        bytes_of = [piece.size for piece in corpus.pieces]
        counts = run_tasks("count", _count_rows, corpus, corpus.pieces, bytes_of, num_proc, is_fast=True)
        sizes, selected = sources.select_rows(config, corpus.pieces, counts)
        tasks = [Task(number, *rows) for number, rows in enumerate(selected)]
    remaining = [task for task in tasks if not any(shard["is_last"] for shard in _shards_of(folder, task))]
    bytes_of = [task.piece.size for task in remaining]
    run_tasks("tokenise", _write_shards, job, remaining, bytes_of, num_proc, is_fast=isinstance(tokenizer, BytesTokenizer))
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(NAMES))]
    counts = {name: sum(shard[name] for shard in found) for name in ("entries", "rows", "without_text", "faulty")}
    faults = [fault for shard in found for fault in shard["first_faults"]][:SHOWN_FAULTS]
    index = {
        "version": shards.VERSION,
        "source": config.description,
        "settings": {"format": config.format, "special_tokens": config.special_tokens, "eos_token": config.eos_token},
        "tokenizer": describe_tokenizer(tokenizer),
        "dtype": dtype_of(tokenizer),
        "has_loss": config.format != "text",
        "documents": sum(shard["documents"] for shard in found),
        "tokens": sum(shard["tokens"] for shard in found),
        "counts": counts | {"rows_by_split": sizes or {"train": counts["rows"]}, "first_faults": faults},
        "key": key,
        "shards": [{name: shard[name] for name in shards.SHARD_ENTRIES} for shard in found if shard["documents"]],
    }
    # Without file locks, another process may have written the index, and deleted descriptions before `glob` found them.
    if not (folder / INDEX).exists():
        write_json(folder / INDEX, index)


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, int]:
    return {name: int(getattr(tokenizer, name)) for name in ("fingerprint", "vocab_size", "bos", "eos")}


def dtype_of(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"


def _count_rows(corpus: sources.Corpus, piece: sources.Piece, add: Add) -> int:
    return sources.count_rows(_counted(corpus.read(piece), add))


def _counted(entries: Iterator[sources.Entry], add: Add) -> Iterator[sources.Entry]:
    for where, content in entries:
        add(len(content) if isinstance(content, str) else 0)
        yield where, content


def _shards_of(folder: Path, task: Task) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{task.number:06}-*.json"))]


def _write_shards(job: Job, task: Task, add: Add) -> None:
    done = _shards_of(job.folder, task)
    entries = sources.slice_rows(_counted(job.corpus.read(task.piece), add), task.first, task.last)
    for _ in range(sum(shard["entries"] for shard in done)):
        next(entries)
    number, is_last = len(done), False
    while not is_last:
        writer = ShardWriter(job.folder, dtype_of(job.tokenizer), has_loss=job.encoder is not None)
        try:
            counts, is_last = _write_shard(job, task, entries, writer)
            writer.publish(f"{task.number:06}-{number:04}", counts | {"is_last": is_last})
        finally:
            writer.discard()
        number += 1


def _write_shard(job: Job, task: Task, entries: Iterator[sources.Entry], writer: ShardWriter) -> tuple[dict[str, Any], bool]:
    """Write documents until the shard is full. Return the counts of the shard, and whether the task ends with this shard."""
    counts = dict.fromkeys(("entries", "rows", "without_text", "faulty"), 0)
    faults, is_last = list[str](), True

    def skip(error: ConfigError) -> None:
        if job.config.on_error == "raise":
            raise error
        counts["faulty"] += 1
        faults.extend([str(error)] if len(faults) < SHOWN_FAULTS else [])

    for where, content in entries:
        counts["entries"] += 1
        counts["rows"] += content is not None
        try:
            if isinstance(content, ConfigError):
                raise content
            if content:
                writer.write(job.encode(where, content))
            else:
                counts["without_text"] += 1
        except ConfigError as error:
            skip(error)
        del content  # A document may have more than 100 MB.
        if writer.num_tokens >= job.shard_tokens or writer.num_documents >= SHARD_DOCUMENTS:
            is_last = False
            break
    # A changed file is an error, because the shard may mix the old and the new text.
    if error := sources.find_change(task.piece):
        skip(error)
    return counts | {"first_faults": faults}, is_last


def check_counts(config: DataConfig, documents: int, counts: dict[str, Any]) -> None:
    """Print how many files, lines or rows were skipped. Raise ConfigError if the corpus has no documents."""
    units = {"text": "files", "jsonl": "lines"}.get(config.source, "rows")
    if config.path and (number := counts.get("without_text")):
        of = f"{number:,} of {counts['entries']:,} {units} of {config.description}"
        log_once(f"{'skipped':<12}{of}, because they contain no text")
    if number := counts.get("faulty"):
        of = f"{number:,} of {counts['entries']:,} {units} of {config.description}"
        log_once(f"{'skipped':<12}{of}, because they are faulty; the first: {counts['first_faults'][0]}")
    if documents == 0:
        faults = counts.get("first_faults", [])
        reason = f", and its first fault is: {faults[0]}" if faults else ": provide files or rows that are not empty"
        raise ConfigError(f"{config.description} contains no text{reason}")


def code(tokenizer: Tokenizer) -> str:
    """Return the source code that turns files into tokens. If the code changes, cached shards become invalid."""
    return "".join(map(inspect.getsource, (tokenise_text, add_ends, sources, shards, _write_shard, type(tokenizer))))


def tokenise_text(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens of a document, including its begin and end tokens: int32 (N,)."""
    return add_ends(tokenizer.encode(text), tokenizer)


def add_ends(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    result = np.full(1 + len(tokens) + (tokenizer.bos != tokenizer.eos), tokenizer.eos, np.int32)  # np.insert is much slower
    result[0], result[1 : 1 + len(tokens)] = tokenizer.bos, tokens
    return result
