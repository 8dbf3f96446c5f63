"""The accuracy by length and depth: which answers count, and that it does not depend on the ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn.train import setup as run_setup
from ringattn.train.data.needle import NeedleDocuments
from ringattn.train.inference import recall
from ringattn.train.inference.needle import evaluate_needle
from ringattn.train.model.loss import IGNORE
from ringattn.train.settings.config import with_settings
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.launch import write_corpus
from tests.train.parallel.test_equivalence import prepare


def accuracies(directory: Path, corpus: str, dp: int, ring: int, answers: str) -> dict:
    """Return the accuracies of a random model. With `answers="own"`, its own answers are expected, except one token at 60%."""
    prepare(directory)
    config = with_settings(job(corpus, dp, ring=ring), {"trainer.batch_size": 2, "trainer.eval_tokens": 1, "data.seq_len": 300})
    run = run_setup.build(config)
    documents = NeedleDocuments.of("needle", run.data, run.tokenizer, config.data)
    if answers == "own":
        expect_own_answers(run, documents)
    return evaluate_needle(run, documents, [200, 300])


def expect_own_answers(run, documents) -> None:
    """Replace the label of every answer token by the most likely token, except for one token at depth 3."""
    forward = recall.forward

    def forward_with_own_labels(run, batch, masks, layout, loss_fn):
        best = forward(
            run, batch, masks, layout, lambda hidden, head, labels: (hidden @ head[: run.tokenizer.vocab_size].T).argmax(-1)
        )
        rank = run.mesh.sequence.get_local_rank()
        whole = torch.zeros_like(batch.labels)
        whole[:, layout.positions(rank)] = best
        dist.all_reduce(whole, group=run.mesh.sequence.get_group())
        is_answer = batch.labels != IGNORE
        batch.labels[is_answer] = whole[is_answer]
        for row, number in enumerate(documents.numbers):
            if number % 6 == 3:
                batch.labels[row, is_answer[row].nonzero()[0]] += 1
        return forward(run, batch, masks, layout, loss_fn)

    recall.forward = forward_with_own_labels
    create = documents.batch

    def batch(length, numbers):
        object.__setattr__(documents, "numbers", list(numbers))
        return create(length, numbers)

    object.__setattr__(documents, "batch", batch)


def write(directory: Path, corpus: str) -> None:
    result = accuracies(directory, corpus, 2, 2, "own")
    if dist.get_rank() == 0:
        torch.save(result, directory / "result.pt")


@pytest.fixture
def corpus(tmp_path) -> str:
    return write_corpus(tmp_path / "corpus")


EXPECTED = {(length, depth): float(depth != 60) for length in (200, 300) for depth in (0, 20, 40, 60, 80, 100)}


def test_an_answer_counts_if_all_its_tokens_are_the_most_likely(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "forward", recall.forward)
    with one_rank():
        assert accuracies(tmp_path, corpus, 1, 1, "own") == EXPECTED
        monkeypatch.undo()
        assert set(accuracies(tmp_path, corpus, 1, 1, "true").values()) == {0.0}, "a random model does not know the answers"


@pytest.mark.slow
def test_accuracies_do_not_depend_on_the_ranks(corpus, tmp_path):
    run_ranks(write, 4, tmp_path / "store", tmp_path, corpus)
    assert torch.load(tmp_path / "result.pt") == EXPECTED
