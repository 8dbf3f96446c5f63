import json
import logging
import os
import re
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from matplotlib.axes import Axes

from ringattn.train import metrics, summary
from ringattn.train.config import Config, ConfigError, LoggerConfig, TrainerConfig
from ringattn.train.metrics import Recorder, plot_loss, read
from tests.distributed import run_ranks


@pytest.fixture(autouse=True)
def not_logged_in(tmp_path, monkeypatch):
    """No account of this machine's user is found, and none is reached."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def config(wandb: str = "off", steps: int = 100, log_every: int = 1) -> Config:
    return Config(name="run", trainer=TrainerConfig(steps=steps, log_every=log_every), logger=LoggerConfig(wandb=wandb))


def record(recorder: Recorder, *steps: int, **values: float) -> None:
    for step in steps:
        recorder.log(step, tokens=1000, seconds=0.5, loss=5.0 / step, total_tokens=1000 * step, **values)


def steps_of(directory) -> list[int]:
    return [row["step"] for row in read(directory / "metrics.jsonl")]


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


def test_the_console_line(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    recorder = Recorder(config(), tmp_path, peak_flops=8e12)
    recorder.log(3, tokens=1000, seconds=0.5, flops=1e12, loss=2.5, grad_norm=1.25, lr=1e-3, peak_memory_gib=1.5)
    assert caplog.messages == [
        "step   3/100  loss 2.5000  grad norm 1.25  lr 1.00e-03  2,000 tokens/s a rank  2 TFLOP/s  MFU 25.0%  1.50 GiB"
        "  ETA 0:00:48"
    ]


def test_the_console_line_leaves_out_what_is_unknown(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Recorder(config(), tmp_path).log(100, tokens=1000, seconds=0.5, loss=2.5, mfu=None)
    assert caplog.messages == ["step 100/100  loss 2.5000  2,000 tokens/s a rank  ETA 0:00:00"]


def test_the_console_shows_every_nth_step_and_the_last(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    record(Recorder(config(steps=7, log_every=3), tmp_path), *range(1, 8))
    assert [re.match(r"step (\d)/7", message)[1] for message in caplog.messages] == ["3", "6", "7"]
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_resuming_keeps_every_step_once(tmp_path):
    recorder = Recorder(config(), tmp_path)
    record(recorder, 1, 2, 3, 4)
    recorder.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # killed while writing
    resumed = Recorder(config(), tmp_path, done=2)
    record(resumed, 3, 4, 5, 6)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_new_run_starts_a_new_file(tmp_path):
    record(Recorder(config(), tmp_path), 1, 2)
    record(Recorder(config(), tmp_path), 1)
    assert steps_of(tmp_path) == [1]


def test_a_loss_that_is_not_finite_is_valid_json(tmp_path):
    Recorder(config(), tmp_path).log(1, tokens=1, seconds=1.0, loss=float("nan"))
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row["loss"] is None


def test_rank_zero_alone_records(tmp_path):
    run_ranks(_record_on_a_rank, 2, tmp_path / "ranks", tmp_path)
    assert steps_of(tmp_path / "0") == [1, 2]
    assert read(tmp_path / "0" / "metrics.jsonl")[0]["tokens_per_s_per_rank"] == 1000
    assert not (tmp_path / "1").exists()


def _record_on_a_rank(directory) -> None:
    recorder = Recorder(config(), directory / str(dist.get_rank()))
    record(recorder, 1, 2)
    recorder.close()


@pytest.mark.parametrize("rows", [0, 1, 30])
@pytest.mark.parametrize("values", [{}, {"total_tokens": None}], ids=["tokens", "steps"])
def test_the_plot_is_a_png(tmp_path, rows, values):
    recorder = Recorder(config(), tmp_path)
    for step in range(1, rows + 1):
        recorder.log(step, tokens=10, seconds=1.0, **({"loss": 5 / step, "total_tokens": 10 * step} | values))
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_held_out_losses_are_drawn_over_steps_and_contexts(tmp_path, monkeypatch, caplog):
    recorder = Recorder(config(log_every=100), tmp_path)
    caplog.set_level(logging.INFO)
    for step in range(1, 7):
        evaluated = {"eval_loss": 6 / step, "eval_loss/0": 7 / step, "eval_loss/128": 5 / step} if step % 3 == 0 else {}
        recorder.log(step, tokens=10, seconds=1.0, loss=5 / step, **evaluated)
    assert [re.search(r"step +(\d).* eval loss (\S+)", message).groups() for message in caplog.messages] == [
        ("3", "2.0000"),
        ("6", "1.0000"),
    ]
    drawn = {}
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, *_, **__: drawn.update({len(drawn): (list(x), list(y))}))
    monkeypatch.setattr(Axes, "legend", Mock())
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert list(drawn.values())[1:] == [([3, 6], [2, 1]), ([0, 1], [7 / 6, 5 / 6])]


@pytest.mark.parametrize("choice", ["auto", "offline"])
def test_wandb_offline_stays_in_the_directory_and_silent(tmp_path, capfd, choice):
    directory = tmp_path / "run"
    recorder = Recorder(config(choice), directory)
    record(recorder, 1, 2)
    recorder.close()
    identity = (directory / "wandb_id").read_text()
    assert len(list(directory.glob(f"wandb/offline-run-*-{identity}/run-{identity}.wandb"))) == 1
    assert capfd.readouterr() == ("", "")


def test_wandb_resumes_the_same_run_and_restarts_another(tmp_path):
    identities = []
    for done in (0, 1, 0):
        Recorder(config("offline"), tmp_path, done=done).close()
        identities.append((tmp_path / "wandb_id").read_text())
    assert identities[0] == identities[1] != identities[2]


def test_wandb_online_needs_a_login(tmp_path):
    with pytest.raises(ConfigError, match="not logged in; run `wandb login`, or use offline or auto"):
        Recorder(config("online"), tmp_path)


def test_wandb_that_fails_does_not_stop_training(tmp_path, monkeypatch, caplog):
    import wandb

    def fail(*args, mode, **kwargs):
        raise OSError(f"no {mode} for you")

    monkeypatch.setattr(metrics, "_logged_in", lambda wandb: True)
    monkeypatch.setattr(wandb, "init", fail)
    record(Recorder(config("auto"), tmp_path), 1)
    assert steps_of(tmp_path) == [1]
    assert [f"W&B cannot start {mode}: no {mode} for you" in caplog.text for mode in ("online", "offline")] == [True] * 2


def test_wandb_that_breaks_off_does_not_stop_training(tmp_path, caplog):
    class Broken:
        def log(self, row):
            raise RuntimeError("gone")

    recorder = Recorder(config(), tmp_path)
    recorder._wandb = Broken()
    record(recorder, 1, 2)
    recorder.close()
    assert steps_of(tmp_path) == [1, 2]
    assert caplog.text.count("gone") == 1


def test_a_file_is_on_the_disk_before_it_replaces(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: events.append("synced") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *names: events.append("named") or replace(*names))
    metrics.write_whole(tmp_path / "a", "text")
    assert events == ["synced", "named"] and (tmp_path / "a").read_text() == "text"


@pytest.mark.parametrize(("mode", "choice"), [("disabled", "off"), ("offline", "offline"), (None, "auto")])
def test_wandbs_own_environment_is_obeyed(mode, choice, tmp_path, monkeypatch):
    import wandb

    begun = {}
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setattr(metrics, "_logged_in", lambda wandb: True)
    monkeypatch.setattr(wandb, "init", lambda **options: begun.update(options) or Mock())
    directory = tmp_path / "run" / "3"
    Recorder(config("auto"), directory).close()
    if choice == "off":
        assert not begun
    else:
        assert begun["mode"] == ("offline" if choice == "offline" else "online")
        assert (begun["project"], begun["name"], begun["group"]) == ("ours", "run/3", "run")


def test_the_losses_of_a_summary_are_of_the_last_steps(tmp_path):
    rows = [{"step": step, "loss": float(step), "eval_loss": 10.0 + step} for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(metrics._json_line, rows)))
    assert summary._losses(tmp_path, 20) == {"final_loss": 19.5, "eval_loss": 30.0}


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[1]\n7\n{"loss": 1}\n{"step": null}\n{"step": 2}\n{"step": 3\n')
    assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
