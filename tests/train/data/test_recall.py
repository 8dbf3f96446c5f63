"""Generated sequences of the recall task: every answer is where the task says, and no other token tells anything about it."""

import zlib

import numpy as np
import pytest

from ringattn.train.data import recall
from ringattn.train.data.packing import load, load_held_out
from ringattn.train.data.recall import (
    BLOCK,
    FIRST_FILLER,
    FIRST_KEY,
    FIRST_VALUE,
    NUM_POSITIONS,
    RecallDataset,
    document_lengths,
    evaluation_lengths,
    grid_batch,
)
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.model.loss import IGNORE
from ringattn.train.settings.config import RANGES, ConfigError, DataConfig


def check_document(tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Check one document of the task, and return the distance of each answer from its query."""
    (queries,) = np.nonzero(labels != IGNORE)
    block = min(len(tokens) // 4 * 2, BLOCK)
    assert len(queries) == block // 2
    assert queries.min() >= len(tokens) - block
    assert (labels[queries] == tokens[queries + 1]).all(), "a label is the next token"
    keys, values = tokens[queries] - FIRST_KEY, labels[queries] - FIRST_VALUE
    assert ((keys >= 0) & (keys < 16)).all()
    assert ((values >= 0) & (values < 12)).all()
    (facts,) = np.nonzero(tokens < FIRST_KEY)
    assert len(facts) == len(queries) == len(set(keys)), "each key has one fact and one query"
    position = {tokens[fact] // 12: fact for fact in facts}
    distances = []
    for query, key, value in zip(queries, keys, values, strict=True):
        assert tokens[position[key]] % 12 == value
        distances.append(query - position[key])
    others = np.setdiff1d(np.arange(len(tokens)), np.concatenate([facts, queries, queries + 1]))
    assert (tokens[others] >= FIRST_FILLER).all()
    assert tokens.max() < 256
    return np.array(distances)


@pytest.mark.parametrize("seq_len", [64, 333, 1200])
def test_every_answer_follows_its_key_earlier_in_the_document(seq_len):
    dataset = RecallDataset(seq_len, seed=3)
    lengths = set()
    for index in range(80):
        tokens, labels, documents = dataset.sequence(index)
        assert sum(documents) == len(tokens) == len(labels) == seq_len
        assert tokens.dtype == labels.dtype == np.int64
        assert tokens.min() >= 0
        assert tokens.max() < recall.VOCABULARY
        lengths.add(documents[0])
        start = 0
        for length in documents:
            if length == documents[0]:
                check_document(tokens[start : start + length], labels[start : start + length])
            else:
                assert (labels[start:] == IGNORE).all()
                assert (tokens[start:] >= FIRST_FILLER).all()
            start += length
    assert lengths == set(document_lengths(seq_len))


def test_documents_are_halves_of_the_sequence():
    assert document_lengths(200) == [200, 100, 50, 25, 12, 6]
    assert evaluation_lengths(200) == [200, 100]
    assert document_lengths(4) == evaluation_lengths(4) == [4]
    assert document_lengths(3) == evaluation_lengths(3) == []


def test_positions_of_the_grid_are_spread_evenly():
    """Number 11 has the same position as number 0, but another document."""
    batch, positions = grid_batch(3000, range(NUM_POSITIONS + 1))
    assert positions.tolist() == [*range(NUM_POSITIONS), 0]
    assert batch.documents == ((3000,),) * (NUM_POSITIONS + 1)
    free = 3000 - 2 * BLOCK
    for tokens, labels, position in zip(batch.tokens.numpy(), batch.labels.numpy(), positions.tolist(), strict=True):
        distances = check_document(tokens, labels)
        (facts,) = np.nonzero(tokens < FIRST_KEY)
        start = position * free // (NUM_POSITIONS - 1)
        assert start <= facts.min()
        assert facts.max() < start + BLOCK
        assert distances.min() > free - start
    assert not (batch.tokens[0] == batch.tokens[-1]).all()


def test_a_sequence_depends_only_on_the_seed_and_its_number():
    batch = RecallDataset(1024, seed=5).batch([7, 0, 3])
    for row, index in enumerate([7, 0, 3]):
        tokens, labels, documents = RecallDataset(1024, seed=5).sequence(index)
        assert (batch.tokens[row].numpy() == tokens).all()
        assert (batch.labels[row].numpy() == labels).all()
        assert batch.documents[row] == documents
    others = [(6, 7), (5, 8)]
    assert all(not (RecallDataset(1024, seed).sequence(index)[0] == batch.tokens[0].numpy()).all() for seed, index in others)


def test_sequences_are_the_same_in_every_release():
    """A resumed run continues with the same sequences, on any machine and with any release of numpy."""
    tokens, labels, documents = RecallDataset(1200, seed=1).sequence(2**31)
    assert (zlib.crc32(tokens.tobytes()), zlib.crc32(labels.tobytes()), documents) == PINNED


PINNED = (2301551158, 1298439658, (300, 300, 300, 300))


def test_values_can_only_be_guessed():
    """No value is frequent, and the values of a document do not depend on each other or on the key."""
    dataset = RecallDataset(64, seed=0)
    values = []
    for index in range(2000):
        tokens, labels, documents = dataset.sequence(index)
        if documents == (64,):
            (queries,) = np.nonzero(labels != IGNORE)
            values.append(labels[queries][np.argsort(tokens[queries])] - FIRST_VALUE)
    values = np.array(values)
    mean = values.size / 12
    counts = np.bincount(values.ravel(), minlength=12)
    # The standard deviation of each count is about 25, and there are about 670 values of each kind.
    assert abs(counts - mean).max() < 120
    # The values of two keys are equal with a probability of 1/12.
    assert abs((values[:, 1:] == values[:, :-1]).mean() - 1 / 12) < 0.02
    assert abs(values.mean(0) - 5.5).max() < 1


def test_no_run_is_trained_on_the_sequences_for_evaluation():
    config = DataConfig(source="recall", seed=RANGES["data.seed"][1])
    training = load(config, BytesTokenizer())
    held_out = load_held_out(config, BytesTokenizer(), training)
    seeds = {training.fingerprint["seed"], held_out.fingerprint["seed"], recall.EVALUATION_SEED}
    keys = [np.random.Philox(key=[seed, 3]).state["state"]["key"].tolist() for seed in sorted(seeds)]
    assert keys == [[config.seed, 3], [recall.EVALUATION_SEED, 3]]
    grid, _ = recall.grid_batch(config.seq_len, range(20))
    rows = [*grid.tokens.tolist(), *(each.sequence(i)[0].tolist() for each in (training, held_out) for i in range(20))]
    assert len({tuple(row) for row in rows}) == 60


def test_the_fingerprint_identifies_the_sequences():
    fingerprints = [RecallDataset(seq_len, seed).fingerprint for seq_len, seed in ((512, 0), (513, 0), (512, 1))]
    assert len({str(each) for each in fingerprints}) == 3
    assert fingerprints[0] == RecallDataset(512, 0).fingerprint


def test_short_sequences_and_small_vocabularies_are_errors():
    with pytest.raises(ConfigError, match=r"data\.seq_len=3 must be at least 4"):
        RecallDataset(3, 0)
    with pytest.raises(ConfigError, match=r"255 tokens.*256"):
        recall.check_vocabulary(255)
    recall.check_vocabulary(256)
