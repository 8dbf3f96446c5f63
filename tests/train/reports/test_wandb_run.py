"""Tests of the records in Weights & Biases (W&B), which read back the files of offline runs."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from ringattn.train import trainer
from ringattn.train.preemption import TrainingStopped
from ringattn.train.reports import metrics
from ringattn.train.reports.metrics import Recorder, read
from ringattn.train.reports.wandb_run import WandbRun
from ringattn.train.settings.config import Config, ConfigError, LoggerConfig, TrainerConfig
from tests.train.launch import SMALL, launch_ranks, receive_signal, write_corpus
from tests.train.wandb_files import Segment, read_segments, read_table
from tests.train.wandb_server import WandbServer, start_server

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def not_logged_in(tmp_path, monkeypatch):
    """No test finds the account of this machine's user or reaches a server."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("ringattn.train.reports.wandb_run.USER_DATA_DIRECTORY", None)
    monkeypatch.setenv("WANDB_DATA_DIR", "")  # A run sets this variable, and monkeypatch removes it after the test.
    monkeypatch.delenv("WANDB_DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def config(wandb: str = "offline", steps: int = 100) -> Config:
    return Config(name="run", trainer=TrainerConfig(steps=steps), logger=LoggerConfig(wandb=wandb))


def record(directory: Path, wandb_run: WandbRun, *steps: int, **values: float) -> None:
    """Record some steps of 1,000 tokens and half a second each."""
    recorder = Recorder(config(), directory, steps[0] - 1, wandb_run=wandb_run)
    for step in steps:
        recorder.log(step, tokens=1000, seconds=0.5, loss=5.0 / step, **values)
    recorder.close()


def only_segment(directory: Path) -> Segment:
    (segment,) = read_segments(directory)
    return segment


def upload(message: str, server: WandbServer) -> None:
    """Run the command that a message contains. W&B finds nothing in the home directory, as on another machine."""
    command = message[message.index("wandb sync") :].replace("wandb", f"{sys.executable} -m wandb", 1)
    shutil.rmtree(os.environ["XDG_DATA_HOME"], ignore_errors=True)
    environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": 40 * "a"}
    environment.pop("WANDB_DATA_DIR", None)
    subprocess.run(command, shell=True, env=environment, check=True, capture_output=True, timeout=250)


def as_json(value: object) -> object:
    """The value after a round trip through JSON, which turns tuples into lists."""
    return json.loads(json.dumps(value))


@pytest.mark.slow
def test_offline_run_contains_the_config_and_the_facts(tmp_path):
    with WandbRun(config(), tmp_path, {"kernel": "triton", "mesh": {"ring": 2}}) as wandb_run:
        wandb_run.add_facts({"transport": "gloo"})
    recorded = only_segment(tmp_path).config
    assert recorded.pop("run") == {"kernel": "triton", "mesh": {"ring": 2}, "transport": "gloo"}
    assert recorded == as_json(asdict(config()))


def test_offline_run_contains_every_metric_of_every_step(tmp_path):
    with WandbRun(config(), tmp_path) as wandb_run:
        record(tmp_path, wandb_run, 1, 2, 3, lr=1e-3, grad_norm=2.0, data_wait_s=0.25)
    segment = only_segment(tmp_path)
    assert segment.history == read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in segment.history] == [1, 2, 3]
    assert segment.step_metrics["*"] == "step", "all charts have the step of the training on their x axis"
    assert segment.exit_code == 0


def test_offline_run_contains_tables_images_and_the_summary(tmp_path):
    Recorder(config(), tmp_path).close()
    metrics.plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    with WandbRun(config(), tmp_path) as wandb_run:
        wandb_run.log(3, {"eval_loss": 2.0, "eval_loss_at/64": 3.0, "eval_loss_at/256": 1.5})
        wandb_run.log(3, {"recall_accuracy": 0.5, "recall/512/0": 0.5, "recall/512/100": 1.0})
        wandb_run.log_table("samples", 4, ["step", "prompt", "text"], [[4, "a", "b"]])
        wandb_run.log_picture("loss_curve", 4, tmp_path / "loss.png")
        wandb_run.update_summary({"final_loss": 1.25, "mfu": None})
    segment = only_segment(tmp_path)
    losses, by_length, recall, by_position, samples, curve = segment.history
    assert losses == {"step": 3, "eval_loss": 2.0, "eval_loss_at/64": 3.0, "eval_loss_at/256": 1.5}
    assert by_length["step"] == by_position["step"] == 3
    assert samples["step"] == curve["step"] == 4
    assert read_table(tmp_path, by_length, "loss_by_length") == (["length", "loss"], [[64, 3.0], [256, 1.5]])
    assert recall == {"step": 3, "recall_accuracy": 0.5, "recall/512/0": 0.5, "recall/512/100": 1.0}
    columns = ["length", "position_percent", "accuracy"]
    assert read_table(tmp_path, by_position, "recall_by_position") == (columns, [[512, 0, 0.5], [512, 100, 1.0]])
    assert read_table(tmp_path, samples, "samples") == (["step", "prompt", "text"], [[4, "a", "b"]])
    (image,) = tmp_path.glob(f"wandb/offline-run-*/files/{curve['loss_curve/path']}")
    assert image.read_bytes() == (tmp_path / "loss.png").read_bytes()
    assert (segment.summary["final_loss"], segment.summary["mfu"]) == (1.25, None)


