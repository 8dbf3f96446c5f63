"""Stream a corpus: read, tokenise and pack the documents during training, without an earlier preparation.

    piece       a part of a large file, or several small files
    reader      reads every R-th piece, in a random order that differs from epoch to epoch
    block       the next documents of a reader, which are shuffled (the shuffle buffer)
    sequence i  the next S tokens of reader i mod R

The number R of readers depends only on the corpus. Therefore the sequences do not depend on the number of ranks. If the number
of data-parallel ranks divides R, each reader runs on only one data-parallel rank.

A checkpoint contains the position of every reader. A resumed reader reads and shuffles its last block again.
"""

import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringattn.train.data import sources
from ringattn.train.data.documents import NumberedSequences, random_order
from ringattn.train.data.tokenisation import add_ends, describe_tokenizer
from ringattn.train.data.tokenizer import Tokenizer
from ringattn.train.settings.config import ConfigError, DataConfig

MAX_READERS = 64
# A block ends at BLOCK_CHARACTERS characters, so that very long documents do not fill the memory.
BLOCK_CHARACTERS = 2**26
# A reader tokenises documents in chunks of about CHUNK_CHARACTERS characters. Tokenizers from a tokenizer.json process a chunk
# with several threads.
CHUNK_CHARACTERS = 2**18
# The checksum of a file covers only its first SAMPLED_BYTES bytes.
SAMPLED_BYTES = 2**16
# The minimum size of a piece, so that a piece contains many documents.
MIN_PIECE_BYTES = 2**20
# The settings that determine the documents of a stream, or their tokens
DOCUMENT_SETTINGS = ("subset", "split", "column", "special_tokens")


class Position(NamedTuple):
    """Where a reader continues.

    Attributes:
        sequences: the sequences that the reader has produced.
        epoch: the number of the epoch in which the block begins.
        piece, entry: before the block, the reader has read `piece` pieces of this epoch, and `entry` entries of the next piece.
        block: the number of the block.
        document: the number of consumed documents of the block.
        token: the number of consumed tokens of the next document.
        faulty: the number of faulty documents that were skipped before the block.
        fault: the message about the latest faulty document.
    """

    sequences: int = 0
    epoch: int = 0
    piece: int = 0
    entry: int = 0
    block: int = 0
    document: int = 0
    token: int = 0
    faulty: int = 0
    fault: str = ""


