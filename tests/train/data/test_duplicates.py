"""Tests of the warning about held-out documents that are also in the training text."""

import json

import numpy as np
import pytest

from ringattn.train.data.documents import TokenisedDocuments
from ringattn.train.data.duplicates import warn_of_duplicates
from ringattn.train.data.packing import load_held_out, load_training
from ringattn.train.data.shards import Documents, JoinedParts
from ringattn.train.data.tokenisation import tokenise
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.data.workers import log_once
from ringattn.train.settings.config import DataConfig, MixSource
from tests.train.data.rows import Rows


@pytest.fixture(autouse=True)
def new_messages():
    log_once.cache_clear()


def write(path, numbers):
    path.write_text("".join(json.dumps({"text": f"document {number} " * 8}) + "\n" for number in numbers))
    return str(path)


def warnings(config, caplog):
    caplog.clear()
    log_once.cache_clear()
    load_held_out(config, BytesTokenizer(), load_training(config, BytesTokenizer()))
    return [message for message in caplog.messages if message.startswith("duplicates")]


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_a_prepared_source_with_documents_of_another_source(packing, tmp_path, caplog):
    """`large` contains all documents of `small` in another order, so other documents are held out."""
    paths = write(tmp_path / "small.jsonl", range(100)), write(tmp_path / "large.jsonl", [*range(99, -1, -1), *range(100, 300)])
    other = write(tmp_path / "other.jsonl", range(1000, 1100))
    for path, expected in ((paths[0], "training text of small and large"), (other, None)):
        folder = tokenise(DataConfig("jsonl", path=path), BytesTokenizer(), folder=tmp_path / f"shards{expected is None}")
        mix = [MixSource("small", 0.5, "prepared", str(folder)), MixSource("large", 0.5, "jsonl", paths[1])]
        config = DataConfig("mix", mix=mix, seq_len=64, eval_fraction=0.2, packing=packing)
        found = warnings(config, caplog)
        assert len(found) == (expected is not None)
        assert all(expected in message for message in found)


def test_duplicates_inside_one_source_and_in_other_files(tmp_path, caplog):
    path, other = write(tmp_path / "a.jsonl", [*range(50), *range(50)]), write(tmp_path / "b.jsonl", [7, 1000, 1001, 1002])
    (message,) = warnings(DataConfig("jsonl", path=path, seq_len=64, eval_fraction=0.1), caplog)
    assert f"training text of data.source=jsonl data.path={path}" in message
    (message,) = warnings(DataConfig("jsonl", path=path, seq_len=64, eval_path=other, eval_fraction=0.0), caplog)
    assert "duplicates  1 of 4 held-out documents (20.8% of the held-out tokens)" in message
    write(tmp_path / "b.jsonl", [1000, 1001, 1002])
    assert warnings(DataConfig("jsonl", path=path, seq_len=64, eval_path=other, eval_fraction=0.0), caplog) == []


def test_parts_of_documents_are_no_duplicates(caplog):
    """Each part of the divided document has 4 tokens. The second document is too short to matter."""
    documents = Documents.of(Rows([[1] * 8, [2], [3] * 2000]))
    first, rest = documents.select(np.array([1, 2])).append_part(0, 0, 4), documents.select(np.array([1])).append_part(0, 4, 4)
    held_out = TokenisedDocuments(Documents.of(JoinedParts([first])), seq_len=4, seed=0)
    warn_of_duplicates(held_out, {"a": TokenisedDocuments(rest, seq_len=4, seed=0)})
    assert caplog.messages == []
