import importlib
import json
import linecache
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.train import trainer as trainer_module
from ringattn.train.config import ConfigError, DataConfig
from ringattn.train.data import packing, sources
from ringattn.train.data.packing import PackedDataset, load
from ringattn.train.data.tokenizer import BytesTokenizer
from tests.distributed import run_ranks

EOS = 256
corpora = st.lists(st.lists(st.integers(0, 255), max_size=20), min_size=1, max_size=12)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def pack(documents: list[list[int]], seq_len: int, seed: int = 0, shuffle: bool = False) -> PackedDataset:
    """Pack `documents`, which are given without their EOS."""
    rows = [[EOS, *document] for document in documents]
    columns = {"tokens": rows, "length": [len(row) for row in rows]}
    return PackedDataset(datasets.Dataset.from_dict(columns, features=packing.TOKENS), seq_len, seed, shuffle)


def packable(corpus: list[list[int]], seq_len: int) -> bool:
    return sum(len(document) + 1 for document in corpus) > seq_len


def epoch_tokens(dataset: PackedDataset, epoch: int) -> list[int]:
    count = dataset.sequences_per_epoch
    return dataset.batch(range(epoch * count, (epoch + 1) * count)).tokens.flatten().tolist()


def config(source: str, **changes) -> DataConfig:
    return DataConfig(source=source, seq_len=4, **changes)


@settings(deadline=None, max_examples=60)
@given(corpora, st.integers(1, 30), st.integers(0, 3), st.integers(0, 2))
def test_an_epoch_is_its_documents_in_some_order(corpus, seq_len, seed, epoch):
    if not packable(corpus, seq_len):
        return
    dataset = pack(corpus, seq_len, seed, shuffle=True)
    order, _, sequences = dataset._order_of(epoch)
    assert sorted(order) == list(range(len(corpus)))
    assert sorted(sequences) == list(range(dataset.sequences_per_epoch))
    stream = [token for index in order for token in [EOS, *corpus[index]]]
    count = (len(stream) - 1) // seq_len
    assert dataset.sequences_per_epoch == count
    batch = dataset.batch(range(epoch * count, (epoch + 1) * count))
    for i, start in enumerate(sequences * seq_len):
        assert batch.tokens[i].tolist() == stream[start : start + seq_len]
        assert batch.labels[i].tolist() == stream[start + 1 : start + seq_len + 1]


def test_sequences_of_one_document_are_spread_over_an_epoch():
    """Without the random order, the entries of a batch would be neighbours in the stream."""
    documents = [list(range(100 * i, 100 * i + 99)) for i in range(1, 6)]
    orders = [pack(documents, 10, seed, shuffle=True)._order_of(epoch)[2] for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all((np.diff(order) == 1).sum() < 5 for order in orders)
    assert (np.diff(pack(documents, 10)._order_of(0)[2]) == 1).all()


@settings(deadline=None, max_examples=60)
@given(corpora, st.integers(1, 30))
def test_document_lengths_agree_with_eos(corpus, seq_len):
    if not packable(corpus, seq_len):
        return
    dataset = pack(corpus, seq_len)
    batch = dataset.batch(range(2 * dataset.sequences_per_epoch))
    for tokens, lengths in zip(batch.tokens.tolist(), batch.documents, strict=True):
        assert sum(lengths) == seq_len
        starts = [0] + [place for place, token in enumerate(tokens) if token == EOS and place > 0]
        assert lengths == tuple(np.diff([*starts, seq_len]).tolist())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.lists(st.integers(0, 40), max_size=6))
def test_a_batch_does_not_depend_on_what_was_read_before(indices, before):
    corpus = [[value] * value for value in range(9)]
    fresh, used = pack(corpus, 5), pack(corpus, 5)
    for index in before:
        used.sequence(index)
    expected, batch = fresh.batch(indices), used.batch(indices)
    assert torch.equal(batch.tokens, expected.tokens)
    assert torch.equal(batch.labels, expected.labels)
    assert batch.documents == expected.documents


def test_a_batch_by_hand():
    batch = pack([[1, 2, 3, 4, 5, 6, 7]], 3).batch([0, 1])
    assert batch.tokens.tolist() == [[EOS, 1, 2], [3, 4, 5]]
    assert batch.labels.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch.documents == ((3,), (3,))
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64