def test_all_launches_in_a_directory_continue_one_wandb_run(tmp_path):
    """The first launch is killed before its first checkpoint, so the second launch starts at step 1 again."""
    for first in (1, 1, 3):
        with WandbRun(config(), tmp_path) as wandb_run:
            record(tmp_path, wandb_run, first, first + 1, first + 2)
    segments = read_segments(tmp_path)
    assert len(segments) == 3
    assert {segment.id for segment in segments} == {(tmp_path / "wandb_id").read_text()}
    assert all(segment.resume for segment in segments), "otherwise, `wandb sync` would overwrite the steps of earlier launches"
    assert [[row["step"] for row in segment.history] for segment in segments] == [[1, 2, 3], [1, 2, 3], [3, 4, 5]]


@pytest.mark.slow
def test_sync_adds_the_steps_of_all_launches_to_one_run(tmp_path, caplog):
    """The command that a launch prints is run after the first launch, and again after two further launches."""
    caplog.set_level(logging.INFO)
    with start_server() as server:
        for first in (1, 4, 6):
            with WandbRun(config(), tmp_path) as wandb_run:
                record(tmp_path, wandb_run, first, first + 1, first + 2)
            read_segments(tmp_path)  # This call waits until W&B has written the files.
            if first != 4:
                upload(caplog.messages[-1], server)
        rows = server.history((tmp_path / "wandb_id").read_text())
    assert len(server.runs) == 1
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6, 7, 8]
    # W&B identifies a row by `_step`. If two rows had the same number, one of them would be lost.
    assert [row["_step"] for row in rows] == list(range(9))


def test_empty_id_is_replaced(tmp_path):
    """An earlier launch was killed while it wrote the file."""
    (tmp_path / "wandb_id").touch()
    WandbRun(config(), tmp_path).close()
    assert only_segment(tmp_path).id == (tmp_path / "wandb_id").read_text() != ""


@pytest.mark.slow
def test_job_that_is_resumed_twice_is_one_wandb_run(corpus, tmp_path, run_command_line, capfd):
    """The records, the facts, the tables and the summary of all launches can be read back from the files of W&B."""
    job = [*SMALL, f"data.path={corpus}", "data.eval_fraction=0.2", "trainer.sample_tokens=3", "logger=offline"]
    job += ["name=a", "trainer.eval_tokens=128"]
    directory = tmp_path / "outputs" / "a"
    with start_server() as server:
        for steps in (2, 4, 5):
            assert run_command_line(*job, f"trainer.steps={steps}", "trainer.sample_prompt=7 is") == 0
            segments = read_segments(directory)
            output = capfd.readouterr().out
            assert output.count(f"wandb sync {directory}/wandb") == 1
            if steps != 4:
                upload(output.splitlines()[-1], server)
    check_uploads(server, directory)
    assert len(segments) == 3
    assert {segment.id for segment in segments} == {(directory / "wandb_id").read_text()}
    assert all(segment.resume and segment.step_metrics["*"] == "step" for segment in segments)

    rows: dict[int, dict] = {}
    for segment in segments:
        for row in segment.history:
            if not any(name.endswith("/_type") for name in row):  # tables and images
                rows[row["step"]] = rows.get(row["step"], {}) | row
    assert sorted(rows) == [1, 2, 3, 4, 5]
    assert list(rows.values()) == read(directory / "metrics.jsonl")
    assert {"loss", "lr", "grad_norm", "seconds", "tokens_per_s_per_rank", "tflops_per_rank", "peak_memory_gib"} <= set(rows[1])
    assert all("data_wait_s" in row for row in rows.values())
    assert all({"checkpoint_s", "evaluation_s", "eval_loss"} <= set(rows[step]) for step in (2, 4, 5))

    last = segments[-1]
    by_length, samples = (next(row for row in last.history if f"{name}/_type" in row) for name in ("loss_by_length", "samples"))
    assert read_table(directory, by_length, "loss_by_length") == (["length", "loss"], [[64, rows[5]["eval_loss_at/64"]]])
    columns, [[step, prompt, text]] = read_table(directory, samples, "samples")
    assert columns == ["step", "prompt", "text"]
    assert (step, prompt) == (5, "7 is")
    assert prompt + text == (directory / "sample.txt").read_text(encoding="utf-8")
    assert [row["step"] for row in last.history if "loss_curve/_type" in row] == [5]
    summary = json.loads((directory / "summary.json").read_text())
    assert {name: last.summary[name] for name in summary} == summary
    assert last.config["trainer"]["steps"] == 5
    assert last.config["optim"]["lr"] == 2e-3
    assert last.config["run"]["parameters"] > 0
    assert last.config["run"]["transport"] is None


