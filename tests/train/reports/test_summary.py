"""Tests of the summary of a run, and of its sample."""

import json
import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from ringattn.train.parallel.memory.capacity import RECEIVE_BUFFERS, Needs
from ringattn.train.reports import summary
from ringattn.train.settings.config import Config, ConfigError, with_settings


@pytest.fixture
def run(monkeypatch) -> SimpleNamespace:
    """A run of 20 steps with 1,000 tokens each on four ranks, of which two share a sequence."""
    monkeypatch.setattr(summary.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(summary.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(summary, "broadcast_object", lambda value: value)
    monkeypatch.setattr(summary, "peak_memory_gib", lambda *_: 1.5)
    config = with_settings(Config(), {"trainer.steps": 20, "trainer.sample_tokens": 0})
    needed = Needs({"activations": 2.0**30, "parameters": 2.0**29, RECEIVE_BUFFERS: 5.0}, {"activations": 2.0**31})
    mesh = SimpleNamespace(sequence=SimpleNamespace(size=lambda: 2))
    sizes = {"tokens_per_step": 1000, "peak_flops": 8e12, "memory_needed": needed, "uncounted_bytes": 0}
    return SimpleNamespace(
        config=config, mesh=mesh, device=torch.device("cpu"), num_parameters=5, plot_title="{}: {}".format, **sizes
    )


def records(first: int) -> list[dict[str, float]]:
    """The records of the steps from `first` to 20, of which step 11 is slow."""
    return [
        {
            "step": step,
            "loss": float(step),
            "eval_loss": 10.0 + step,
            "eval_loss_at/64": 11.0 + step,
            "eval_loss_at/256": 9.0 + step,
            "total_tokens": 1000 * step,
            "seconds": 100.0 if step == 11 else 0.1 * step,
            "tflops_per_rank": 2.0 if step > 11 else 1.0,
        }
        for step in range(first, 21)
    ]


def test_losses_are_means_over_the_last_tenth_of_the_steps(run):
    result = summary.summarise(run, records(1), done=0)
    assert result["final_loss_steps"] == 2
    assert (result["final_loss"], result["eval_loss"], result["total_tokens"]) == (19.5, 30.0, 20_000)
    assert (result["steps"], result["ranks"], result["ring"], result["peak_memory_gib"]) == (20, 4, 2, 1.5)
    assert result["eval_loss_by_length"] == {"64": 31.0, "256": 29.0}
    assert (result["tokens_per_step"], result["estimated_memory_gib"], result["estimated_offloaded_gib"]) == (1000, 1.5, 2.0)


@pytest.mark.parametrize("first", [1, 11], ids=["resumed run", "branch without earlier records"])
def test_rates_are_medians_of_this_launch_without_its_first_step(run, first):
    result = summary.summarise(run, records(first), done=10)
    assert result["seconds_per_step"] == pytest.approx(1.6), "the median of steps 12 to 20"
    assert result["tokens_per_s"] == pytest.approx(1000 / 1.6)
    assert (result["tflops_per_rank"], result["mfu"]) == (2.0, 0.25)


def test_single_step_has_rates(run):
    result = summary.summarise(run, records(1), done=19)
    assert result["seconds_per_step"] == pytest.approx(2.0)


def test_run_without_steps_and_metrics_is_an_error(run, tmp_path):
    """The run branched from a checkpoint that has completed all steps."""
    with pytest.raises(ConfigError, match=r"20.*trainer\.steps"):
        summary.complete_summary(run, tmp_path)


def test_console_says_that_the_final_loss_is_a_mean(run, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records(1)))
    summary.write_results(run, tmp_path, 0, Mock())
    assert "final_loss 19.5 (mean of the last 2 steps), eval_loss 30," in caplog.text