def test_epochs_and_seeds_order_documents_differently():
    corpus = [[value] for value in range(50)]
    orders = [epoch_tokens(pack(corpus, 1, seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_is_the_same_on_every_machine():
    order, _, sequences = pack([[value] for value in range(8)], 1, seed=3, shuffle=True)._order_of(1)
    assert order.tolist() == [7, 3, 5, 6, 4, 0, 2, 1]
    assert sequences.tolist() == [1, 0, 11, 13, 4, 6, 7, 14, 10, 9, 5, 2, 8, 3, 12]


def test_corpus_shorter_than_a_sequence():
    assert pack([[1, 2, 3]], 3).sequences_per_epoch == 1
    with pytest.raises(ConfigError, match="4 tokens, but data.seq_len=4 requires 5"):
        pack([[1, 2, 3]], 4)


def test_stdlib_is_tokenised_once(monkeypatch):
    first = load(DataConfig(), BytesTokenizer())
    assert first.tokens_per_epoch > 5_000_000
    assert len(first.lengths) > 300
    monkeypatch.setattr(BytesTokenizer, "encode", pytest.fail)
    again = load(DataConfig(), BytesTokenizer())
    assert torch.equal(first.batch([5]).tokens, again.batch([5]).tokens)
    assert "import" in BytesTokenizer().decode(again.batch(range(50)).tokens.flatten().tolist())


TOKENIZER = """
import numpy as np

class Letters:
    vocab_size, eos = 257, {eos}

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
"""


def test_tokens_of_a_tokenizer_that_changed_are_made_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would take that of the same second for the same
    (tmp_path / "one.txt").write_text("text")
    ends = []
    for eos in (255, 256):
        (tmp_path / "letters.py").write_text(TOKENIZER.format(eos=eos))
        monkeypatch.delitem(sys.modules, "letters", raising=False)
        linecache.clearcache()
        importlib.invalidate_caches()
        tokenizer = importlib.import_module("letters").Letters()
        ends.append(int(load(config("text", path=str(tmp_path / "one.txt")), tokenizer).batch([0]).tokens[0, 0]))
    assert ends == [255, 256]


def test_tokens_laid_otherwise_are_made_again(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_text("text")
    corpus = config("text", path=str(tmp_path / "one.txt"))
    assert load(corpus, BytesTokenizer()).batch([0]).tokens.tolist() == [[EOS, *b"tex"]]

    def eos_behind(texts, tokenizer, **_):
        tokens = [np.append(tokenizer.encode(text), tokenizer.eos) for text in texts]
        return {"tokens": tokens, "length": list(map(len, tokens))}

    eos_behind.__module__, eos_behind.__qualname__, eos_behind.__name__ = (
        "ringattn.train.data.packing",
        "_tokenise",
        "_tokenise",
    )
    monkeypatch.setattr(packing, "_tokenise", eos_behind)
    assert load(corpus, BytesTokenizer()).batch([0]).tokens.tolist() == [[*b"text"]]


def test_stdlib_leaves_tests_and_packages_out():
    files = sources.library_files()
    assert files == sorted(files)
    assert any(file.endswith("/json/decoder.py") for file in files)
    assert not [file for file in files if "/site-packages/" in file or "/test/" in file or "/idlelib/" in file]


def test_text_files_are_documents(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "one.txt").write_text("first\n\nstill first")
    (tmp_path / "a" / "two [2].txt").write_text("zweites é")
    (tmp_path / "empty.txt").write_text("\ufeff")  # a byte-order mark is not text
    dataset = load(config("text", path=f"{tmp_path}/**/*.txt"), BytesTokenizer(), shuffle=False)
    assert sorted(dataset.lengths) == [11, 19]
    assert BytesTokenizer().decode(epoch_tokens(dataset, 0)).startswith(("first\n\nstill firstzwe", "zweites éfirst"))


def test_a_text_file_that_changed_is_read_again(tmp_path):
    file = tmp_path / "one.txt"
    lengths = []
    for text in ("before", "and after"):
        file.write_text(text)
        lengths.append(load(config("text", path=str(file)), BytesTokenizer()).lengths.tolist())
    assert lengths == [[7], [10]]


@pytest.fixture(params=["jsonl", "parquet"])
def rows(request, tmp_path):
    """A file of two rows of text and one without, of the format that is its first part."""
    texts = ["alpha", None, "beta"]
    if request.param == "jsonl":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": t, "id": 1}) + "\n" for t in texts))
    else:
        pa.parquet.write_table(pa.table({"body": texts, "id": [1, 2, 3]}), tmp_path / "rows.parquet")
    return request.param, str(tmp_path / f"rows.{request.param}")


def test_rows_are_documents(rows):
    source, path = rows
    dataset = load(config(source, path=path, column="body"), BytesTokenizer())
    assert dataset.lengths.tolist() == [6, 5]
    assert epoch_tokens(dataset, 0)[:5] in ([EOS, *b"alph"], [EOS, *b"beta"])


def test_part_of_a_split(rows):
    source, path = rows
    assert load(config(source, path=path, column="body", split="train[:1]"), BytesTokenizer()).lengths.tolist() == [6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column": "text"}, "no column 'text': set data.column to one of body, id"),
        ({"column": "id"}, "column 'id' contains (Value.*|1), but text"),
        ({"column": "body", "split": "test"}, "cannot be read: .*test"),
    ],
    ids=["missing", "numbers", "split"],
)
def test_rows_that_cannot_serve(rows, changes, message):
    source, path = rows
    assert_one_line_error(config(source, path=path, **changes), message)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_no_file(source, tmp_path):
    assert_one_line_error(config(source, path=f"{tmp_path}/*.none"), "matches no file")
    assert_one_line_error(config(source, path=str(tmp_path)), "is a folder")
    assert_one_line_error(config(source), "requires data.path")


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_unreadable_file(source, tmp_path):
    (tmp_path / "broken").write_bytes(b"\xff\xfe{ no such format")
    assert_one_line_error(config(source, path=str(tmp_path / "broken")), "cannot be read: .*check the file")


def test_no_text_at_all(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert_one_line_error(config("text", path=str(tmp_path / "empty.txt")), "contains no text")


def test_unknown_source():
    assert_one_line_error(config("web"), "data.source=web is unknown")


def test_hub_out_of_reach(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert_one_line_error(config("hub", path="someone/no-such-corpus"), "cannot be read: .*check the name, the split and")


@pytest.mark.parametrize("path", [None, "pandas", "a/b/c", "https://host/file"], ids=str)
def test_hub_takes_names_of_datasets_alone(path):
    assert_one_line_error(config("hub", path=path), "owner/name")


def test_hub_takes_no_local_directory(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(config("hub", path="owner/name"), "owner/name")


def assert_one_line_error(config: DataConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(config, BytesTokenizer())
    assert "\n" not in str(error.value)


def test_rank_zero_tokenises_and_the_others_find_it(tmp_path):
    (tmp_path / "one.txt").write_text("some text")
    run_ranks(_load_on_a_rank, 2, tmp_path / "ranks", tmp_path)
    assert sorted(path.name for path in tmp_path.glob("tokenised_by_*")) == ["tokenised_by_0"]


def _load_on_a_rank(directory) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    encode = BytesTokenizer.encode

    def note(self, text):
        (directory / f"tokenised_by_{dist.get_rank()}").touch()
        return encode(self, text)

    BytesTokenizer.encode = note
    assert load(config("text", path=str(directory / "one.txt")), BytesTokenizer()).lengths.tolist() == [10]


def test_another_order_is_another_corpus():
    orders = [[1], [2, 3]], [[2, 3], [1]]
    first, second = (trainer_module.corpus_fingerprint(SimpleNamespace(data=pack(order, 1))) for order in orders)
    assert first != second


def test_an_empty_file_of_rows_holds_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert_one_line_error(config("jsonl", path=str(tmp_path / "a.jsonl")), "there is no text in it")


def test_files_may_differ_in_other_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b", "meta": {"n": 1}}\n\n')
    (tmp_path / "b.jsonl").write_text('{"other": [1, 2], "text": "four"}\n{"text": null, "meta": "x"}\n')
    pa.parquet.write_table(pa.table({"text": ["ab"], "n": [1]}), tmp_path / "a.parquet")
    pa.parquet.write_table(pa.table({"m": ["x"], "text": ["four"], "n": ["x"]}), tmp_path / "b.parquet")
    for source, lengths in (("jsonl", [6, 5]), ("parquet", [3, 5])):
        dataset = load(config(source, path=f"{tmp_path}/*.{source}"), BytesTokenizer())
        assert dataset.lengths.tolist() == lengths


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "the line .* is not valid JSON"),
        ("[1]", "is not a JSON object"),
        ('{"body": "a"}', "no column 'text': set data.column to one of body"),
        ('{"text": ["a"]}', "column 'text' contains .'a'., but text"),
    ],
    ids=["cut", "list", "other column", "no text"],
)
def test_a_line_that_cannot_serve(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n' + line + "\n")
    assert_one_line_error(config("jsonl", path=str(tmp_path / "a.jsonl")), message)


def test_a_parquet_file_without_the_column_is_named(tmp_path):
    pa.parquet.write_table(pa.table({"text": ["ab"]}), tmp_path / "a.parquet")
    pa.parquet.write_table(pa.table({"body": ["ab"]}), tmp_path / "b.parquet")
    assert_one_line_error(config("parquet", path=f"{tmp_path}/*.parquet"), "b.parquet has no column 'text': .* body")