def check_uploads(server: WandbServer, directory: Path) -> None:
    """Check that the server has all records, tables, pictures and the summary of the run with three launches."""
    run = (directory / "wandb_id").read_text()
    assert set(server.runs) == {run}
    rows = server.history(run)
    assert [row["_step"] for row in rows] == list(range(len(rows))), "each row has a number of its own"
    steps = [{name: value for name, value in row.items() if name[0] != "_"} for row in rows]
    media = [name for row in steps for name in row if isinstance(row[name], dict)]
    assert sorted(media) == ["loss_by_length"] * 3 + ["loss_curve"] * 3 + ["samples"] * 3
    merged: dict[int, dict] = {}
    for row in steps:
        if not set(media) & set(row):
            merged[row["step"]] = merged.get(row["step"], {}) | row
    assert list(merged.values()) == read(directory / "metrics.jsonl")
    for row in steps:
        for name in set(media) & set(row):
            assert f"{run}/{row[name]['path']}" in server.files
    for name in ("loss_by_length", "samples"):
        ids = server.artifacts[f"run-{run}-{name}"]
        tables = [json.loads(server.files[f"artifacts/{id}/{name}.table.json"]) for id in ids]
        assert len(tables) == 3
        assert all(len(table["data"]) == 1 for table in tables)
    *_, last = tables
    assert last["data"][0][0] == 5
    assert (directory / "sample.txt").read_text(encoding="utf-8").endswith(last["data"][0][2])
    summary = json.loads((directory / "summary.json").read_text())
    uploaded = json.loads(server.files[f"{run}/wandb-summary.json"])
    assert {name: uploaded.get(name) for name in summary} == summary


@pytest.mark.slow
def test_sweep_prints_one_command_that_uploads_all_runs(corpus, tmp_path, run_command_line, capfd):
    settings = [*SMALL, f"data.path={corpus}", "logger=offline", "name=a sweep", "trainer.steps=1", "model.layers=1"]
    assert run_command_line("-m", *settings, "data.seq_len=32,64") == 0
    directory = tmp_path / "outputs" / "a sweep"
    for job in ("", "seq_len=32", "seq_len=64"):
        read_segments(directory / job)
    output = capfd.readouterr().out
    with start_server() as server:
        upload(output[output.index("upload all runs of the sweep with: ") :].splitlines()[0], server)
    ids = [(directory / job / "wandb_id").read_text() for job in ("", "seq_len=32", "seq_len=64")]
    assert set(server.runs) == set(ids)
    assert {(run["displayName"], run["groupName"]) for run in server.runs.values()} == {
        ("a sweep", "a sweep"),
        ("a sweep/seq_len=32", "a sweep"),
        ("a sweep/seq_len=64", "a sweep"),
    }
    assert all(server.history(run)[0]["loss"] > 0 for run in ids[1:])
    (artifact,) = server.artifacts[f"run-{ids[0]}-sweep"]
    table = json.loads(server.files[f"artifacts/{artifact}/sweep.table.json"])
    assert [row[0] for row in table["data"]] == ["data.seq_len=32", "data.seq_len=64"]


@pytest.mark.slow
def test_run_that_was_killed_before_its_summary_completes_it_in_its_wandb_run(corpus, tmp_path, run_command_line):
    job = [*SMALL, f"data.path={corpus}", "logger=offline", "name=a", "trainer.steps=1"]
    assert run_command_line(*job) == 0
    directory = tmp_path / "outputs" / "a"
    (directory / "summary.json").unlink()
    assert run_command_line(*job) == 0
    assert run_command_line(*job) == 0, "this launch only repeats the summary, so it does not continue the W&B run"
    first, second = read_segments(directory)
    assert first.id == second.id
    assert second.summary["final_loss"] == first.summary["final_loss"]


def receive_sigterm_after_the_last_step(rank: int) -> None:
    write_sample = trainer.write_sample
    trainer.write_sample = lambda *arguments: receive_signal(signal.SIGTERM) or write_sample(*arguments)


