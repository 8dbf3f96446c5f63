"""Tests of the loss on held-out text: it equals that of plain PyTorch, overall and by context length."""

from pathlib import Path

import datasets
import pytest
import torch
import torch.nn.functional as F

from ringattn import Layout, Mask
from ringattn.train import evaluate
from ringattn.train import setup as run_setup
from ringattn.train.config import Config
from ringattn.train.data.packing import Batch
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.launch import write_corpus
from tests.train.plain import dense_mask, plain_attention

WINDOW = 40


@pytest.fixture
def config(corpus, monkeypatch) -> Config:
    """A run on one rank, in whose evaluation of five sequences the last batch has one sequence."""
    monkeypatch.setattr(evaluate, "SHORTEST_CONTEXT", 8)
    config = job(corpus, 1)
    config.trainer.batch_size = 2
    return config


def plain_losses(run: run_setup.Run, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every token of a held-out sequence, computed with PyTorch's attention, and its context length."""
    tokens, labels, documents = run.held_out.sequence(number)
    mask = Mask.causal(WINDOW, [documents])

    def loss_fn(hidden, head):
        return F.cross_entropy((hidden @ head[:257].T)[0], torch.from_numpy(labels), reduction="none")

    with torch.no_grad():
        losses = run.model(torch.from_numpy(tokens)[None], torch.arange(61), plain_attention(mask), loss_fn)
    return losses, dense_mask(mask, 61)[0, 0].sum(-1) - 1


@pytest.mark.parametrize(
    "wanted", [pytest.param(5, id="five sequences"), pytest.param(1000, id="all sequences", marks=pytest.mark.slow)]
)
def test_losses_equal_those_of_plain_pytorch(wanted, config):
    config.trainer.eval_tokens = 61 * wanted - 60  # This includes one token of the last sequence, so all of it is evaluated.
    with one_rank():
        run = run_setup.build(config)
        total = run.held_out.sequences_per_epoch
        count = min(wanted, total)
        assert count % 2 == 1
        result = evaluate.evaluate(run)
        # The evaluated sequences are spread evenly over the held-out text.
        sequences = (plain_losses(run, i * total // count) for i in range(count))
        losses, context = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    expected = {"eval_loss": losses.mean().item()}
    for start, stop in ((0, 8), (8, 16), (16, 32), (32, 64)):
        expected[f"eval_loss/{start}"] = losses[(context >= start) & (context < stop)].mean().item()
    assert result == pytest.approx(expected, rel=1e-5)


def test_tokens_are_grouped_by_context_length():
    documents = ((200, 312), (512,))
    batch = Batch(torch.zeros(2, 512), torch.zeros(2, 512), documents)
    starts = evaluate.context_groups(512)
    assert starts == [0, 128, 256]
    first, second = evaluate.group_by_context(batch, Mask.causal(documents=documents), starts)
    assert first.bincount().tolist() == [128 + 128, 72 + 128, 56] and first[199] == 1 and first[200] == 0
    assert second.tolist() == [0] * 128 + [1] * 128 + [2] * 256
    assert evaluate.group_by_context(batch, Mask.causal(window=100), starts).max() == 0
    assert evaluate.context_groups(128) == evaluate.context_groups(1) == [0]


@pytest.mark.slow
def test_group_without_tokens_is_left_out(config):
    config.model.window, config.trainer.eval_tokens = 16, 1
    with one_rank():
        assert list(evaluate.evaluate(run_setup.build(config))) == ["eval_loss", "eval_loss/0", "eval_loss/8"]


@pytest.mark.slow
def test_evaluation_works_if_a_rank_has_no_tokens(tmp_path):
    """With the zigzag layout, one of four ranks has none of five tokens."""
    run_ranks(evaluate_five_tokens, 4, tmp_path / "store", write_corpus(tmp_path / "corpus"), tmp_path)


def evaluate_five_tokens(corpus: str, directory: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    config = job(corpus, 1, ring=4, layout="zigzag")
    config.data.seq_len, config.trainer.eval_tokens = 5, 1
    assert min(Layout.zigzag(5, 4).rows(rank) for rank in range(4)) == 0
    assert list(evaluate.evaluate(run_setup.build(config))) == ["eval_loss", "eval_loss/0"]
