"""Write and read tokenised documents as memory-mapped shards. The page docs/prepared-data.md describes the files.

index.json        the tokenizer, the counts and the checksums, written last: a folder without this file is incomplete
NAME.tokens       the tokens of all documents of a shard, uint16 or uint32
NAME.offsets      int64 (documents + 1,): document i consists of the tokens offsets[i] to offsets[i + 1] - 1
NAME.checksums    uint32 (documents,): the CRC-32 of the tokens of each document, continued over its loss mask
NAME.loss         only of conversations and completions: uint8, 1 for every token with a loss
"""

import errno
import json
import os
import uuid
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from ringattn.train.settings.config import ConfigError

INDEX = "index.json"
VERSION = 1
DTYPES = ("<u2", "<u4")  # of tokens
# The entries of index.json that the reader needs, and the entries of each of its shards
ENTRIES = {
    "has_loss": bool,
    "documents": int,
    "tokens": int,
    "tokenizer": dict,
    "settings": dict,
    "counts": dict,
    "shards": list,
}
SHARD_ENTRIES = {"name": str, "documents": int, "tokens": int, "offsets_crc32": int, "checksums_crc32": int}
OFFSET, CHECKSUM, LOSS = np.dtype("<i8"), np.dtype("<u4"), np.dtype("u1")

# The error codes for a full disk and for an exceeded quota
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
# The error codes for a disk that is no longer writable
UNWRITABLE = (*FULL_DISK, errno.EROFS, errno.EFBIG)

# Documents with more than ALWAYS_VERIFIED tokens are verified only in the first read.
ALWAYS_VERIFIED = 2**20


