"""Tests of FP8 attention in evaluation, generation and training: what uses FP8, and how little it changes."""

import math
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch

from ringattn.train import setup as run_setup
from ringattn.train import step
from ringattn.train.inference import generation
from ringattn.train.inference.losses import evaluate
from ringattn.train.reports.description import describe, run_facts
from ringattn.train.settings.config import Config, with_settings
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank

TOLERANCE = 0.002  # largest change of the loss, in nats; the perplexity then changes by at most 0.2%


def train(run: run_setup.Run, steps: int) -> list[float]:
    """Take some steps and return their losses."""
    return [step.take_step(run, number, run.sequences_per_step * (number - 1))[0]["loss"] for number in range(1, steps + 1)]


def losses(corpus: str, use: str, steps: int = 2) -> tuple[list[float], float]:
    """Return the losses of some training steps and of the evaluation afterwards."""
    config = job(corpus, 1)
    config = with_settings(config, {"trainer.fp8_attention": use})
    run = run_setup.build(config)
    return train(run, steps), evaluate(run)["eval_loss"]


@pytest.mark.slow
def test_fp8_hardly_changes_the_perplexity_of_a_trained_model(corpus):
    """The loss of the model falls by more than one nat in training, so attention matters."""
    config = job(corpus, 1)
    config = with_settings(config, {"data.seq_len": 200})
    with one_rank():
        run = run_setup.build(config)
        trained = train(run, 20)
        assert trained[-1] < trained[0] - 1
        results = {}
        for use in ("never", "inference"):
            changed = replace(run, config=with_settings(config, {"trainer.fp8_attention": use}))
            results[use] = evaluate(changed)["eval_loss"]
    perplexities = {use: math.exp(loss) for use, loss in results.items()}
    assert results["never"] != results["inference"]
    assert perplexities["inference"] == pytest.approx(perplexities["never"], rel=TOLERANCE)


@pytest.mark.slow
def test_setting_selects_the_passes_that_use_fp8(corpus):
    """With "inference", training is bitwise the same as without FP8. With "always", the losses hardly differ."""
    with one_rank():
        (never, never_eval), (inference, inference_eval), (always, always_eval) = (
            losses(corpus, use) for use in ("never", "inference", "always")
        )
    assert inference == never
    assert always[0] != never[0]
    assert inference_eval != never_eval
    assert always_eval not in (never_eval, inference_eval)
    assert [*always, always_eval, inference_eval] == pytest.approx([*never, never_eval, never_eval], abs=TOLERANCE)


@pytest.mark.parametrize("use", ["never", "inference"])
def test_only_the_prompt_of_a_generation_uses_fp8(use, corpus, monkeypatch):
    """New tokens attend to the caches, which have the dtype of the model."""
    received, attend = [], generation.ring_attention
    monkeypatch.setattr(generation, "ring_attention", lambda *x, **options: received.append(options) or attend(*x, **options))
    config = job(corpus, 1)
    config = with_settings(config, {"trainer.fp8_attention": use})
    with one_rank():
        run = run_setup.build(config)
        tokens = generation.generate(run, [1, 2, 3], 4, temperature=0.0)
    assert len(tokens) > 3
    assert [options["precision"] for options in received] == ["fp8" if use == "inference" else "ieee"] * config.model.layers


@pytest.mark.slow
def test_ranks_use_fp8(corpus, tmp_path):
    """A ring of two ranks and an all-to-all of two ranks."""
    run_ranks(check_ranks, 2, tmp_path / "store", corpus, tmp_path)


def check_ranks(corpus: str, directory: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    for settings in ({"ulysses": 1, "schedule": "kv"}, {"ulysses": 2}):
        config = job(corpus, 1, ring=2, **settings)
        config = with_settings(config, {"trainer.batch_size": 4, "trainer.accumulate": 1})
        run = run_setup.build(config)
        never = evaluate(run)["eval_loss"]
        run = replace(run, config=with_settings(config, {"trainer.fp8_attention": "always"}))
        always = evaluate(run)["eval_loss"]
        assert always != never
        assert always == pytest.approx(never, abs=TOLERANCE)
        (loss,) = train(run, 1)
        assert loss == pytest.approx(never, abs=0.5)
        assert evaluate(run)["eval_loss"] < always


def test_description_names_the_use_of_fp8(corpus, caplog):
    caplog.set_level("INFO")
    config = job(corpus, 1)
    config = with_settings(config, {"trainer.fp8_attention": "inference"})
    with one_rank():
        run = run_setup.build(config)
        describe(run, Path("outputs/name"), run_facts(run))
    entries = dict(message.split(maxsplit=1) for message in caplog.messages)
    assert entries["precision"] == "fp32, FP8 attention in evaluation and generation"
    # The kernels of training steps do not use FP8.
    assert "FP8" not in entries["kernel"]


def test_kernels_are_those_of_training_or_of_inference():
    config = with_settings(Config(), {"trainer.fp8_attention": "inference"})
    cpu = torch.device("cpu")
    assert "FP8" not in run_setup.choose_backend(config, cpu, bf16=True, training=True).reason
    assert "rounded to FP8" in run_setup.choose_backend(config, cpu, bf16=True).reason
    config = with_settings(config, {"trainer.fp8_attention": "always"})
    assert "rounded to FP8" in run_setup.choose_backend(config, cpu, bf16=True, training=True).reason
