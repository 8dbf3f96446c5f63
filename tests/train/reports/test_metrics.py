"""Tests of the metrics on the console, in metrics.jsonl and in the plot."""

import json
import logging
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ringattn.train.reports import metrics
from ringattn.train.reports.metrics import Recorder, plot_data_wait, plot_loss, read
from ringattn.train.settings.config import Config, TrainerConfig
from tests.distributed import run_ranks


def config(steps: int = 100, log_every: int | None = 1) -> Config:
    return Config(name="run", trainer=TrainerConfig(steps=steps, log_every=log_every))


def record(recorder: Recorder, *steps: int, **values: float) -> None:
    """Record some steps of 1,000 tokens and half a second each."""
    for step in steps:
        recorder.log(step, tokens=1000, seconds=0.5, loss=5.0 / step, total_tokens=1000 * step, **values)


def steps_of(directory: Path) -> list[int]:
    return [entry["step"] for entry in read(directory / "metrics.jsonl")]


def test_rates_are_per_rank(tmp_path):
    recorder = Recorder(config(), tmp_path, peak_flops=8e12)
    recorder._ranks = 4
    recorder.log(1, tokens=1000, seconds=0.5, flops=4e12, loss=2.5, grad_norm=1.0, lr=1e-3)
    assert read(tmp_path / "metrics.jsonl") == [
        {
            "step": 1,
            "loss": 2.5,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "seconds": 0.5,
            "tokens_per_s_per_rank": 500.0,
            "tflops_per_rank": 2.0,
            "mfu": 0.25,
        }
    ]


def test_console_shows_all_metrics(tmp_path, caplog):
    recorder = Recorder(config(), tmp_path, peak_flops=8e12)
    caplog.set_level(logging.INFO)
    recorder.log(3, tokens=1000, seconds=0.5, flops=1e12, loss=2.5, grad_norm=1.25, lr=1e-3, peak_memory_gib=1.5)
    assert caplog.messages == [
        "step   3/100  loss 2.5000  grad norm 1.25  lr 1.00e-03  2,000 tokens/s per rank  2 TFLOP/s  MFU 25.0%  1.50 GiB"
        "  ETA 0:00:48"
    ]


def test_console_omits_unknown_metrics(tmp_path, caplog):
    recorder = Recorder(config(), tmp_path)
    caplog.set_level(logging.INFO)
    recorder.log(100, tokens=1000, seconds=0.5, loss=2.5, mfu=None)
    assert caplog.messages == ["step 100/100  loss 2.5000  2,000 tokens/s per rank  ETA 0:00:00"]


def test_console_shows_every_nth_step_and_the_last_one(tmp_path, caplog):
    recorder = Recorder(config(steps=7, log_every=3), tmp_path)
    caplog.set_level(logging.INFO)
    record(recorder, *range(1, 8))
    assert [re.match(r"step (\d)/7", message)[1] for message in caplog.messages] == ["3", "6", "7"]
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_console_shows_the_first_steps_and_then_a_step_every_few_seconds(tmp_path, monkeypatch, caplog):
    """The launch resumes after step 2, and a step takes a second."""
    recorder = Recorder(config(steps=20, log_every=None), tmp_path, done=2)
    caplog.set_level(logging.INFO)
    for step in range(3, 21):
        monkeypatch.setattr(time, "monotonic", lambda step=step: float(step))
        record(recorder, step, show=step != 12)
        if step == 12:
            recorder.extend(step, eval_loss=1.0)
    shown = [int(re.match(r"step +(\d+)/20", message)[1]) for message in caplog.messages]
    assert shown == [3, 4, 5, 10, 12, 17, 20]
    assert steps_of(tmp_path) == list(range(3, 21))