def test_sigterm_after_the_last_step_does_not_end_the_wandb_run_early(tmp_path):
    """If the W&B run ended early, its last steps would be lost, because later launches only generate the sample."""
    job = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "logger=offline", "name=a", "trainer.steps=2"]
    job, directory = [*job, "trainer.sample_tokens=1"], tmp_path / "outputs" / "a"
    is_successful, _, stderr = launch_ranks(1, tmp_path, *job, prepare=receive_sigterm_after_the_last_step)
    assert is_successful, stderr
    assert {row["step"] for row in only_segment(directory).history} == {1, 2}
    assert (directory / "summary.json").exists()
    assert not (directory / "sample.txt").exists()


@pytest.mark.parametrize("choice", ["auto", "offline"])
def test_offline_wandb_writes_only_to_the_directory(tmp_path, capfd, caplog, choice):
    """Without a login, "auto" means offline. The console shows the command that uploads all parts of the run."""
    caplog.set_level(logging.INFO)
    directory = tmp_path / "a run"
    directory.mkdir()
    with WandbRun(config(choice), directory) as wandb_run:
        record(directory, wandb_run, 1, 2)
    assert re.search(rf"W&B +offline, {directory}/wandb$", caplog.text, re.MULTILINE)
    assert f"wandb sync '{directory}'/wandb" in caplog.messages[-1]
    assert only_segment(directory).exit_code == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("error", "status"), [(None, 0), (ValueError, 1), (TrainingStopped, 0)])
def test_exit_code_is_that_of_the_run(tmp_path, error, status):
    try:
        with WandbRun(config(), tmp_path):
            if error is not None:
                raise error
    except (ValueError, TrainingStopped):
        pass
    assert only_segment(tmp_path).exit_code == status


def test_online_wandb_requires_a_login(tmp_path):
    with pytest.raises(ConfigError, match=r"logger\.wandb=online .*`wandb login`"):
        WandbRun(config("online"), tmp_path)


def test_training_continues_if_wandb_cannot_start(tmp_path, monkeypatch, caplog):
    def fail(*args, mode, **kwargs):
        raise OSError(f"{mode} is impossible")

    monkeypatch.setattr("wandb.login", lambda **options: True)
    monkeypatch.setattr("wandb.init", fail)
    with WandbRun(config("auto"), tmp_path) as wandb_run:
        record(tmp_path, wandb_run, 1)
    assert [entry["step"] for entry in read(tmp_path / "metrics.jsonl")] == [1]
    assert all(f"{mode} is impossible" in caplog.text for mode in ("online", "offline"))


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.log(1, {"loss": 1.0}),
        lambda run: run.log_table("samples", 1, ["a"], [[1]]),
        lambda run: run.log_picture("loss_curve", 1, Path("missing.png")),
        lambda run: run.update_summary({"a": 1}),
        lambda run: run.add_facts({"a": 1}),
        lambda run: run.close(),
    ],
    ids=["log", "table", "image", "summary", "facts", "close"],
)
def test_training_continues_if_wandb_fails_later(tmp_path, caplog, call):
    """After the first error, W&B is no longer used."""
    wandb_run = WandbRun(config("off"), tmp_path)
    fail = Mock(side_effect=RuntimeError("the connection was lost"))
    wandb_run._run = Mock(log=fail, finish=fail, config=Mock(update=fail), summary=Mock(update=fail))
    call(wandb_run)
    call(wandb_run)
    assert caplog.text.count("W&B failed") == 1


def test_only_rank_0_starts_a_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with WandbRun(config(), tmp_path) as wandb_run:
        wandb_run.log(1, {"loss": 1.0})
        wandb_run.update_summary({"final_loss": 1.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("mode", "started"), [("disabled", None), ("offline", "offline"), ("dryrun", "offline"), (None, "online")]
)
def test_auto_uses_the_environment_of_wandb(mode, started, tmp_path, monkeypatch, caplog):
    """The user is logged in. The jobs of a sweep form a group. The console shows where the data goes."""
    caplog.set_level(logging.INFO)
    init = Mock(return_value=Mock(url="https://wandb.example/ours/runs/1"))
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.setenv("WANDB_PROJECT", "ours")
    monkeypatch.setattr("wandb.login", lambda **options: True)
    monkeypatch.setattr("wandb.init", init)
    (tmp_path / "multirun.yaml").touch()
    directory = tmp_path / "lr=0.1"
    directory.mkdir()
    WandbRun(config("auto"), directory).close()
    where = {"online": "online, https://wandb.example/ours/runs/1", "offline": f"offline, {directory}/wandb"}
    assert re.search(rf"W&B +{where.get(started, 'off')}$", caplog.text, re.MULTILINE)
    assert ("wandb sync" in caplog.text) == (started == "offline")
    if started is None:
        assert not init.called
    else:
        options = init.call_args.kwargs
        expected = dict(mode=started, project="ours", name="run/lr=0.1", group="run")
        assert {name: options[name] for name in expected} == expected
