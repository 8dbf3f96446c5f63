"""Tokenised documents and the sequences that they are packed into."""

import importlib
import linecache
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import datasets.config
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringattn.train.data import packing, sources, tokenisation, tokenizer
from ringattn.train.data.best_fit import BestFitDataset
from ringattn.train.data.packing import PackedDataset, load, load_held_out, split_documents
from ringattn.train.data.shards import Documents
from ringattn.train.data.tokenizer import BytesTokenizer, JsonTokenizer, load_tokenizer
from ringattn.train.settings.config import ConfigError, DataConfig
from tests.distributed import run_ranks
from tests.train.data.rows import Rows
from tests.train.hub_models import write_tokenizer

EOS = 256
corpora = st.lists(st.lists(st.integers(0, 255), max_size=20), min_size=1, max_size=12)


def pack(documents: list[list[int]], seq_len: int, seed: int = 0, shuffle: bool = False, group_size: int = 1) -> PackedDataset:
    """Pack `documents`, which are given without their EOS."""
    rows = Rows([[EOS, *document] for document in documents])
    return PackedDataset(Documents.of(rows), seq_len, seed, shuffle, group_size)


def num_tokens(corpus: list[list[int]]) -> int:
    return sum(len(document) + 1 for document in corpus)


def epoch_tokens(dataset: PackedDataset, epoch: int) -> list[int]:
    count = dataset.sequences_per_epoch
    return dataset.batch(range(epoch * count, (epoch + 1) * count)).tokens.flatten().tolist()


