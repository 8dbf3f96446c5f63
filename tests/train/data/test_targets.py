"""Tests of the target tokens of an evaluation, and of the windows that give them their context."""

import numpy as np
import pytest

from ringattn.train.data import targets
from ringattn.train.data.packing import PackedDataset
from ringattn.train.data.recall import EVALUATION_SEED, RecallDataset
from ringattn.train.data.shards import Documents
from ringattn.train.data.targets import Passage, Targets, Window, pack, read_passages, split_passage
from ringattn.train.model.loss import IGNORE
from tests.train.data.rows import Rows

DOCUMENTS = [300, 1, 2, 40, 7, 500, 150]  # tokens per document, 1,000 in total


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks may have one token, so that the small text has many blocks."""
    monkeypatch.setattr(targets, "MIN_BLOCK", 1)


def held_out(seq_len: int) -> PackedDataset:
    """A text in which the number of a token is its position in the stream."""
    empty = Rows([[0] * length for length in DOCUMENTS])
    order = PackedDataset(Documents.of(empty), 1, seed=0, shuffle=False)._order_of(0)[0]
    rows, begin = [None] * len(order), 0
    for index in order:
        rows[index] = list(range(begin, begin + DOCUMENTS[index]))
        begin += DOCUMENTS[index]
    return PackedDataset(Documents.of(Rows(rows)), seq_len, seed=0, shuffle=False)


def contexts(eval_tokens: int, seq_len: int, length: int, mask_documents: bool) -> dict[int, int]:
    """The number of earlier tokens in the sequence of each target token, by the position of the target in the stream."""
    text = held_out(seq_len)
    chosen = Targets(text, seq_len, [length], eval_tokens, mask_documents)
    batch, groups = chosen.batch(range(chosen.num_sequences + 1))
    assert groups.unique(return_counts=True)[1].tolist()[:-1] == chosen.tokens.tolist()
    result = {}
    for tokens, labels, group, documents in zip(batch.tokens, batch.labels, groups, batch.documents, strict=True):
        begins = np.repeat(np.cumsum((0, *documents[:-1])), documents)
        assert len(tokens) == sum(documents) == seq_len
        assert all(documents)
        for row in np.flatnonzero(labels != IGNORE):
            position, context = int(tokens[row]), row - begins[row]
            assert position not in result, "each target token occurs once"
            assert labels[row] == position + 1
            assert tokens[row - context] == position - context
            assert group[row] < len(chosen.tokens)
            result[position] = int(context)
    return result


@pytest.mark.parametrize("mask_documents", [True, False])
@pytest.mark.parametrize("length", [1, 2, 9, 64, 200])
@pytest.mark.parametrize("eval_tokens", [1, 100, 990, 5000])
def test_target_tokens_do_not_depend_on_the_length(eval_tokens, length, mask_documents):
    """A target token has all earlier tokens of its document as context, or at least half of the length."""
    text = held_out(200)
    result, reference = (contexts(eval_tokens, *lengths, mask_documents) for lengths in ((200, length), (60, 60)))
    assert result.keys() == reference.keys()
    assert len(result) >= min(eval_tokens, 999)
    begins = np.sort(np.cumsum(np.asarray(text.lengths)[text._order_of(0)[0]]))
    for position, context in result.items():
        number = text.document_number(position)
        earlier = position - (int(begins[number - 1]) if number and mask_documents else 0)
        assert min(earlier, length // 2) <= context <= min(earlier, length - 1)


def test_target_tokens_are_spread_over_the_text():
    assert sorted(contexts(32, 100, 100, False)) == [(i + 1) * 999 // 32 - 1 for i in range(32)]


def test_windows_of_a_passage():
    """The documents begin at positions 0, 4 and 10, and the block at position 6. Each window ends after two target tokens."""
    documents = np.repeat([5, 6, 7], [4, 6, 10])
    passage = Passage(np.zeros(20), np.zeros(20), documents, first=6)
    assert list(split_passage(passage, 4, True)) == [
        (4, 6, 8),
        (6, 8, 10),
        (10, 10, 14),
        (12, 14, 16),
        (14, 16, 18),
        (16, 18, 20),
    ]
    assert list(split_passage(passage, 20, True)) == [(4, 6, 10), (10, 10, 20)]
    assert list(split_passage(passage, 20, False)) == [(0, 6, 20)]
    assert list(split_passage(passage, 1, True)) == [(i, i, i + 1) for i in range(6, 20)]


def test_windows_fill_sequences():
    windows = [Window(size, 0, 0, 0, 0, size) for size in (3, 8, 10, 2, 5, 5)]
    assert [[window.size for window in sequence] for sequence in pack(windows, 10)] == [[10], [8, 2], [5, 5], [3]]


def test_documents_are_counted_once():
    """A document is one unit of the bootstrap, even if it contains several blocks of target tokens."""
    chosen = Targets(held_out(100), 100, [50, 100], 320, mask_documents=True)
    assert chosen.tokens.sum() == 320
    assert len(chosen.tokens) <= len(DOCUMENTS)
    assert chosen.num_groups == 2 * len(chosen.tokens)


def test_checksum_identifies_the_target_tokens():
    same = {Targets(held_out(n), n, [n], 100, mask).checksum for n, mask in ((50, True), (100, False))}
    assert len(same | {Targets(held_out(50), 50, [50], 200, True).checksum}) == 2
    assert len(same) == 1


def test_blocks_of_the_recall_task_are_whole_sequences():
    text = RecallDataset(64, EVALUATION_SEED)
    passages = list(read_passages(text, 100, 64))
    assert [len(passage.tokens) for passage in passages] == [64, 64]
    assert {passage.first for passage in passages} == {0}
    chosen = Targets(text, 64, [64], 100, mask_documents=True)
    num_labels = sum(int((text.sequence(number)[1] != IGNORE).sum()) for number in range(2))
    batch, groups = chosen.batch(range(chosen.num_sequences))
    assert chosen.tokens.sum() == num_labels == int((groups < chosen.num_groups).sum()) == int((batch.labels != IGNORE).sum())


@pytest.mark.parametrize(("shortest", "eval_tokens", "blocks"), [(1, 100, 32), (10, 100, 10), (10, 5, 1), (10, 999, 1)])
def test_number_of_blocks(shortest, eval_tokens, blocks, monkeypatch):
    """If an evaluation has few target tokens, it processes at most one sequence per block."""
    monkeypatch.setattr(targets, "MIN_BLOCK", shortest)
    assert len(list(read_passages(held_out(300), eval_tokens, 300))) == blocks
    assert eval_tokens == 999 or Targets(held_out(300), 300, [300], eval_tokens, False).num_sequences <= blocks
