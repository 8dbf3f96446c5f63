"""Tokenisation by several processes: the shards, the cache, faulty files, and files that change."""

import errno
import gzip
import json
import logging
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import datasets.config
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.train.data import shards, sources, tokenisation, workers
from ringattn.train.data.packing import load
from ringattn.train.data.shards import Shards
from ringattn.train.data.tokenisation import tokenise
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.settings.config import ConfigError, DataConfig
from tests.train.data.rows import read_documents

TEXTS = [f"document {number} " + "x" * (number % 37) for number in range(200)]


def write_corpus(folder: Path, source: str) -> DataConfig:
    """Write TEXTS, and return the settings. Files differ in size, so that large ones are divided and small ones are joined."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = TEXTS[:2], TEXTS[2:150], TEXTS[150:151], TEXTS[151:]
    for number, part in enumerate(parts):
        if source == "parquet":
            pa.parquet.write_table(pa.table({"text": part}), folder / f"{number}.parquet", row_group_size=20)
        elif source == "text":
            for index, text in enumerate(part):
                (folder / f"{number}-{index:03}.txt").write_text(text)
        else:
            content = "".join(json.dumps({"text": text}) + "\n\n" * (len(text) % 2) + "\n" for text in part).encode()
            (folder / f"{number}.jsonl").write_bytes(gzip.compress(content, mtime=0) if number == 3 else content)
    return DataConfig(source=source, path=str(folder), seq_len=4, eval_fraction=0.0)


def texts_in(folder: Path) -> list[str]:
    store = Shards(folder)
    documents = [store.read(number) for number in range(len(store.lengths))]
    assert all(tokens[0] == 256 for tokens in documents)
    return [bytes(tokens[1:].astype(np.uint8)).decode() for tokens in documents]


@pytest.fixture
def small_pieces(monkeypatch):
    """The corpora of these tests have many pieces, and their pieces have several shards."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(tokenisation, "SHARD_TOKENS", 500)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_several_processes_write_the_same_files(source, small_pieces, tmp_path, monkeypatch):
    config, folders = write_corpus(tmp_path / "corpus", source), [tmp_path / "1", tmp_path / "2"]
    tokenise(config, BytesTokenizer(), folder=folders[0])
    monkeypatch.setattr(workers, "MIN_BYTES", 1)
    tokenise(DataConfig(**vars(config) | {"num_proc": 2}), BytesTokenizer(), folder=folders[1])
    assert texts_in(folders[0]) == TEXTS
    names = sorted(path.name for path in folders[0].iterdir())
    assert len(names) > 25
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text("a\n", max_size=12), min_size=1, max_size=12), st.integers(1, 60))
def test_every_line_is_in_one_piece_and_knows_its_number(tmp_path_factory, texts, piece_bytes):
    """A piece may begin or end inside a line, at a line end, or inside a line that fills several pieces."""
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [json.dumps({"text": text}) if "a" in text else "" for text in texts]
    path.write_text("\n".join([*lines, '{"text": "last"}']))
    expected = [(f"{path}, line {number}", text) for number, text in enumerate([*texts, "last"], 1) if "a" in text]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", piece_bytes)
        entries, _ = read_documents(DataConfig(source="jsonl", path=str(path)))
        assert [(str(where), text) for where, text in entries if text] == expected


@pytest.mark.parametrize("split", ["train[:30%]", "train[97:160]", "train[-3:]+train[:3]"])
@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_a_split_selects_rows_of_several_pieces(source, split, small_pieces, tmp_path):
    config = write_corpus(tmp_path / "corpus", source)
    folder = tokenise(DataConfig(**vars(config) | {"split": split}), BytesTokenizer())
    selected = {"train[:30%]": TEXTS[:60], "train[97:160]": TEXTS[97:160], "train[-3:]+train[:3]": TEXTS[-3:] + TEXTS[:3]}
    assert texts_in(folder) == selected[split]
    assert Shards(folder).index["counts"]["rows_by_split"] == {"train": 200}


def test_a_killed_tokenisation_repeats_only_the_incomplete_shard(small_pieces, tmp_path, monkeypatch):
    config, folder = write_corpus(tmp_path / "corpus", "jsonl"), tmp_path / "shards"
    encode, encoded = BytesTokenizer.encode, list[str]()

    def record(self: BytesTokenizer, text: str) -> np.ndarray:
        encoded.append(text)
        if len(encoded) % 50 == 0:
            raise KeyboardInterrupt
        return encode(self, text)

    monkeypatch.setattr(BytesTokenizer, "encode", record)
    launches = 0
    while not (folder / "index.json").exists():
        launches += 1
        try:
            tokenise(config, BytesTokenizer(), folder=folder)
        except KeyboardInterrupt:
            assert not list(folder.glob("*.partial"))
    assert launches > 3
    assert len(encoded) < 200 + 30 * launches
    assert texts_in(folder) == TEXTS


