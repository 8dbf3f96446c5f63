"""Tests of best-fit packing: only long documents are cut, every token is read once, and positions can be resumed."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.train.data.best_fit import BestFitDataset, pack_best_fit
from ringattn.train.data.packing import PackedDataset
from ringattn.train.data.shards import Documents
from ringattn.train.model.loss import IGNORE
from tests.train.data.rows import Rows

BEGIN = 7
lengths_of_documents = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def rows_of(lengths: list[int]) -> list[list[int]]:
    """Document i contains BEGIN, and then 1000 * (i + 1) + 1, + 2, ..."""
    return [[BEGIN, *range(1000 * i + 1, 1000 * i + length)] for i, length in enumerate(lengths, 1)]


def corpus(lengths: list[int]) -> Documents:
    return Documents.of(Rows(rows_of(lengths)))


def parts_of(dataset: BestFitDataset | PackedDataset, epoch: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and the labels of all parts of documents in an epoch."""
    count, parts = dataset.sequences_per_epoch, []
    batch = dataset.batch(range(epoch * count, (epoch + 1) * count))
    for tokens, labels, documents in zip(batch.tokens.tolist(), batch.labels.tolist(), batch.documents, strict=True):
        assert sum(documents) == dataset.seq_len
        for end, length in zip(np.cumsum(documents).tolist(), documents, strict=True):
            parts.append((tokens[end - length : end], labels[end - length : end]))
    return [(tokens, labels) for tokens, labels in parts if set(labels) != {IGNORE} or set(tokens) != {0}]


@settings(max_examples=25, deadline=None)
@given(lengths_of_documents, st.integers(1, 30), st.integers(-1, 3), st.integers(0, 2))
def test_an_epoch_contains_every_piece_once(lengths: list[int], seq_len: int, seed: int, epoch: int) -> None:
    """A document is cut only after every `seq_len` tokens, and all tokens have a label."""
    dataset, expected = BestFitDataset(corpus(lengths), seq_len, seed), []
    for tokens in rows_of(lengths):
        labels = [*tokens[1:], BEGIN]
        expected += [(tokens[i : i + seq_len], labels[i : i + seq_len]) for i in range(0, len(tokens), seq_len)]
    assert sorted(parts_of(dataset, epoch)) == sorted(expected)
    assert dataset.padding == pytest.approx(1 - sum(lengths) / (dataset.sequences_per_epoch * seq_len))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_every_piece_goes_to_the_sequence_with_the_least_space_that_suffices(sizes: list[int]) -> None:
    """The pieces are packed from the longest to the shortest."""
    sequence, spaces = pack_best_fit(np.array(sizes), 20), dict[int, int]()
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        chosen, fitting = int(sequence[index]), [space for space in spaces.values() if space >= sizes[index]]
        assert spaces.get(chosen, 20) == min(fitting, default=20)
        assert (chosen in spaces) == bool(fitting)
        spaces[chosen] = spaces.get(chosen, 20) - sizes[index]
    assert sorted(spaces) == list(range(len(spaces)))


def test_sequences_depend_only_on_their_number() -> None:
    documents = corpus([3 + i % 47 for i in range(200)])
    first = BestFitDataset(documents, 20, seed=1, group_size=2)
    second = pickle.loads(pickle.dumps(BestFitDataset(documents, 20, seed=1, group_size=2)))
    second.sequence(5 * second.sequences_per_epoch)
    numbers = [0, 7, first.sequences_per_epoch + 3, 2]
    a, b = first.batch(numbers), second.batch(numbers)
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.labels, b.labels)
    assert a.documents == b.documents
    count = BestFitDataset(documents, 20, seed=1).sequences_per_epoch
    sizes = [BestFitDataset(documents, 20, 1, size).group_size for size in (1, 2, count, count + 1)]
    assert sizes == [1, 2, count, 1]  # A group cannot be larger than an epoch.
    assert first.fingerprint == second.fingerprint != BestFitDataset(documents, 20, seed=1).fingerprint
    orders = {tuple(BestFitDataset(documents, 20, seed)._order_of(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    costs = [[sum(n**2 for n in first.sequence(i)[2]) for i in range(j, j + 2)] for j in range(0, first.sequences_per_epoch, 2)]
    assert np.abs(np.diff(costs)).mean() < 10, "a group has similar costs"
