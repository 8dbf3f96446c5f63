"""Tests of the loss on held-out text: it equals that of plain PyTorch, and all lengths have the same target tokens."""

import re
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ringattn import Layout, Mask
from ringattn.train import setup as run_setup
from ringattn.train.checkpoint import progress
from ringattn.train.data import targets
from ringattn.train.inference import losses as evaluation
from ringattn.train.settings.config import Config, with_settings
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.launch import write_corpus
from tests.train.plain import plain_attention

WINDOW = 40


@pytest.fixture
def config(corpus) -> Config:
    """A run on one rank, in whose evaluation the last batch has fewer sequences than the other batches."""
    config = job(corpus, 1)
    config = with_settings(config, {"trainer.batch_size": 2})
    return config


def plain_loss(run: run_setup.Run, start: int, position: int) -> float:
    """The loss of one token of the held-out stream, computed with PyTorch's attention to the tokens from `start` on."""
    tokens, labels, _ = run.held_out.stream(start, position + 1)

    def loss_fn(hidden, head):
        return F.cross_entropy((hidden @ head[:257].T)[0, -1:], torch.from_numpy(labels)[-1:])

    with torch.no_grad():
        attend = plain_attention(Mask.causal(WINDOW))
        return run.model(torch.from_numpy(tokens)[None], torch.arange(len(tokens)), attend, loss_fn).item()


@pytest.mark.parametrize("mask_documents", [True, False])
def test_losses_equal_those_of_plain_pytorch(mask_documents, config, monkeypatch, caplog):
    """The blocks have one target token each, so each target token has all the context that the length allows."""
    monkeypatch.setattr(targets, "MIN_BLOCK", 1)
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)  # Otherwise, only long evaluations show their progress.
    caplog.set_level("INFO")
    config = with_settings(config, {"trainer.eval_tokens": 32, "data.mask_documents": mask_documents})
    with one_rank():
        run = run_setup.build(config)
        losses = evaluation.evaluate_lengths(run, [7, 61])
        assert re.search(r"^evaluated   held-out text: [\d,]+ tokens in ", "\n".join(caplog.messages), re.MULTILINE)
        total = run.held_out.tokens_per_epoch - 1
        positions = [(i + 1) * total // 32 - 1 for i in range(32)]
        ends = np.cumsum(run.held_out.lengths[run.held_out._order_of(0)[0]])
        for index, length in enumerate([7, 61]):
            begins = [max((end for end in ends if end <= target and mask_documents), default=0) for target in positions]
            expected = [
                plain_loss(run, max(begin, target + 1 - length), target)
                for begin, target in zip(begins, positions, strict=True)
            ]
            assert losses.means[index] == pytest.approx(np.mean(expected), rel=1e-5)
            assert losses.tokens.sum() == 32


@pytest.mark.parametrize("mask_documents", [pytest.param(True, marks=pytest.mark.slow), False])
def test_lengths_beyond_the_window_of_the_model_have_the_same_loss(mask_documents, config, tmp_path, monkeypatch):
    """A model of one layer with a window of 32 tokens ignores all other context, so its losses depend only on the targets."""
    monkeypatch.setattr(targets, "MIN_BLOCK", 16)
    random = np.random.default_rng(0)
    for number, length in enumerate([2200, *[50] * 30, 2200, *[20] * 30]):
        (tmp_path / f"text{number:02}").write_bytes(random.integers(97, 123, length, dtype=np.uint8).tobytes())
    config = with_settings(config, {"model.layers": 1, "model.window": 32})
    data = replace(config.data, path=f"{tmp_path}/text*", seq_len=1024, split="train[50%:]", eval_split="train[:50%]")
    config = with_settings(config, {"data": replace(data, mask_documents=mask_documents), "trainer.eval_tokens": 512})
    with one_rank():
        losses = evaluation.evaluate_lengths(run_setup.build(config), [64, 256, 1024])
    assert losses.tokens.sum() == 512
    assert len(losses.tokens) > 10
    assert losses.means == pytest.approx(losses.means[0], abs=1e-5)


@pytest.mark.parametrize(
    ("eval_tokens", "expected"), [(300, 300), pytest.param(10_000, 4359, marks=pytest.mark.slow)], ids=["a part", "all"]
)
def test_runs_of_different_lengths_have_the_same_targets(eval_tokens, expected, config):
    """The runs also have different batch sizes. The model is the same, so the losses are equal as well."""
    config = with_settings(config, {"trainer.eval_tokens": eval_tokens})
    longer = replace(config, data=replace(config.data, seq_len=90), trainer=replace(config.trainer, batch_size=5))
    with one_rank():
        runs = [run_setup.build(each) for each in (config, longer)]
        first, second = (evaluation.evaluate_lengths(run, [16, 61]) for run in runs)
        metrics = evaluation.evaluate(runs[0])
    assert first.tokens.sum() == expected
    assert first.checksum == second.checksum
    assert (first.tokens == second.tokens).all()
    assert first.sums == pytest.approx(second.sums, rel=1e-4)
    assert metrics["eval_loss"] == metrics["eval_loss_at/61"] == pytest.approx(first.means[1], rel=1e-6)


def test_default_lengths():
    assert evaluation.default_lengths(512, "text") == [64, 256, 512]
    assert evaluation.default_lengths(1024, "text") == [64, 256, 1024]
    assert evaluation.default_lengths(64, "text") == [64]
    assert evaluation.default_lengths(5, "text") == [5]
    assert evaluation.default_lengths(512, "recall") == [512]


@pytest.mark.slow
def test_evaluation_works_if_a_rank_has_no_tokens(tmp_path):
    """With the zigzag layout, one of four ranks has none of five tokens."""
    run_ranks(evaluate_five_tokens, 4, tmp_path / "store", write_corpus(tmp_path / "corpus"), tmp_path)


def evaluate_five_tokens(corpus: str, directory: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    config = job(corpus, 1, ring=4, layout="zigzag")
    config = with_settings(config, {"data.seq_len": 5, "trainer.eval_tokens": 1})
    assert min(Layout.zigzag(5, 4).rows(rank) for rank in range(4)) == 0
    assert evaluation.evaluate(run_setup.build(config))["eval_target_tokens"] == 1