def test_the_key_depends_on_the_content_and_not_on_the_place_or_the_time(tmp_path):
    first = write_corpus(tmp_path / "a", "jsonl")
    folder = tokenise(first, BytesTokenizer())
    os.utime(tmp_path / "a" / "0.jsonl", (1, 1))
    assert tokenise(first, BytesTokenizer()) == folder
    assert tokenise(write_corpus(tmp_path / "b", "jsonl"), BytesTokenizer()) == folder
    content = (tmp_path / "a" / "1.jsonl").read_text()
    (tmp_path / "a" / "1.jsonl").write_text(content.replace("document 2", "Document 2"))
    assert tokenise(first, BytesTokenizer()) != folder


def test_the_key_depends_on_every_byte(tmp_path, monkeypatch):
    """The checksum of a file consists of the checksums of its parts."""
    monkeypatch.setattr(tokenisation, "HASHED_BYTES", 7)
    path = tmp_path / "a.txt"
    config, content, keys = DataConfig(source="text", path=str(path)), bytearray(b"a" * 21), set[Path]()
    for changed in (20, 14, 13, 7, 6, 0):
        content[changed] += 1
        path.write_bytes(content)
        keys.add(tokenise(config, BytesTokenizer()))
    assert len(keys) == 6


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    config = write_corpus(tmp_path / "corpus", "jsonl")
    (tmp_path / "shards").touch()
    with pytest.raises(ConfigError, match=r"shards cannot be written: .*File exists.*choose another output"):
        tokenise(config, BytesTokenizer(), folder=tmp_path / "shards")
    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(ConfigError, match=r"ringattn cannot be written: .*No space left.*HF_HOME"):
            tokenise(config, BytesTokenizer())
    with monkeypatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "shards" / "cache")
        with pytest.raises(ConfigError, match=r"cache/ringattn cannot be written: .*Not a directory.*HF_HOME"):
            tokenise(config, BytesTokenizer())
        tokenise(config, BytesTokenizer(), folder=tmp_path / "other")  # needs no cache
    monkeypatch.setattr(BytesTokenizer, "encode", Mock(side_effect=MemoryError))
    with pytest.raises(ConfigError, match=r"too little memory.*data\.num_proc"):
        tokenise(DataConfig(**vars(config) | {"split": "train[:5]"}), BytesTokenizer(), folder=tmp_path / "new")


def test_a_file_that_exceeds_the_limit_of_the_disk_is_removed(tmp_path):
    """Python ignores the signal SIGXFSZ, so the limit of the process acts as the limit of a file system, or as a full disk."""
    config, limits = write_corpus(tmp_path / "corpus", "jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"shards cannot be written: .*File too large.*choose another output"):
            tokenise(config, BytesTokenizer(), folder=tmp_path / "shards")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "shards").glob("*.partial"))


def test_a_process_says_that_it_waits_for_another_one(tmp_path, caplog):
    config, folder = write_corpus(tmp_path / "corpus", "jsonl"), tmp_path / "shards"
    folder.mkdir()
    with FileLock(folder / ".lock") as lock, ThreadPoolExecutor() as pool, caplog.at_level(logging.INFO):
        path = pool.submit(tokenise, config, BytesTokenizer(), folder=folder)
        while "waiting     for another process, which prepares the same text in" not in caplog.text:
            time.sleep(0.01)
        lock.release()
        assert path.result() == folder


def test_without_locks_the_slower_of_two_processes_keeps_the_complete_index(small_pieces, tmp_path, monkeypatch):
    config, folder = write_corpus(tmp_path / "corpus", "jsonl"), tmp_path / "shards"
    monkeypatch.setattr(tokenisation, "_lock", Mock(side_effect=OSError(errno.ENOSYS, "no locks")))
    encode, encoded = BytesTokenizer.encode, list[str]()

    def finish_in_another_process(self: BytesTokenizer, text: str) -> np.ndarray:
        encoded.append(text)
        if len(encoded) == len(TEXTS) // 2:
            monkeypatch.setattr(BytesTokenizer, "encode", encode)
            tokenise(config, BytesTokenizer(), folder=folder)
        return encode(self, text)

    monkeypatch.setattr(BytesTokenizer, "encode", finish_in_another_process)
    tokenise(config, BytesTokenizer(), folder=folder)
    assert len(encoded) == len(TEXTS) // 2
    assert texts_in(folder) == TEXTS