class ShardWriter:
    """The method `publish` renames the files to their final names.

    Attributes:
        num_tokens: the number of tokens written so far.
    """

    def __init__(self, folder: Path, dtype: str, has_loss: bool):
        self._folder, self._dtype = folder, np.dtype(dtype)
        self._unique, self._files = uuid.uuid4().hex, dict[str, IO[bytes]]()
        for suffix in ("tokens", "loss")[: 1 + has_loss]:
            self._files[suffix] = open(self._partial(suffix), "wb", 2**20)  # noqa: SIM115  # `publish` or `discard` closes it
        self._lengths, self._checksums = list[int](), list[int]()
        self.num_tokens = 0

    def _partial(self, suffix: str) -> Path:
        return self._folder / f"{self._unique}.{suffix}.partial"

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def write(self, stored: np.ndarray) -> None:
        """Append a document: int32 (N,). In shards with a loss mask, -1 - t encodes a token t without loss."""
        columns = [np.where(stored < 0, ~stored, stored) if "loss" in self._files else stored]
        if len(stored) and not 0 <= columns[0].min() <= columns[0].max() <= np.iinfo(self._dtype).max:
            raise ValueError(f"a token id from {columns[0].min()} to {columns[0].max()} does not fit into {self._dtype.name}")
        columns += [stored >= 0] if "loss" in self._files else []
        checksum = 0
        for file, column, dtype in zip(self._files.values(), columns, (self._dtype, LOSS), strict=False):
            content = column.astype(dtype).data
            checksum = zlib.crc32(content, checksum)
            file.write(content)
        self._lengths.append(len(stored))
        self._checksums.append(checksum)
        self.num_tokens += len(stored)

    def discard(self) -> None:
        for suffix, file in self._files.items():
            self._partial(suffix).unlink(missing_ok=True)
            with suppress(OSError):  # On a full disk, closing a file fails, because its buffer cannot be written.
                file.close()

    def publish(self, name: str, counts: dict[str, Any]) -> None:
        """Rename the files to their final names. Then write NAME.json with `counts`, the sizes and the checksums."""
        offsets = np.cumsum([0, *self._lengths], dtype=OFFSET).tobytes()
        checksums = np.array(self._checksums, dtype=CHECKSUM).tobytes()
        for suffix, content in (("offsets", offsets), ("checksums", checksums)):
            self._files[suffix] = open(self._partial(suffix), "wb")  # noqa: SIM115
            self._files[suffix].write(content)
        for suffix, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            if self._lengths:
                self._partial(suffix).replace(self._folder / f"{name}.{suffix}")
            else:
                self._partial(suffix).unlink()
        known = {"name": name, "documents": len(self._lengths), "tokens": self.num_tokens}
        checks = {"offsets_crc32": zlib.crc32(offsets), "checksums_crc32": zlib.crc32(checksums)}
        write_json(self._folder / f"{name}.json", known | checks | counts)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: other processes never see an incomplete file."""
    partial = path.with_name(f"{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class Store(Protocol):
    """Numbered documents.

    Attributes:
        lengths: int64 (documents,), the number of tokens of each document.
        keys: uint64 (documents,), the checksum and the length of each document, or 0 for a part of a document.
    """

    lengths: np.ndarray

    @property
    def keys(self) -> np.ndarray: ...

    def read(self, number: int) -> np.ndarray:
        """Return the tokens of a document. In a document with a loss mask, -1 - t encodes a token t without loss."""
        ...


class Shards:
    """The documents in a folder. Opening a folder reads no tokens; every document is verified when it is read.

    Attributes:
        folder: the folder.
        index: the content of index.json.
        lengths: as in Store.

    Raises:
        ConfigError: the folder is incomplete, or a file is damaged. The method `read` also raises this error.
    """

    def __init__(self, folder: Path):
        self.folder, self.index = folder, read_index(folder)
        lengths = [self._check_shard(shard) for shard in self.index["shards"]]
        self._firsts = np.cumsum([0, *map(len, lengths)])
        self.lengths = np.concatenate([np.empty(0, OFFSET), *lengths])
        self._is_verified = np.zeros(len(self.lengths), dtype=bool)
        self._opened = dict[int, list[np.ndarray]]()
        if (len(self.lengths), self.lengths.sum()) != (self.index["documents"], self.index["tokens"]):
            raise damaged(folder / INDEX, "its numbers of documents and tokens differ from those of the shards")

    @property
    def keys(self) -> np.ndarray:
        checksums = [self._map(shard, "checksums", CHECKSUM) for shard in self.index["shards"]]
        return (np.concatenate([np.empty(0, CHECKSUM), *checksums]).astype(np.uint64) << 32) + self.lengths.astype(np.uint64)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": {}}  # Pickling must not copy the tokens of the memory maps.

    def _map(self, shard: dict[str, Any], suffix: str, dtype: np.dtype) -> np.ndarray:
        """Map a file of a shard. Another preparation may have replaced it since the start."""
        path = self.folder / f"{shard['name']}.{suffix}"
        try:
            content = np.memmap(path, dtype, mode="r")
        except (OSError, ValueError) as error:
            raise damaged(path, f"{error}") from error
        if f"{suffix}_crc32" in shard and zlib.crc32(content.data) != shard[f"{suffix}_crc32"]:
            raise damaged(path, "its checksum is wrong")
        return content

    def _check_shard(self, shard: dict[str, Any]) -> np.ndarray:
        size, count = shard["tokens"], shard["documents"]
        sizes = {"tokens": size * np.dtype(self.index["dtype"]).itemsize, "offsets": (count + 1) * 8, "checksums": count * 4}
        for suffix, expected in (sizes | ({"loss": size} if self.index["has_loss"] else {})).items():
            path = self.folder / f"{shard['name']}.{suffix}"
            if not path.is_file() or path.stat().st_size != expected:
                found = f"{path.stat().st_size:,} bytes" if path.is_file() else "no such file"
                raise damaged(path, f"it must have {expected:,} bytes, but there are {found}".replace("are no", "is no"))
        self._map(shard, "checksums", CHECKSUM)
        return np.diff(self._map(shard, "offsets", OFFSET))

    def read(self, number: int) -> np.ndarray:
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        if shard not in self._opened:
            columns = {"offsets": OFFSET, "checksums": CHECKSUM, "tokens": np.dtype(self.index["dtype"])}
            columns |= {"loss": LOSS} if self.index["has_loss"] else {}
            self._opened[shard] = [self._map(self.index["shards"][shard], *column) for column in columns.items()]
        offsets, checksums, *columns = self._opened[shard]
        place = number - int(self._firsts[shard])
        parts = [column[offsets[place] : offsets[place + 1]] for column in columns]
        if len(parts[0]) <= ALWAYS_VERIFIED or not self._is_verified[number]:
            checksum = 0
            for part in parts:
                checksum = zlib.crc32(part.data, checksum)
            if checksum != checksums[place]:
                path = self.folder / f"{self.index['shards'][shard]['name']}.tokens"
                raise damaged(path, f"the checksum of document {place} (counted from 0) is wrong")
            self._is_verified[number] = True
        tokens = np.asarray(parts[0])
        return tokens if len(parts) == 1 else np.where(parts[1], tokens.astype(np.int32), ~tokens.astype(np.int32))


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of index.json.

    Raises:
        ConfigError: the file does not exist, cannot be read, or was written by a later version.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text())
        _check_types(index, {"version": int})
        if index["version"] > VERSION:
            raise ConfigError(f"{path} has version {index['version']}, but this version of ringattn reads {VERSION}: update it")
        _check_types(index, ENTRIES)
        _check_types(index["settings"], {"format": str, "special_tokens": str})
        for shard in index["shards"]:
            _check_types(shard, SHARD_ENTRIES)
        if index["dtype"] not in DTYPES:
            raise ValueError(f"dtype={index['dtype']}, which must be one of {', '.join(DTYPES)}")
        if index["has_loss"] != (index["settings"]["format"] != "text"):
            raise ValueError("has_loss contradicts the format in settings")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: prepare the folder with ringattn-prepare, or launch it again") from None
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    return index


def _check_types(found: Any, types: dict[str, type]) -> None:
    for name, kind in types.items():
        if type(found[name]) is not kind:
            raise TypeError(f"{name} is {found[name]!r:.60}, which must be of the type {kind.__name__}")


def damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is damaged: {reason}; copy the folder again, or delete it and prepare it again")


@dataclass(frozen=True)
class Documents:
    """Selects documents of a store.

    Attributes:
        store: the store.
        numbers: int64 (documents,), the numbers of the documents in the store.
        lengths: int64 (documents,), the number of tokens of each document.
        skipped: the number of tokens to skip in the last document.
        splits: the number of rows in each split of the source.
    """

    store: Store
    numbers: np.ndarray
    lengths: np.ndarray
    skipped: int = 0
    splits: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store, splits: dict[str, int] | None = None) -> "Documents":
        return cls(store, np.arange(len(store.lengths)), store.lengths, splits=splits or {})

    @property
    def keys(self) -> np.ndarray:
        return np.where(self.lengths == self.store.lengths[self.numbers], self.store.keys[self.numbers], 0)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        skipped = self.skipped if index == len(self.lengths) - 1 else 0
        return self.store.read(int(self.numbers[index]))[skipped : skipped + int(self.lengths[index])]

    def select(self, indices: np.ndarray) -> "Documents":
        assert not self.skipped or len(self) - 1 not in indices, "a part of a document cannot be selected"
        return Documents(self.store, self.numbers[indices], self.lengths[indices], splits=self.splits)

    def first(self, count: int) -> "Documents":
        """Return the first `count` documents, or all documents if there are fewer."""
        return self if count >= len(self) else self.select(np.arange(count))

    def append_part(self, number: int, start: int, length: int) -> "Documents":
        """Append `length` tokens, from token `start` on, of document `number` of the store. Length 0 appends nothing."""
        if length == 0:
            return self
        return Documents(self.store, np.append(self.numbers, number), np.append(self.lengths, length), start, self.splits)


class JoinedParts:
    """Combines the documents of several parts into one store, one part after another."""

    def __init__(self, parts: list[Documents]):
        self._parts, self._firsts = parts, np.cumsum([0, *map(len, parts)])
        self.lengths = np.concatenate([part.lengths for part in parts])

    @property
    def keys(self) -> np.ndarray:
        return np.concatenate([part.keys for part in self._parts])

    def read(self, number: int) -> np.ndarray:
        part = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._parts[part][number - int(self._firsts[part])]