class Reader:
    """Reads some pieces of a corpus, and packs them into sequences.

    Args:
        stream: the stream.
        number: the number of the reader.
        position: where the reader starts. The attribute `position` is where the reader continues.
    """

    def __init__(self, stream: "StreamDataset", number: int, position: Position):
        self._stream, self._number, self.position = stream, number, position
        self._pieces = stream.pieces[number :: stream.num_readers]
        self._next = place = position.epoch, position.piece, position.entry
        self._entries = self._read(*place)
        self._texts, self._tokenised = list[str](), deque[np.ndarray]()
        self._faulty, self._fault = position.faulty, position.fault
        self._load_block(position.block)
        self.position = position
        if position.document >= len(self._texts) or position.token >= len(self._document()):
            raise ConfigError(
                f"{stream.config.description} has changed since the checkpoint was saved, so its saved position is invalid: "
                "restore the text, or start a new run with trainer.init_from"
            )

    def sequence(self) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        """Return the tokens and labels of the next sequence, both int64 (S,), and the lengths of its documents or document
        parts.
        """
        parts, missing = list[np.ndarray](), self._stream.seq_len
        while missing:
            document, consumed = self._document(), self.position.token
            parts.append(document[consumed : consumed + missing])
            missing -= len(parts[-1])
            self.position = self.position._replace(token=consumed + len(parts[-1]))
            if self.position.token == len(document):
                self._end_document()
        self.position = self.position._replace(sequences=self.position.sequences + 1)
        label = self._document()[self.position.token]
        tokens = np.concatenate([*parts, [label]]).astype(np.int64)
        return tokens[:-1], tokens[1:].copy(), tuple(map(len, parts))

    def _document(self) -> np.ndarray:
        if not self._tokenised:
            first = stop = self.position.document
            size = 0
            while stop < len(self._texts) and size < CHUNK_CHARACTERS:
                size += len(self._texts[stop])
                stop += 1
            self._tokenised.extend(self._stream.tokenise(self._texts[first:stop]))
            self._texts[first:stop] = [""] * (stop - first)  # Free the texts, because the tokens need the memory.
        return self._tokenised[0]

    def _end_document(self) -> None:
        self._tokenised.popleft()
        self.position = self.position._replace(document=self.position.document + 1, token=0)
        if self.position.document == len(self._texts):
            self._load_block(self.position.block + 1)

    def _load_block(self, block: int) -> None:
        stream, texts, size, begin, empty_epochs = self._stream, list[str](), 0, self._next, 0
        faults = self._faulty, self._fault
        while len(texts) < stream.block_documents and size < BLOCK_CHARACTERS:
            self._next, text = next(self._entries)
            if text:
                texts.append(text)
                size += len(text)
            elif text is None:
                if texts:
                    break
                begin, empty_epochs = self._next, empty_epochs + 1
                if empty_epochs > 1:
                    raise self._no_text()
        # Keys of 2**63 or more would become float64 in numpy. Blocks with equal float64 keys would have the same order.
        random = np.random.Philox(key=[stream.seed, 2**62 + (self._number << 48) + block])
        self._texts = [texts[index] for index in random_order(random, len(texts))]
        self.position = Position(self.position.sequences, *begin, block, 0, 0, *faults)

    def _no_text(self) -> ConfigError:
        reason = ": remove empty files"
        if self._fault:
            reason = f", and its last fault is: {self._fault}; correct or remove it, or leave out data.streaming"
        return ConfigError(f"a part of {self._stream.config.description} contains no text{reason}")

    def _read(self, epoch: int, piece: int, entry: int) -> Iterator[tuple[tuple[int, int, int], str | None]]:
        """Read the texts of the stream, beginning at entry number `entry` of piece number `piece`.

        Yields:
            ((epoch, piece, entry), text): a text, and the place of the next text. At the end of an epoch, `text` is None.
        """
        while True:
            order = random_order(np.random.Philox(key=[self._stream.seed, (self._number << 48) + epoch]), len(self._pieces))
            for index in range(piece, len(order)):
                entries = islice(self._stream.corpus.read(self._pieces[order[index]]), entry, None)
                for number, (_, content) in enumerate(entries, entry + 1):
                    yield (epoch, index, number), self._check(content)
                entry = 0
            epoch, piece = epoch + 1, 0
            yield (epoch, 0, 0), None

    def _check(self, content: sources.Content) -> str:
        if not isinstance(content, ConfigError):
            return str(content or "")
        if self._stream.config.on_error == "raise":
            raise content
        self._faulty, self._fault = self._faulty + 1, str(content)
        return ""