def test_a_folder_with_other_content_is_an_error(tmp_path):
    config, folder = write_corpus(tmp_path / "corpus", "jsonl"), tmp_path / "shards"
    tokenise(config, BytesTokenizer(), folder=folder)
    with pytest.raises(ConfigError, match="contains another corpus"):
        tokenise(DataConfig(**vars(config) | {"split": "train[:5]"}), BytesTokenizer(), folder=folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes-1.json").touch()
    with pytest.raises(ConfigError, match="contains other files"):
        tokenise(config, BytesTokenizer(), folder=tmp_path / "other")


FAULTY = {
    "jsonl": b'{"text": "a"}\n{"text": "caf\xe9"}\n{"body": "b"}\n{"text": "c"\n[1]\n{"text": 5}\n{"text": "d"}\n',
    "text": b"caf\xe9",
    "parquet": b"damaged",
}


@pytest.mark.parametrize("source", FAULTY)
def test_faults_are_skipped_and_counted(source, tmp_path, caplog):
    """Without `on_error`, the first fault is an error, as the tests of sources show."""
    caplog.set_level(logging.INFO)
    config = write_corpus(tmp_path / "corpus", source)
    (tmp_path / "corpus" / f"2.{source}").write_bytes(FAULTY[source])
    (tmp_path / "corpus" / "9.jsonl").touch()
    config = DataConfig(**vars(config) | {"on_error": "skip"})
    assert len(load(config, BytesTokenizer()).lengths) == {"jsonl": 201, "text": 200, "parquet": 199}[source]
    (message,) = [message for message in caplog.messages if "faulty" in message]
    first = {"jsonl": ", line 2: the byte 0xe9", "text": ", line 1: the byte 0xe9", "parquet": " cannot be read: ArrowInvalid"}
    assert f"skipped     {6 if source == 'jsonl' else 1} of " in message
    assert f"2.{source}{first[source]}" in message
    with pytest.raises(ConfigError, match=r"byte 0xe9|ArrowInvalid"):
        load(DataConfig(**vars(config) | {"on_error": "raise"}), BytesTokenizer())


def test_a_fault_in_a_later_piece_names_its_line(small_pieces, tmp_path):
    config = write_corpus(tmp_path / "corpus", "jsonl")
    lines = (tmp_path / "corpus" / "1.jsonl").read_text().splitlines()
    number = len(lines) - 2
    lines[number - 1] = "{"
    (tmp_path / "corpus" / "1.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=rf"1\.jsonl, line {number} is not valid JSON"):
        tokenise(config, BytesTokenizer())


def test_a_corpus_of_faults_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "b"}\n')
    config = DataConfig(source="jsonl", path=f"{tmp_path}/a.jsonl", on_error="skip", seq_len=4)
    with pytest.raises(ConfigError, match=r"contains no text, and its first fault is: .*line 1 has no column 'text'"):
        load(config, BytesTokenizer())


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_that_changes_while_it_is_read_is_an_error(on_error, tmp_path, monkeypatch):
    """No shard that contains a part of the changed file is published, unless the change is counted."""
    config = DataConfig(**vars(write_corpus(tmp_path / "corpus", "jsonl")) | {"on_error": on_error})
    encode = BytesTokenizer.encode

    def change(self: BytesTokenizer, text: str) -> np.ndarray:
        with open(tmp_path / "corpus" / "1.jsonl", "a") as file:
            file.write("\n")
        return encode(self, text)

    monkeypatch.setattr(BytesTokenizer, "encode", change)
    if on_error == "raise":
        with pytest.raises(ConfigError, match=r"1\.jsonl has changed while it was read"):
            tokenise(config, BytesTokenizer(), folder=tmp_path / "shards")
        assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == [".lock", "plan.json"]
    else:
        index = Shards(tokenise(config, BytesTokenizer())).index
        assert index["counts"]["faulty"] == 1


def test_the_cache_is_inside_the_cache_of_datasets(tmp_path):
    folder = tokenise(write_corpus(tmp_path / "corpus", "jsonl"), BytesTokenizer())
    assert folder.parent == Path(datasets.config.HF_DATASETS_CACHE) / "ringattn"