def test_resumed_run_records_every_step_once(tmp_path):
    recorder = Recorder(config(), tmp_path)
    record(recorder, 1, 2, 3, 4)
    recorder.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # The run was killed while it wrote.
    resumed = Recorder(config(), tmp_path, done=2)
    record(resumed, 3, 4, 5, 6)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_metrics_are_added_to_the_record_of_an_earlier_step(tmp_path, caplog):
    record(Recorder(config(log_every=9), tmp_path), 1, 2)
    resumed = Recorder(config(log_every=9), tmp_path, done=2)
    caplog.set_level(logging.INFO)
    resumed._wandb = Mock()
    assert resumed.lacks_evaluation(2)
    assert not resumed.lacks_evaluation(3)
    resumed.amend(2, eval_loss=7.0)
    assert not resumed.lacks_evaluation(2)
    record(resumed, 3)
    first, second, third = read(tmp_path / "metrics.jsonl")
    assert second == {**second, "step": 2, "loss": 2.5, "eval_loss": 7.0}
    assert "eval_loss" not in first | third
    assert resumed._wandb.log.call_args_list[0] == ((2, {"eval_loss": 7.0}),)
    assert caplog.messages == ["step   2/100  loss 2.5000  eval loss 7.0000  2,000 tokens/s per rank"]


def test_latest_record_is_extended(tmp_path):
    """The time of a checkpoint is only known after the record of its step has been written."""
    recorder = Recorder(config(), tmp_path, wandb_run=Mock())
    record(recorder, 1)
    recorder.extend(1, checkpoint_s=2.5)
    record(recorder, 2)
    first, second = read(tmp_path / "metrics.jsonl")
    assert first["checkpoint_s"] == 2.5
    assert first["loss"] == 5.0
    assert "checkpoint_s" not in second
    assert recorder._wandb.log.call_args_list[1] == ((1, {"checkpoint_s": 2.5}),)
    resumed = Recorder(config(), tmp_path, done=1)
    resumed.extend(1, checkpoint_s=3.5)
    record(resumed, 2)
    assert [entry.get("checkpoint_s") for entry in read(tmp_path / "metrics.jsonl")] == [3.5, None]


def test_records_of_saved_and_evaluated_steps_are_on_the_disk(tmp_path, monkeypatch):
    recorder, synced = Recorder(config(), tmp_path), []
    monkeypatch.setattr(metrics.os, "fsync", lambda _: synced.append(read(tmp_path / "metrics.jsonl")))
    record(recorder, 1, 2)
    recorder.extend(2, checkpoint_s=2.5)
    ((first, second),) = synced
    assert (first["step"], second["step"], second["checkpoint_s"]) == (1, 2, 2.5)


def test_new_run_starts_a_new_file(tmp_path):
    record(Recorder(config(), tmp_path), 1, 2)
    record(Recorder(config(), tmp_path), 1)
    assert steps_of(tmp_path) == [1]