@dataclass
class StreamDataset(NumberedSequences):
    """Reads an endless series of sequences from a stream. Request the sequences in ascending order.

    Attributes:
        corpus: a FileCorpus or a HubCorpus.
        start: maps the number of a reader to the position where the reader continues. By default, readers start at the
            beginning.
    """

    config: DataConfig
    tokenizer: Tokenizer
    corpus: Any
    start: Mapping[int, Position] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seq_len, self.seed, self.pieces = self.config.seq_len, self.config.seed, self.corpus.pieces
        self.num_readers = min(MAX_READERS, 1 << len(self.pieces).bit_length() - 1)
        self.block_documents = -(-self.config.shuffle_buffer // self.num_readers)
        self._readers = dict[int, Reader]()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_readers": {}}  # Open files cannot be sent to the loader process.

    @property
    def splits(self) -> dict[str, int]:
        """Return 2**40 rows for each split, because the true number is unknown."""
        names = (self.config.split, self.config.eval_split or "train")
        return {re.split(r"\W", name)[0]: 2**40 for name in names}

    @property
    def fingerprint(self) -> dict[str, Any]:
        known = {"sequences": f"a stream of {self.num_readers} shuffled readers", "shuffle_buffer": self.config.shuffle_buffer}
        known |= {"text": self.corpus.identity, "seq_len": self.seq_len, "seed": self.seed}
        known |= {name: getattr(self.config, name) for name in DOCUMENT_SETTINGS}
        if self.config.on_error == "skip":  # larger documents are skipped
            known |= {"max_document_mb": self.config.max_document_mb}
        return known | {"tokenizer": describe_tokenizer(self.tokenizer)}

    @property
    def positions(self) -> dict[int, Position]:
        return dict(self.start) | {number: reader.position for number, reader in self._readers.items()}

    @staticmethod
    def faults(positions: Mapping[int, Position]) -> tuple[int, str]:
        return sum(each.faulty for each in positions.values()), max((each.fault for each in positions.values()), default="")

    def repeated(self, before: Mapping[int, Position], after: Mapping[int, Position]) -> str:
        begun = {number: each.epoch + 1 for number, each in after.items() if each.epoch > before.get(number, Position()).epoch}
        return ", ".join(f"reader {number} of {self.num_readers} (epoch {epoch})" for number, epoch in sorted(begun.items()))

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
        count, number = divmod(index, self.num_readers)
        reader = self._readers.get(number)
        if reader is None or reader.position.sequences > count:
            reader = self._readers[number] = Reader(self, number, self.start.get(number, Position()))
        if reader.position.sequences > count:
            raise ValueError(f"sequence {index} was read before the checkpoint from which the stream continues")
        while reader.position.sequences < count:
            reader.sequence()
        return reader.sequence()

    def tokenise(self, texts: list[str]) -> list[np.ndarray]:
        return [add_ends(tokens, self.tokenizer) for tokens in self.tokenizer.encode_batch(texts)]

    def saved_positions(self, found: list[dict[int, Position]], consumed: int) -> dict[str, list[Any]]:
        """Return the readers' positions after `consumed` sequences, in the format of a checkpoint.

        `found` contains the positions of each rank.
        """
        latest = dict[int, Position]()
        for number, position in (item for positions in found for item in positions.items()):
            latest[number] = max(latest.get(number, position), position)
        saved: dict[str, list[Any]] = {str(number): list(position) for number, position in sorted(latest.items())}
        self.check_positions(saved, consumed)
        return saved

    def check_positions(self, saved: Any, consumed: int) -> None:
        """Raise ConfigError unless a checkpoint contains the positions of all readers after `consumed` sequences."""
        expected = {str(number): -(-(consumed - number) // self.num_readers) for number in range(self.num_readers)}
        expected = {number: count for number, count in expected.items() if count > 0}
        is_complete = isinstance(saved, dict) and saved.keys() == expected.keys()
        if not is_complete or any(len(saved[n]) != len(Position._fields) or saved[n][0] != expected[n] for n in expected):
            raise ConfigError(
                f"the positions in the stream of {self.config.description} are incomplete after {consumed:,} sequences: choose "
                "another checkpoint"
            )

    def at(self, saved: Any, consumed: int) -> "StreamDataset":
        """Return a stream that continues from the positions in a checkpoint. Errors as in `check_positions`."""
        self.check_positions(saved, consumed)
        return replace(self, start={int(number): Position(*values) for number, values in saved.items()})


def open_stream(config: DataConfig, tokenizer: Tokenizer) -> StreamDataset:
    """Open a corpus for streaming.

    Raises:
        ConfigError: a file or a dataset is missing, or does not have the column.
    """
    try:
        corpus = HubCorpus(config) if config.source == "hub" else FileCorpus(config)
    except ConfigError:
        raise
    except Exception as error:  # Each reader raises errors of its own types.
        raise sources.cannot_read(config, error) from error
    return StreamDataset(config, tokenizer, corpus)


class FileCorpus:
    """Reads files of JSON lines or Parquet files.

    Attributes:
        pieces: the parts into which the files are split. They are smaller in small corpora.
        identity: a checksum of the names, sizes and beginnings of the files.
    """

    def __init__(self, config: DataConfig):
        names, self.identity = list(map(Path, sources.files(config))), 0
        for name in names:
            with open(name, "rb") as file:
                known = [name.name, name.stat().st_size, file.read(SAMPLED_BYTES)]
            self.identity = zlib.crc32(repr(known).encode(), self.identity)
        self._corpus = sources.Corpus(config, MAX_READERS, MIN_PIECE_BYTES)
        self.pieces = [each for each in self._corpus.pieces if config.source != "jsonl" or sources.begins_line(each)]

    def read(self, piece: sources.Piece) -> Iterator[sources.Entry]:
        yield from self._corpus.read(piece)
        if error := sources.find_change(piece):
            raise error


class HubCorpus:
    """Reads a dataset of the hub, which is downloaded while it is read.

    Attributes:
        pieces: the indices of the dataset's parts, which are files or row groups.
        identity: the commit and the files.
    """

    def __init__(self, config: DataConfig):
        self._config, self._rows = config, sources.open_hub(config)
        if self._rows.num_shards < MAX_READERS and hasattr(self._rows, "reshard"):
            self._rows = self._rows.reshard()
        sources.check_hub_columns(self._rows, config)
        self.pieces = list(range(self._rows.num_shards))
        self.identity = f"{sources.hub_commit(config)}, {len(self.pieces)} parts"

    def read(self, piece: int) -> Iterator[sources.Entry]:
        rows = self._rows.shard(num_shards=len(self.pieces), index=piece)
        try:
            yield from sources.hub_rows(rows, self._config)
        except ConfigError:
            raise
        except Exception as error:  # The types of errors depend on the network library.
            raise sources.cannot_read(self._config, error) from error
