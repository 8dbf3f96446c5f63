"""Shards on the disk: they return what was written, and damage is an error."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.train.data import shards
from ringattn.train.data.shards import Documents, JoinedParts, Shards, ShardWriter, write_json
from ringattn.train.settings.config import ConfigError
from tests.train.data.rows import Rows

DOCUMENTS = [[[5, 1, 2], [7]], [[65535, 0, 3, 3]]]  # of two shards


def write_folder(folder: Path, contents: list[list[list[int]]] = DOCUMENTS, has_loss: bool = False, dtype: str = "<u2") -> Path:
    """Write shards and their index."""
    folder.mkdir(exist_ok=True)
    written = []
    for number, documents in enumerate(contents):
        writer = ShardWriter(folder, dtype, has_loss)
        for document in documents:
            writer.write(np.array(document, dtype=np.int32))
        writer.publish(f"{number:06}-0000", {})
        written.append(shards.json.loads((folder / f"{number:06}-0000.json").read_text()))
    total = {name: sum(shard[name] for shard in written) for name in ("documents", "tokens")}
    index = {
        "version": 1,
        "dtype": dtype,
        "has_loss": has_loss,
        "tokenizer": {},
        "settings": {"format": "chat" if has_loss else "text", "special_tokens": "text"},
        "counts": {},
        "shards": written,
    }
    write_json(folder / "index.json", index | total)
    return folder


def change_index(**values: object) -> Callable[[Path], None]:
    """Return a function that changes index.json in a folder."""
    return lambda folder: write_json(folder / "index.json", shards.read_index(folder) | values)


def read_all(store: shards.Store) -> list[list[int]]:
    return [store.read(number).tolist() for number in range(len(store.lengths))]


def test_documents_are_read_as_they_were_written(tmp_path):
    store = Shards(write_folder(tmp_path))
    assert read_all(store) == [*DOCUMENTS[0], *DOCUMENTS[1]]
    assert store.lengths.tolist() == [3, 1, 4]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted(
        [".json", ".tokens", ".offsets", ".checksums"] * 2 + [".json"]
    )


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9), min_size=1, max_size=4))
def test_tokens_without_loss_are_read_as_they_were_written(tmp_path_factory, documents):
    folder = write_folder(tmp_path_factory.mktemp("shards"), [documents], has_loss=True, dtype="<u4")
    assert read_all(Shards(folder)) == documents


def test_a_token_that_does_not_fit_is_an_error(tmp_path):
    for token in (-1, 2**16):
        with pytest.raises(ValueError, match=f"{token} does not fit into uint16"):
            ShardWriter(tmp_path, "<u2", has_loss=False).write(np.array([token], dtype=np.int32))


@pytest.mark.parametrize("suffix", ["tokens", "offsets", "checksums", "loss"])
def test_a_changed_byte_is_an_error_before_the_document_is_used(suffix, tmp_path):
    folder = write_folder(tmp_path, has_loss=True)
    path = folder / f"000000-0000.{suffix}"
    content = bytearray(path.read_bytes())
    content[1] ^= 1
    path.write_bytes(content)
    if suffix in ("tokens", "loss"):
        store = Shards(folder)
        assert [store.read(number).tolist() for number in (1, 2)] == [DOCUMENTS[0][1], DOCUMENTS[1][0]]
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"000000-0000\.tokens is damaged: the checksum of document 0"):
                store.read(0)
    else:
        with pytest.raises(ConfigError, match=f"000000-0000.{suffix} is damaged: its checksum is wrong"):
            Shards(folder)


def test_a_large_document_is_verified_once(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "ALWAYS_VERIFIED", 1)
    store = Shards(write_folder(tmp_path))
    assert store.read(0).tolist() == store.read(0).tolist() == DOCUMENTS[0][0]
    monkeypatch.setattr(shards.zlib, "crc32", lambda *_: 0)
    assert store.read(0).tolist() == DOCUMENTS[0][0]
    with pytest.raises(ConfigError):
        store.read(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "000001-0000.tokens").write_bytes(b"1234567"), "must have 8 bytes, but there are 7 bytes"),
        (lambda folder: (folder / "000001-0000.offsets").unlink(), "must have 16 bytes, but there is no such file"),
        (lambda folder: (folder / "index.json").unlink(), "index.json does not exist: prepare the folder"),
        (lambda folder: (folder / "index.json").write_text("{"), "index.json is damaged: JSONDecodeError"),
        (lambda folder: (folder / "index.json").write_text('{"version": 1}'), "index.json is damaged: KeyError"),
        (
            lambda folder: (folder / "index.json").write_text('{"version": 2}'),
            "^[^ ]*index.json has version 2, but this version of ringattn reads 1: update it$",
        ),
        (change_index(dtype=">u2"), "index.json is damaged: ValueError: dtype=>u2, which must be one of <u2, <u4"),
        (change_index(has_loss=True), "index.json is damaged: ValueError: has_loss contradicts the format"),
        (change_index(settings={}), "index.json is damaged: KeyError: 'format'"),
        (change_index(tokenizer=[]), r"index.json is damaged: TypeError: tokenizer is \[\], which must be of the type dict"),
        (change_index(shards=[{}]), "index.json is damaged: KeyError: 'name'"),
    ],
)
def test_a_damaged_folder_is_an_error_at_the_start(change, message, tmp_path):
    change(write_folder(tmp_path))
    with pytest.raises(ConfigError, match=message) as error:
        Shards(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_folder_that_is_replaced_after_its_start_is_an_error(change, tmp_path):
    """A shard is mapped when its first document is read, perhaps hours after the start of a run, or in another process."""
    store = Shards(write_folder(tmp_path))
    assert store.read(0).tolist() == DOCUMENTS[0][0]
    for path in tmp_path.iterdir():
        path.unlink()
    if change == "replaced":
        write_folder(tmp_path, [[[1], [2, 3, 4]], [[5, 6, 7, 8]]])
    message = "its checksum is wrong" if change == "replaced" else "No such file"
    assert store.read(1).tolist() == DOCUMENTS[0][1]  # the map of the first shard remains
    for damaged, number in ((store, 2), (pickle.loads(pickle.dumps(store)), 0)):
        with pytest.raises(ConfigError, match=rf"is damaged: .*{message}") as error:
            damaged.read(number)
        assert "\n" not in str(error.value)


def test_a_pickle_contains_no_tokens(tmp_path):
    store = Shards(write_folder(tmp_path, [[[1] * 100_000]]))
    store.read(0)
    content = pickle.dumps(Documents.of(store))
    assert len(content) < 5000
    assert pickle.loads(content)[0].tolist() == [1] * 100_000


def test_parts_of_documents():
    documents = Documents.of(Rows([[1, 2, 3], [4], [5, 6]]), {"train": 3})
    part = documents.select(np.array([2, 0])).append_part(0, 1, 2)
    assert [part[i].tolist() for i in range(3)] == [[5, 6], [1, 2, 3], [2, 3]]
    assert part.lengths.tolist() == [2, 3, 2]
    assert part.splits == {"train": 3}
    assert len(documents.append_part(0, 1, 0)) == 3
    joined = Documents.of(JoinedParts([part, documents.first(2)]))
    assert [joined[i].tolist() for i in range(5)] == [[5, 6], [1, 2, 3], [2, 3], [1, 2, 3], [4]]
    with pytest.raises(AssertionError, match="a part of a document cannot be selected"):
        part.select(np.array([2]))