def test_text_that_is_not_a_record_is_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[1]\n7\n{"loss": 1}\n{"step": null}\n{"step": 2}\n{"step": 3\n')
    assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert metrics.read(tmp_path / "metrics.jsonl", until=1) == [{"step": 1}]
    assert metrics.read(tmp_path / "missing.jsonl") == []


def test_damaged_file_loses_only_the_damaged_lines(tmp_path):
    """After a power failure, a file may contain NULs or the bytes of another file."""
    (tmp_path / "metrics.jsonl").write_bytes(
        b'\xff\xfe\x00\n{"step": 1}\n' + b"[" * 3000 + b'\n\x00\x00{"step": 2}\n{"step": 3}\n'
    )
    record(Recorder(config(), tmp_path, done=3), 4)
    assert steps_of(tmp_path) == [1, 3, 4]


def test_loss_that_is_not_finite_is_valid_json(tmp_path):
    Recorder(config(), tmp_path).log(1, tokens=1, seconds=1.0, loss=float("nan"))
    entry = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert entry["loss"] is None


def test_only_rank_0_records(tmp_path):
    run_ranks(record_on_each_rank, 2, tmp_path / "ranks", tmp_path)
    assert steps_of(tmp_path / "0") == [1, 2]
    assert read(tmp_path / "0" / "metrics.jsonl")[0]["tokens_per_s_per_rank"] == 1000
    assert not (tmp_path / "1").exists()


def record_on_each_rank(directory: Path) -> None:
    recorder = Recorder(config(), directory / str(dist.get_rank()))
    record(recorder, 1, 2)
    recorder.close()


@pytest.mark.parametrize("steps", [0, 1, 30])
@pytest.mark.parametrize("values", [{}, {"total_tokens": None}], ids=["tokens", "steps"])
def test_plot_is_a_png(tmp_path, steps, values):
    recorder = Recorder(config(), tmp_path)
    for step in range(1, steps + 1):
        recorder.log(step, tokens=10, seconds=1.0, **({"loss": 5 / step, "total_tokens": 10 * step} | values))
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_data_wait_is_plotted_next_to_the_time_of_the_step(tmp_path, monkeypatch):
    recorder, plotted = Recorder(config(), tmp_path), []
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, *_, label, **__: plotted.append((x, y, label)))
    monkeypatch.setattr(Axes, "legend", Mock())
    for step, wait in enumerate((0.5, 0.01, 0.03), 1):
        recorder.log(step, tokens=10, seconds=2.0, data_wait_s=wait)
    plot_data_wait(tmp_path / "metrics.jsonl", tmp_path / "data_wait.png", "title")
    label = "waiting for data (1.00% without the first step)"
    assert plotted == [([1, 2, 3], [2.0] * 3, "step"), ([1, 2, 3], [0.5, 0.01, 0.03], label)]
    assert (tmp_path / "data_wait.png").read_bytes().startswith(b"\x89PNG")


def test_plot_shows_held_out_losses_over_steps_and_by_length(tmp_path, monkeypatch, caplog):
    recorder = Recorder(config(log_every=100), tmp_path)
    caplog.set_level(logging.INFO)
    for step in range(1, 7):
        evaluated = (
            {
                "eval_loss": 6 / step,
                "eval_loss_at/64": 7 / step,
                "eval_loss_at/256": 5 / step,
                "eval_difference_error/256": 0.25,
            }
            if step % 3 == 0
            else {}
        )
        recorder.log(step, tokens=10, seconds=1.0, show=not evaluated, loss=5 / step)
        if evaluated:
            recorder.extend(step, **evaluated)
    assert [re.search(r"step +(\d).* eval loss (\S+)", message).groups() for message in caplog.messages] == [
        ("3", "2.0000"),
        ("6", "1.0000"),
    ]
    plotted, bars = [], Mock()
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, *_, **__: plotted.append((list(x), list(y))))
    monkeypatch.setattr(Axes, "errorbar", bars)
    monkeypatch.setattr(Axes, "legend", Mock())
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert plotted[-1] == ([3, 6], [2, 1])
    assert bars.call_args.args == ([64, 256], [7 / 6, 5 / 6], [0, 0.25])


def test_plot_has_a_title_and_separators_in_large_numbers(tmp_path, monkeypatch):
    figures: list[Figure] = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), savefig(self, *args, **kwargs)))
    recorder = Recorder(config(), tmp_path)
    for step in range(1, 5):
        recorder.log(step, tokens=10**7, seconds=1.0, loss=5 / step, total_tokens=step * 10**7)
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "a: 2 ranks")
    axes = figures[0].axes[0].xaxis
    labels = [label.get_text() for label in axes.get_ticklabels()]
    assert figures[0].get_suptitle() == "a: 2 ranks"
    assert axes.get_offset_text().get_text() == ""
    assert {"20,000,000", "40,000,000"} <= set(labels)
    assert len(labels) <= 8


def test_smoothed_loss_is_the_mean_over_a_fiftieth_of_the_steps():
    assert metrics._smooth([3.0, 1.0, 2.0]) == [3.0, 1.0, 2.0]
    losses = [float(step) for step in range(100)]
    assert metrics._smooth(losses) == [0.0, *(step - 0.5 for step in range(1, 100))]