@settings(max_examples=40)
@given(corpora, st.integers(1, 30), st.integers(0, 3), st.integers(0, 2))
def test_an_epoch_contains_every_document_and_every_sequence_once(corpus, seq_len, seed, epoch):
    """The tokens and labels of an epoch are slices of its documents, joined in the order of the epoch."""
    assume(num_tokens(corpus) > seq_len)
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
    """Without the random order of sequences, the entries of a batch would be neighbours in the stream."""
    documents = [list(range(100 * i, 100 * i + 99)) for i in range(1, 6)]
    orders = [pack(documents, 10, seed, shuffle=True)._order_of(epoch)[2] for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all((np.diff(order) == 1).sum() < 5 for order in orders)
    assert (np.diff(pack(documents, 10)._order_of(0)[2]) == 1).all()


@settings(max_examples=40)
@given(corpora, st.integers(1, 30))
def test_lengths_of_documents_agree_with_the_positions_of_eos(corpus, seq_len):
    assume(num_tokens(corpus) > seq_len)
    dataset = pack(corpus, seq_len)
    batch = dataset.batch(range(2 * dataset.sequences_per_epoch))
    for tokens, lengths in zip(batch.tokens.tolist(), batch.documents, strict=True):
        assert sum(lengths) == seq_len
        starts = [0] + [i for i, token in enumerate(tokens) if token == EOS and i > 0]
        assert lengths == tuple(np.diff([*starts, seq_len]).tolist())


@settings(max_examples=30)
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


def test_labels_are_the_next_tokens():
    batch = pack([[1, 2, 3, 4, 5, 6, 7]], 3).batch([0, 1])
    assert batch.tokens.tolist() == [[EOS, 1, 2], [3, 4, 5]]
    assert batch.labels.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch.documents == ((3,), (3,))
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64


def test_epochs_and_seeds_have_different_orders():
    corpus = [[value] for value in range(50)]
    orders = [epoch_tokens(pack(corpus, 1, seed), epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_is_the_same_on_every_machine():
    order, _, sequences = pack([[value] for value in range(8)], 1, seed=3, shuffle=True)._order_of(1)
    assert order.tolist() == [7, 3, 5, 6, 4, 0, 2, 1]
    assert sequences.tolist() == [1, 0, 11, 13, 4, 6, 7, 14, 10, 9, 5, 2, 8, 3, 12]


@settings(max_examples=40)
@given(corpora, st.integers(1, 30), st.integers(1, 9), st.integers(0, 2))
def test_an_epoch_in_groups_contains_every_sequence_except_the_last_ones(corpus, seq_len, group_size, epoch):
    """If an epoch does not fill a group, it has no groups."""
    assume(num_tokens(corpus) > seq_len)
    dataset, ungrouped = (pack(corpus, seq_len, shuffle=True, group_size=size) for size in (group_size, 1))
    size = dataset.group_size
    assert size == (group_size if group_size <= ungrouped.sequences_per_epoch else 1)
    count = ungrouped.sequences_per_epoch // size * size
    assert dataset.sequences_per_epoch == count
    order, expected = (each._order_of(epoch)[2].tolist() for each in (dataset, ungrouped))
    assert sorted(order) == sorted(expected[:count])
    assert size > 1 or order == expected


def test_the_sequences_of_a_group_have_similar_costs_in_every_epoch():
    """The lengths have the distribution of many corpora: most documents are short, and most tokens are in long documents."""
    lengths = np.random.RandomState(0).lognormal(4.5, 1.5, 2000).astype(int)

    def mean_excess(group_size: int) -> float:
        """The mean of (largest cost in a group of eight) / (mean cost) - 1 over two epochs."""
        dataset = pack([[1] * length for length in lengths], 512, shuffle=True, group_size=group_size)
        batch = dataset.batch(range(2 * dataset.sequences_per_epoch // 8 * 8))
        costs = np.array([sum(length**2 for length in documents) for documents in batch.documents]).reshape(-1, 8)
        return costs.max(axis=1).mean() / costs.mean() - 1

    excess, ungrouped = mean_excess(8), mean_excess(1)
    assert ungrouped > 0.4, (excess, ungrouped)
    assert excess < 0.03 * ungrouped, (excess, ungrouped)


def test_groups_are_in_a_random_order_that_is_the_same_on_every_machine():
    dataset = pack([[value] * value for value in range(8)], 3, seed=3, shuffle=True, group_size=2)
    assert dataset._order_of(1)[2].tolist() == [10, 2, 0, 4, 6, 7, 9, 5, 8, 1]


def test_groups_are_part_of_the_fingerprint():
    corpus = [[value] for value in range(20)]
    fingerprints = [pack(corpus, 4, shuffle=True, group_size=size).fingerprint for size in (1, 2, 3, 99)]
    assert [each["sequences"] for each in fingerprints] == [
        "shuffled",
        "shuffled in groups of 2",
        "shuffled in groups of 3",
        "shuffled",
    ]


def test_a_corpus_must_fill_one_sequence():
    assert pack([[1, 2, 3]], 3).sequences_per_epoch == 1
    with pytest.raises(ConfigError, match=r"4 tokens, but data\.seq_len=4 requires 5"):
        pack([[1, 2, 3]], 4)


def test_the_checksum_of_samples_identifies_the_text():
    corpus = [[value] for value in range(100)]
    assert pack(corpus, 1).sampled == pack(corpus, 5, seed=3).sampled
    assert pack(corpus, 1).sampled != pack([[0], *corpus[:-1]], 1).sampled


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_a_change_of_any_document_changes_the_fingerprint(fraction):
    """This holds even if `sampled` does not read the document, or part of it is held out."""
    documents = [[number, 1, 2] for number in range(200)]

    def training(corpus: list[list[int]]) -> PackedDataset:
        whole = Documents.of(Rows(corpus))
        return PackedDataset(split_documents(whole, fraction, 4)[0] if fraction else whole, 4, seed=0)

    before = training(documents)
    for number in before._documents.numbers.tolist():
        after = training([*documents[:number], [number, 1, 3], *documents[number + 1 :]])
        assert after.fingerprint.pop("checksum") != before.fingerprint.pop("checksum")
        assert after.lengths.tolist() == before.lengths.tolist()


def test_documents_in_another_order_are_another_corpus():
    first, second = (pack(corpus, 1) for corpus in ([[1], [2, 3]], [[2, 3], [1]]))
    assert first.fingerprint != second.fingerprint


def write_text(tmp_path: Path, text: str = "text", name: str = "one.txt") -> DataConfig:
    """The settings of a corpus of one document."""
    (tmp_path / name).write_text(text)
    return DataConfig(source="text", path=str(tmp_path / name), seq_len=4, eval_fraction=0.0)


def test_a_corpus_is_tokenised_once(tmp_path, monkeypatch):
    corpus = write_text(tmp_path)
    first = load(corpus, BytesTokenizer())
    monkeypatch.setattr(BytesTokenizer, "encode", pytest.fail)
    assert torch.equal(first.batch([0]).tokens, load(corpus, BytesTokenizer()).batch([0]).tokens)


def test_special_tokens_are_cached_separately_and_warned_of_once(tmp_path, monkeypatch, caplog):
    """The warning must not change the key of the cache."""
    monkeypatch.setattr(tokenizer, "_warned", set())
    path = str(write_tokenizer(tmp_path, adds_bos=False))
    corpora = [write_text(tmp_path, f"def <|end_of_text|>{suffix}", f"{suffix}.txt") for suffix in "bc"]
    tokens = [[load(each, load_tokenizer(path, None, mode)).sampled for each in corpora] for mode in ("text", "parse", "text")]
    assert tokens[0] != tokens[1]
    assert tokens[0] == tokens[2]
    assert len(caplog.messages) == 1
    assert "<|end_of_text|>, the name of a special token" in caplog.text
    monkeypatch.setattr(JsonTokenizer, "encode", pytest.fail)
    assert [load(each, load_tokenizer(path)).sampled for each in corpora] == tokens[0]


@pytest.mark.slow
def test_the_standard_library_is_a_corpus():
    corpus = load(DataConfig(eval_fraction=0.0), BytesTokenizer())
    assert corpus.tokens_per_epoch > 5_000_000
    assert len(corpus.lengths) > 300
    assert "import" in BytesTokenizer().decode(corpus.batch(range(50)).tokens.flatten().tolist())


def test_a_file_that_changed_is_read_again(tmp_path):
    lengths = [load(write_text(tmp_path, text), BytesTokenizer()).lengths.tolist() for text in ("before", "and after")]
    assert lengths == [[7], [10]]


TOKENIZER = """
import numpy as np

class Letters:
    vocab_size, eos, bos, fingerprint = 257, {eos}, {eos}, 0

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)
"""


def test_a_tokenizer_that_changed_tokenises_the_text_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    # Python would not notice that the module changed, because both versions are written within one second.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    corpus, first_tokens = write_text(tmp_path), []
    for eos in (255, 256):
        (tmp_path / "letters.py").write_text(TOKENIZER.format(eos=eos))
        monkeypatch.delitem(sys.modules, "letters", raising=False)
        linecache.clearcache()
        importlib.invalidate_caches()
        tokenizer = importlib.import_module("letters").Letters()
        first_tokens.append(int(load(corpus, tokenizer).batch([0]).tokens[0, 0]))
    assert first_tokens == [255, 256]


def test_a_document_has_bos_and_eos_if_the_tokenizer_has_both(tmp_path):
    tokenizer = BytesTokenizer()
    tokenizer.bos = 255
    batch = load(write_text(tmp_path), tokenizer).batch([0])
    assert batch.tokens.tolist() == [[255, *b"tex"]]
    assert tokenisation.tokenise_text("ab", tokenizer).tolist() == [255, *b"ab", EOS]


def test_packing_code_that_changed_tokenises_the_text_again(tmp_path, monkeypatch):
    corpus = write_text(tmp_path)
    assert load(corpus, BytesTokenizer()).batch([0]).tokens.tolist() == [[EOS, *b"tex"]]

    def append_eos(text, tokenizer):
        return np.append(tokenizer.encode(text), tokenizer.eos)

    monkeypatch.setattr(tokenisation, "tokenise_text", append_eos)
    assert load(corpus, BytesTokenizer()).batch([0]).tokens.tolist() == [[*b"text"]]


def test_a_corpus_without_text_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="contains no text"):
        load(write_text(tmp_path, ""), BytesTokenizer())


def test_other_ranks_find_the_tokens_of_rank_0(tmp_path):
    run_ranks(_load_on_a_rank, 2, tmp_path / "ranks", write_text(tmp_path, "some text"), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("tokenised_by_*")) == ["tokenised_by_0"]


def test_a_killed_tokenisation_continues(tmp_path, monkeypatch):
    """The cache has files of one document. The process is killed while it tokenises the next document."""
    corpus = write_lines(tmp_path, eval_fraction=0.0)
    monkeypatch.setattr(tokenisation, "SHARD_TOKENS", 7)
    encode, folder = BytesTokenizer.encode, Path(datasets.config.HF_DATASETS_CACHE) / "ringattn"
    for killed_at in ("line 4", "line 9", None):
        encoded = []

        def record(self: BytesTokenizer, text: str, killed_at=killed_at, encoded=encoded) -> np.ndarray:
            if text == killed_at:
                next(folder.glob("*/.lock")).with_name("x.partial").touch()  # a kill leaves the file that is being written
                raise KeyboardInterrupt
            encoded.append(text)
            return encode(self, text)

        monkeypatch.setattr(BytesTokenizer, "encode", record)
        with pytest.raises(KeyboardInterrupt) if killed_at else nullcontext():
            documents = packing.load_documents(corpus, BytesTokenizer())
    assert encoded == ["line 9"]
    assert not list(folder.rglob("*.partial"))
    texts = [bytes(tokens[1:].astype(np.uint8)).decode() for tokens in map(documents.__getitem__, range(10))]
    assert texts == [f"line {i}" for i in range(10)]
    assert documents.splits == {"train": 10}


def test_other_ranks_wait_for_the_first_rank_of_their_host(tmp_path):
    run_ranks(_prepare_on_two_hosts, 4, tmp_path / "ranks", tmp_path)


def _prepare_on_two_hosts(directory: Path) -> None:
    host, local_rank = divmod(dist.get_rank(), 2)
    os.environ["LOCAL_RANK"] = str(local_rank)

    def prepare() -> str:
        assert local_rank == 0
        time.sleep(0.3 * host)
        (directory / f"host{host}").touch()
        return f"result of host {host}"

    assert packing._once_per_host(prepare) == f"result of host {host}"
    assert (directory / f"host{host}").exists()

    def fail() -> str:
        assert local_rank == 0
        raise ConfigError("no such file")

    with pytest.raises(ConfigError, match="no such file"):
        packing._once_per_host(fail)


def _load_on_a_rank(corpus: DataConfig, directory: Path) -> None:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    encode = BytesTokenizer.encode

    def record_rank(self: BytesTokenizer, text: str) -> np.ndarray:
        (directory / f"tokenised_by_{dist.get_rank()}").touch()
        return encode(self, text)

    BytesTokenizer.encode = record_rank
    assert load(corpus, BytesTokenizer()).lengths.tolist() == [10]


def write_lines(tmp_path: Path, **settings: object) -> DataConfig:
    """The settings of a corpus of ten documents."""
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "line {i}"}}\n' for i in range(10)))
    return DataConfig(source="jsonl", path=str(tmp_path / "lines.jsonl"), seq_len=4, **settings)


def test_held_out_text_is_another_part_of_the_source(tmp_path):
    config = write_lines(tmp_path, split="train[:80%]", eval_split="train[80%:]")
    held_out = load_held_out(config, BytesTokenizer(), load(config, BytesTokenizer()))
    assert len(held_out.lengths) == 2
    assert not held_out.shuffle


@pytest.mark.parametrize(
    ("lengths", "fraction", "eval_tokens"),
    [([10] * 100, 0.01, 10), ([10] * 100, 0.25, 250), ([1000], 0.01, 10), ([3, 500, 4], 0.001, 5), ([5, 5], 0.01, 5)],
)
def test_every_token_is_either_trained_on_or_held_out(lengths, fraction, eval_tokens):
    """With sequences of four tokens, at least five tokens are held out, because the last token of a sequence has a label."""
    starts = np.cumsum([0, *lengths])
    rows = Rows([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)])
    parts = split_documents(Documents.of(rows), fraction, seq_len=4)
    tokens = [np.concatenate([part[i] for i in range(len(part))]) for part in parts]
    assert len(tokens[1]) == eval_tokens
    assert np.array_equal(np.sort(np.concatenate(tokens)), np.arange(sum(lengths)))
    assert all(part.lengths.tolist() == [len(part[i]) for i in range(len(part))] for part in parts)
    assert all(PackedDataset(part, 4, seed=0).sequences_per_epoch >= 1 for part in parts)


@pytest.mark.parametrize("packed", [PackedDataset, BestFitDataset])
def test_the_label_after_a_document_is_eos_although_a_part_begins_later(packed):
    rows = Rows([[EOS, *range(10 * i + 1, 10 * i + 9)] for i in range(6)])
    training, _ = split_documents(Documents.of(rows), 0.25, seq_len=4)
    assert training[len(training) - 1][0] != EOS, "the last document of the training is a part of a document"
    for seed in range(8):
        dataset = packed(training, 4, seed)
        tokens, labels, _ = zip(*map(dataset.sequence, range(dataset.sequences_per_epoch)), strict=True)
        ends = np.concatenate(tokens) % 10 == 8
        assert set(np.concatenate(labels)[ends]) == {EOS}


def test_a_part_of_the_text_is_held_out_by_default(tmp_path):
    config = write_lines(tmp_path)
    training = load(config, BytesTokenizer())
    held_out = load_held_out(config, BytesTokenizer(), training)
    assert (training.tokens_per_epoch, held_out.tokens_per_epoch) == (65, 5)
    assert held_out.beginning(3) == list(b"lin")
    assert not held_out.shuffle


def test_text_that_is_too_short_to_hold_out_a_part_is_an_error(tmp_path):
    config = replace(write_lines(tmp_path), seq_len=35)
    with pytest.raises(ConfigError, match=r"70 tokens.*requires 72.*data\.eval_fraction=0"):
        load(config, BytesTokenizer())
    assert load(replace(config, eval_fraction=0.0), BytesTokenizer()).sequences_per_epoch == 1


def test_a_run_may_have_no_held_out_text(tmp_path):
    config = write_lines(tmp_path, eval_fraction=0.0)
    assert load_held_out(config, BytesTokenizer(), load(config, BytesTokenizer())) is None


def test_held_out_text_must_not_be_trained_on(tmp_path):
    config = write_lines(tmp_path, split="train[:80%]", eval_split="train[70%:]")
    with pytest.raises(ConfigError, match=r"contains some of the held-out text, data.eval_split=train\[70%:\]"):
        load_held_out(config, BytesTokenizer(), load(config, BytesTokenizer()))


def test_an_error_of_held_out_text_names_its_settings(tmp_path):
    config = write_lines(tmp_path, eval_path="/missing")
    with pytest.raises(ConfigError, match=r"held-out text: data\.eval_path=/missing matches no file"):
        load_held_out(config, BytesTokenizer(), load(config, BytesTokenizer()))


def test_a_checksum_of_the_code_covers_everything_that_makes_tokens():
    code = tokenisation.code(BytesTokenizer())
    for function in (tokenisation.tokenise_text, sources._json_text, BytesTokenizer.encode):
        assert f"def {function.__name__}(" in code
