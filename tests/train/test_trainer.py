"""Tests of a run's sequence: what it writes, how it resumes, and which checkpoints and settings do not match."""

import errno
import json
import math
import re
import shutil
import signal
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp

from ringattn.train import preemption, trainer
from ringattn.train import setup as run_setup
from ringattn.train.checkpoint import storage
from ringattn.train.commands import run
from ringattn.train.inference import losses as evaluation
from ringattn.train.parallel.memory import capacity
from ringattn.train.parallel.ranks import disconnect_ranks
from ringattn.train.reports import metrics
from ringattn.train.settings import config as train_config
from ringattn.train.settings.config import ConfigError, TrainerConfig
from ringattn.train.settings.token_budget import default_group_size
from tests.train.hub_models import write_folder
from tests.train.launch import SMALL, receive_signal

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def settings(corpus) -> list[str]:
    """The arguments of a small run."""
    return [*SMALL, f"data.path={corpus}", "model.layers=1", "data.seq_len=32"]


@pytest.fixture
def outputs(tmp_path) -> Path:
    return tmp_path / "outputs"


def summary_of(directory: Path) -> dict:
    return json.loads((directory / "summary.json").read_text())


def test_run_writes_its_files(corpus, outputs, run_command_line, capfd, tmp_path, monkeypatch):
    """If a file is a link to a result of another run, the link is replaced, and its target does not change."""
    links = "metrics.jsonl", "metrics.tmp", "loss.png", "sample.txt", "summary.json", "summary.tmp", ".lock", "run.log"
    links += ("data_wait.png",)
    (outputs / "a").mkdir(parents=True)
    for name in links:
        (tmp_path / name).write_text("{}\n")
        (outputs / "a" / name).symlink_to(tmp_path / name)
    titles, plot_loss = [], metrics.plot_loss
    monkeypatch.setattr(metrics, "plot_loss", lambda *arguments: titles.append(arguments[2]) or plot_loss(*arguments))
    assert run_command_line(*SMALL, f"data.path={corpus}", "name=a", "trainer.steps=3", "trainer.sample_tokens=5") == 0
    output = capfd.readouterr().out
    assert "step 3/3" in output
    assert "sample" in output
    files = {path.name for path in (outputs / "a").iterdir()}
    assert ".hydra" not in files
    assert {"checkpoints", "loss.png", "data_wait.png", "metrics.jsonl", "run.log", "sample.txt", "summary.json"} <= files
    summary = summary_of(outputs / "a")
    assert titles == [f"a: {summary['parameters']:,} parameters, 384 tokens, 1 rank"]
    assert summary["device"] == "cpu"
    assert {(tmp_path / name).read_text() for name in links} == {"{}\n"}
    assert not [path.name for path in (outputs / "a").iterdir() if path.is_symlink()]


@pytest.mark.slow
def test_settings_that_do_not_fit_the_checkpoint(settings, outputs, run_command_line, only_error):
    """Every message names the checkpoint, the setting, its earlier value and its value now."""
    settings = [*settings, "name=a", "trainer.steps=3", "trainer.batch_size=1"]
    assert run_command_line(*settings) == 0
    for overrides, named in (
        (["trainer.steps=4", "model.dim=64"], "model.dim=32 (now 64)"),
        (["trainer.steps=4", "model.rope_theta=3"], "model.rope_theta=10000.0 (now 3.0)"),
        (["optim.lr=0.5"], "optim.lr=0.002 (now 0.5)"),
        (["trainer.seed=1"], "trainer.seed=0 (now 1)"),
        (["optim.warmup_steps=1"], "optim.warmup_steps=0 (now 1)"),
        (["trainer.steps=2"], "trainer.steps=3 (now 2)"),
        (["trainer.steps=4", "data.seed=1"], "data.seed"),
        (["trainer.resume=never"], "trainer.resume=never"),
    ):
        assert run_command_line(*settings, *overrides) == 1
        error = only_error()
        assert "step_00000003" in error
        assert named in error
    # The schedule has no effect on a run that has no steps left.
    assert run_command_line(*settings, "parallel.schedule=kv") == 0
    assert run_command_line(*settings, "name=b", "trainer.steps=1", "trainer.resume=never") == 0

    (outputs / "a" / "checkpoints" / "step_00000003" / "__0_0.distcp").write_bytes(b"damaged")
    assert run_command_line(*settings, "trainer.steps=4") == 1
    assert "step_00000003" in only_error()


@pytest.mark.slow
def test_completed_run_keeps_its_summary_and_writes_a_new_sample(settings, outputs, run_command_line, capfd):
    settings = [*settings, "name=a", "trainer.steps=2"]
    assert run_command_line(*settings) == 0
    assert not (outputs / "a" / "sample.txt").exists()
    summary = summary_of(outputs / "a")
    assert run_command_line(*settings, "trainer.sample_tokens=3", "trainer.sample_prompt=7 is") == 0
    assert "all 2 steps" in capfd.readouterr().out
    assert summary_of(outputs / "a") == summary
    assert (outputs / "a" / "sample.txt").read_text(encoding="utf-8").startswith("7 is")


def contents_of(directory: Path) -> dict[str, bytes]:
    """The contents of all files of a run that a launch without training must not change."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name not in ("run.log", "sample.txt", "lock")]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["trainer.sample_tokens=4"]], ids=str)
def test_inspecting_a_completed_run_changes_none_of_its_results(overrides, settings, outputs, run_command_line, capfd):
    """The command repeats no settings. With the default settings, the run would have 1,500 steps."""
    assert run_command_line(*settings, "name=a", "trainer.steps=2") == 0
    before = contents_of(outputs / "a")
    assert run_command_line("name=a", *overrides) == 0
    assert "all 2 steps" in capfd.readouterr().out
    assert contents_of(outputs / "a") == before


def test_a_run_keeps_its_groups_on_another_number_of_ranks(settings, outputs, run_command_line, monkeypatch):
    """On two data-parallel ranks, a new run reads groups of four sequences. On one rank, it has no groups."""
    for name, ranks, steps in (("a", 2, 1), ("b", 1, 1), ("a", 1, 2), ("b", 2, 2)):
        monkeypatch.setattr(trainer, "default_group_size", lambda config, _, ranks=ranks: default_group_size(config, ranks))
        assert run_command_line(*settings, "parallel.ring=1", f"name={name}", f"trainer.steps={steps}") == 0
    metas = [storage.read_meta(outputs / name / "checkpoints" / "step_00000002") for name in ("a", "b")]
    assert [meta["config"]["data"]["group_size"] for meta in metas] == [4, None]
    assert [meta["corpus"]["sequences"] for meta in metas] == ["shuffled in groups of 4", "shuffled"]
    assert [meta["consumed"] for meta in metas] == [4, 4]


def test_recipe_of_the_device_is_not_a_choice_of_the_user(settings, outputs, run_command_line, monkeypatch, capfd):
    assert run_command_line(*settings, "name=a", "trainer.steps=2") == 0
    monkeypatch.setattr(run, "select_recipe", lambda: sys.argv.insert(1, "recipe=gpu"))
    assert run_command_line("name=a") == 0
    assert "all 2 steps" in capfd.readouterr().out


def test_launch_by_name_resumes_with_the_settings_of_the_run(settings, outputs, run_command_line, capfd):
    assert run_command_line(*settings, "name=a", "trainer.steps=2", "optim=wsd", "optim.lr=1e-3") == 0
    assert run_command_line("name=a", "trainer.steps=3") == 0
    output = capfd.readouterr().out
    assert "resumed" in output
    assert "which was trained with trainer.steps=2 (now 3)" in output
    config = storage.read_meta(outputs / "a" / "checkpoints" / "step_00000003")["config"]
    assert (config["optim"]["schedule"], config["optim"]["lr"], config["data"]["seq_len"]) == ("wsd", 1e-3, 32)
    assert summary_of(outputs / "a")["steps"] == 3


class Killed(BaseException):
    """Stands for SIGKILL: no code catches this exception."""


@pytest.mark.slow
def test_run_that_was_killed_before_its_summary_gets_one(settings, outputs, run_command_line, monkeypatch):
    """The run had been extended from one step to two, so the summary of one step must not remain."""
    settings = [*settings, "name=a"]
    assert run_command_line(*settings, "trainer.steps=1") == 0
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "write_results", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            run_command_line(*settings, "trainer.steps=2")
    disconnect_ranks()
    assert not (outputs / "a" / "summary.json").exists()
    assert run_command_line(*settings, "trainer.steps=2") == 0
    (last,) = metrics.read(outputs / "a" / "metrics.jsonl")[-1:]
    summary = summary_of(outputs / "a")
    assert (summary["steps"], summary["final_loss"]) == (2, last["loss"])


def test_a_summary_is_not_written_from_an_earlier_step(settings, outputs, run_command_line, only_error):
    settings = [*settings, "name=a", "trainer.steps=2"]
    assert run_command_line(*settings) == 0
    path = outputs / "a" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])  # as after a power failure
    (outputs / "a" / "summary.json").unlink()
    assert run_command_line(*settings) == 1
    assert "metrics.jsonl has no record of step 2" in only_error()
    assert not (outputs / "a" / "summary.json").exists()


@pytest.mark.slow
def test_going_back_to_fewer_steps_restores_their_summary(settings, outputs, run_command_line):
    settings = [*settings, "name=a", "trainer.keep_checkpoints=9"]
    assert run_command_line(*settings, "trainer.steps=1") == 0
    first = summary_of(outputs / "a")
    assert run_command_line(*settings, "trainer.steps=2") == 0
    assert run_command_line(*settings, "trainer.steps=1", "trainer.resume=outputs/a/checkpoints/step_00000001") == 0
    restored = summary_of(outputs / "a")
    assert (restored["steps"], restored["final_loss"]) == (1, first["final_loss"])


@pytest.mark.slow
def test_more_steps_do_not_change_the_warmup(settings, outputs, run_command_line, capfd):
    settings = [*settings, "name=a", "trainer.checkpoint_every=0"]
    assert run_command_line(*settings, "trainer.steps=10") == 0
    assert run_command_line(*settings, "trainer.steps=20", "optim.lr=1e-3") == 0
    assert "optim.lr=0.002 (now 0.001)" in capfd.readouterr().out
    records = metrics.read(outputs / "a" / "metrics.jsonl")
    assert records[0]["lr"] == 2e-3, "the warmup has one step"
    # Half a cosine from 1e-3 at step 1 to 1e-4 at step 20. With a tenth of 20 steps, the warmup would end at step 2.
    assert records[10]["lr"] == pytest.approx(1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * 10 / 19)) / 2))
    assert summary_of(outputs / "a")["final_loss"] == pytest.approx(statistics.fmean(record["loss"] for record in records[-2:]))


def test_steps_must_include_the_warmup_of_the_checkpoint(settings, run_command_line, only_error):
    settings = [*settings, "trainer.checkpoint_every=2", "trainer.keep_checkpoints=9"]
    assert run_command_line(*settings, "name=a", "trainer.steps=6", "optim.warmup_steps=5") == 0
    branch = ["name=b", "trainer.resume=outputs/a/checkpoints/step_00000002", "trainer.steps=4"]
    assert run_command_line(*settings, *branch) == 1
    error = only_error()
    assert "trainer.steps=4" in error
    assert "5" in error
    assert "optim.warmup_steps" in error


@pytest.mark.slow
def test_branch_resumes_from_its_own_checkpoints(settings, outputs, run_command_line, only_error, monkeypatch, capfd):
    """Run b branches from a checkpoint of run a. The same command then resumes b, and b can go back to its own checkpoints."""
    settings = [*settings, "trainer.checkpoint_every=1", "trainer.keep_checkpoints=9"]
    assert run_command_line(*settings, "name=a", "trainer.steps=2") == 0
    first, second = (f"outputs/a/checkpoints/step_0000000{step}" for step in (1, 2))
    assert run_command_line(*settings, "name=c", "trainer.steps=1") == 0
    branch = [*settings, "name=b", f"trainer.resume={first}"]
    assert run_command_line(*branch, "trainer.steps=3") == 0
    assert "trainer.steps=2 (now 3)" in capfd.readouterr().out
    assert summary_of(outputs / "b")["steps"] == 3
    assert run_command_line(*branch, "trainer.steps=4") == 0
    assert f"{outputs}/b/checkpoints/step_00000003" in capfd.readouterr().out
    for name, other in (("b", second), ("c", first)):
        assert run_command_line(*settings, f"name={name}", f"trainer.resume={other}", "trainer.steps=5") == 1
        assert f"trainer.resume={other}" in only_error()

    own = outputs / "b" / "checkpoints"
    back = [*settings, "name=b", f"trainer.resume={own}/step_00000002", "trainer.steps=3"]
    assert run_command_line(*back) == 0
    assert f"{own}/step_00000002" in capfd.readouterr().out
    assert sorted(path.name for path in own.iterdir()) == ["step_00000002", "step_00000003"]
    assert run_command_line(*branch, "trainer.steps=3") == 0
    # If the run is killed before its first checkpoint, the next launch finds the checkpoint that this one went back to.
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "take_step", Mock(side_effect=ConfigError("killed")))
        assert run_command_line(*back) == 1
    assert storage.latest(own) == own / "step_00000002"


def test_another_layout_or_batch_size_is_reported(settings, run_command_line, capfd):
    assert run_command_line(*settings, "name=a", "trainer.steps=1") == 0
    changed = ["trainer.steps=2", "parallel.layout=zigzag", "trainer.batch_size=1"]
    assert run_command_line(*settings, "name=a", *changed) == 0
    output = capfd.readouterr().out
    for change in ("tokens_per_step=64 (now 32)", "parallel.layout=auto (now zigzag)", "trainer.steps=1 (now 2)"):
        assert change in output


def parameters_of(path: Path) -> dict[str, torch.Tensor]:
    """The parameters in a checkpoint."""
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in stored.items() if name.startswith("model.")}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


@pytest.mark.slow
def test_run_from_weights_of_a_checkpoint(settings, outputs, tmp_path, run_command_line, only_error, capfd):
    settings = [*settings, "trainer.steps=2"]
    assert run_command_line(*settings, "name=a") == 0
    path = "outputs/a/checkpoints/step_00000002"
    started = [*settings, "name=b", "data.seq_len=24", "model.window=7", f"trainer.init_from={path}"]
    # With this learning rate, two steps do not change the weights.
    assert run_command_line(*started, "optim.lr=1e-30") == 0
    assert "model.window=None (now 7)" in capfd.readouterr().out
    before, after = (parameters_of(outputs / name / "checkpoints" / "step_00000002") for name in "ab")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    # Later launches resume from the run's own checkpoint, with or without init_from.
    later = [override for override in started if "init_from" not in override] + ["trainer.steps=3"]
    assert run_command_line(*later) == 0
    assert run_command_line(*later, f"trainer.init_from={tmp_path / path}") == 0
    assert run_command_line(*later, "trainer.init_from=outputs/c") == 1
    assert path in only_error()
    assert run_command_line(*settings, "name=d", "model.ffn_dim=8", f"trainer.init_from={path}") == 1
    assert "(8, 32)" in only_error()
    assert run_command_line(*settings, "name=d", "model.heads=8", "model.kv_heads=4", f"trainer.init_from={path}") == 1
    assert "model.heads=4 (now 8), model.kv_heads=2 (now 4)" in only_error()


def test_other_text_of_the_same_lengths_is_another_corpus(settings, tmp_path, run_command_line, only_error):
    assert run_command_line(*settings, "name=a", "trainer.steps=1") == 0
    for file in (tmp_path / "corpus").iterdir():
        file.write_text(file.read_text().upper())
    assert run_command_line(*settings, "name=a", "trainer.steps=2") == 1
    error = only_error()
    assert "step_00000001" in error
    assert "trainer.init_from" in error


def test_a_changed_held_out_text_is_reported(settings, tmp_path, run_command_line, capfd):
    settings.remove("data.eval_fraction=0")
    settings += ["name=a", "data.eval_path=held-out.txt", "data.eval_split=null", "trainer.eval_tokens=500"]
    (tmp_path / "held-out.txt").write_text("text " * 100)
    for steps in (1, 2):
        assert run_command_line(*settings, f"trainer.steps={steps}") == 0
    assert "the held-out text has changed" not in capfd.readouterr().out
    with (tmp_path / "held-out.txt").open("a") as file:
        file.write("more")
    assert run_command_line(*settings, "trainer.steps=3") == 0
    assert "the held-out text has changed, so earlier values of eval_loss are not comparable" in capfd.readouterr().out


def write_tokenizer(path: Path, letters: str) -> Path:
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", "?", *letters])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
    tokenizers.Tokenizer(model).save(str(path))
    return path


def test_a_resumed_run_requires_its_tokenizer(settings, tmp_path, run_command_line, only_error):
    """More tokens would change the softmax, even if the tokens of the text stay the same."""
    path = write_tokenizer(tmp_path / "tokenizer.json", "abc")
    settings = [*settings, "name=a", f"data.tokenizer={path}", "trainer.batch_size=1"]
    for steps in (1, 2):
        assert run_command_line(*settings, f"trainer.steps={steps}") == 0
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(path))
    assert run_command_line(*settings, "trainer.steps=3") == 1
    assert "step_00000002 was trained with the tokenizer" in only_error()


@pytest.mark.slow
def test_weights_require_their_tokenizer(settings, outputs, tmp_path, run_command_line, only_error):
    """A tokenizer is identified by its contents, not by its path."""
    own, other = (write_tokenizer(tmp_path / name, letters) for name, letters in (("own.json", "abc"), ("other.json", "acb")))
    settings = [*settings, "trainer.steps=1"]
    assert run_command_line(*settings, "name=a", f"data.tokenizer={own}") == 0
    started = [*settings, "name=b", "trainer.init_from=outputs/a/checkpoints/step_00000001"]
    assert run_command_line(*started, f"data.tokenizer={other}") == 1
    error = only_error()
    assert f"data.tokenizer={other}" in error
    assert str(own) in error
    (tmp_path / "moved.json").write_bytes(own.read_bytes())
    assert run_command_line(*started, f"data.tokenizer={tmp_path / 'moved.json'}") == 0

    folder = write_folder(tmp_path / "hf", tie_word_embeddings=True)
    shutil.copy(own, folder / "tokenizer.json")
    started = [*settings, "name=c", f"trainer.init_from={folder}", "model.layers=2"]
    assert run_command_line(*started, "data.tokenizer=bytes") == 1
    error = only_error()
    assert "data.tokenizer=bytes" in error
    assert f"{folder}/tokenizer.json" in error
    assert run_command_line(*started, f"data.tokenizer={own}") == 0


def test_weights_are_checked_before_the_text_is_read(settings, tmp_path, run_command_line, only_error, monkeypatch):
    folder = write_folder(tmp_path / "hf")
    monkeypatch.setattr(run_setup, "load_training", lambda *_: pytest.fail("the text was read"))
    assert run_command_line(*settings, "name=a", f"trainer.init_from={folder}", "data.tokenizer=bytes") == 1
    error = only_error()
    assert str(folder) in error
    assert "model.layers=2 (now 1)" in error


@pytest.mark.parametrize("name", ["metrics.jsonl", "loss.png", "sample.txt", "summary.json"])
def test_folder_in_place_of_a_result_is_reported_before_the_first_step(name, settings, outputs, run_command_line, only_error):
    (outputs / "a" / name).mkdir(parents=True)
    assert run_command_line(*settings, "name=a", "trainer.sample_tokens=1") == 1
    assert f"{name} is a folder" in only_error()


def test_unusable_folder_of_checkpoints_is_reported_before_the_first_step(settings, outputs, run_command_line, only_error):
    (outputs / "a").mkdir(parents=True)
    (outputs / "a" / "checkpoints").symlink_to("missing")
    assert run_command_line(*settings, "name=a") == 1
    assert "checkpoints is not a folder" in only_error()
    assert not (outputs / "a" / "metrics.jsonl").exists()


def test_divergence_is_reported_without_a_traceback(settings, run_command_line, only_error, monkeypatch):
    monkeypatch.setitem(train_config.RANGES, "optim.lr", (0, 1e30))
    assert run_command_line(*settings, "trainer.steps=5", "optim.warmup_steps=0", "optim.lr=1e30") == 1
    assert "step 2" in only_error()


@pytest.mark.slow
def test_checkpoint_without_a_newer_setting(settings, outputs, run_command_line, only_error):
    """If a checkpoint was saved before a setting existed, the setting had its default value."""
    settings = [*settings, "name=a"]
    assert run_command_line(*settings, "trainer.steps=1") == 0
    path = outputs / "a" / "checkpoints" / "step_00000001" / "meta.json"
    meta = json.loads(path.read_text())
    for name in ("rope_factor", "rope_trained_len", "rope_scaling", "qkv_bias", "qk_norm"):
        del meta["config"]["model"][name]
    # Without a factor, this setting has no effect.
    meta["config"]["model"]["rope_trained_len"] = 8192
    meta |= {"format": 1, "checksum": None}  # Such checkpoints had no checksum.
    path.write_text(json.dumps(meta))
    assert run_command_line(*settings, "trainer.steps=2", "model.rope_factor=8", "model.rope_trained_len=64") == 1
    assert "model.rope_factor=None (now 8.0)" in only_error()
    assert run_command_line(*settings, "trainer.steps=2") == 0


def test_full_disk_leaves_the_earlier_checkpoint(settings, outputs, run_command_line, only_error, monkeypatch):
    settings = [*settings, "name=a", "trainer.checkpoint_every=1", "trainer.steps=2"]
    write = Mock(side_effect=[DEFAULT, OSError(errno.ENOSPC, "No space left on device")], wraps=storage._write_tensors)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "_write_tensors", write)
        assert run_command_line(*settings) == 1
    error = only_error()
    assert "full" in error
    assert "MiB" in error
    assert "a/checkpoints/step_00000001" in error
    assert [path.name for path in (outputs / "a" / "checkpoints").iterdir()] == ["step_00000001"]
    assert run_command_line(*settings) == 0


def test_a_sample_that_exceeds_the_memory_is_reported_before_the_first_step(
    settings, outputs, run_command_line, only_error, monkeypatch
):
    monkeypatch.setattr(capacity, "host_memory", lambda: 2.0**26)
    assert run_command_line(*settings, "name=a", "trainer.steps=1", "trainer.sample_tokens=8") == 0
    assert run_command_line(*settings, "name=b", "trainer.steps=1", f"trainer.sample_tokens={2**20}") == 1
    assert re.search(r"each rank would need about [\d.]+ GiB \(keys and values .* fewer tokens", only_error())
    assert not (outputs / "b" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_disk_is_checked_before_the_first_step(settings, outputs, run_command_line, only_error, monkeypatch, capfd):
    settings = [*settings, "name=a", "trainer.checkpoint_every=1"]
    assert run_command_line(*settings, "trainer.steps=1") == 0
    size = sum(file.stat().st_size for file in (outputs / "a" / "checkpoints" / "step_00000001").iterdir())
    usage = SimpleNamespace(total=2**40, free=1.5 * size)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: usage)
    assert run_command_line(*settings, "trainer.steps=3") == 0
    assert "too little space for 2 more checkpoints" in capfd.readouterr().out

    usage.free = 0.8 * size
    before = {path: path.read_bytes() for path in (outputs / "a").rglob("*") if path.name in ("summary.json", "metrics.jsonl")}
    assert run_command_line(*settings, "trainer.steps=4") == 1
    assert "trainer.keep_checkpoints" not in only_error()
    assert len(before) == 2
    assert all(path.read_bytes() == content for path, content in before.items())
    assert run_command_line(*settings, "trainer.steps=3") == 0, "a completed run writes no checkpoint"


def test_actions_run_regularly_and_after_the_last_step():
    assert [step for step in range(1, 8) if trainer.runs_after_step(step, every=3, steps=7)] == [3, 6, 7]
    assert [step for step in range(1, 4) if trainer.runs_after_step(step, every=0, steps=3)] == [3]


def test_run_without_checkpoints_says_so_and_saves_none(settings, outputs, run_command_line, capfd, monkeypatch):
    """Without checkpoints, a run needs no space on the disk. A launch of the same name starts from the beginning."""
    settings = [*settings, "name=a", "trainer.save_final=false", "trainer.steps=2", "trainer.checkpoint_every=0"]
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**40, free=0))
    assert run_command_line(*settings) == 0
    (line,) = [text for text in capfd.readouterr().out.splitlines() if text.startswith("checkpoint ")]
    assert all(part in line for part in ("none", "trainer.save_final=false", "trainer.checkpoint_every=0"))
    first = metrics.read(outputs / "a" / "metrics.jsonl")
    assert not (outputs / "a" / "checkpoints").exists()
    assert summary_of(outputs / "a")["steps"] == 2
    assert run_command_line(*settings) == 0
    again = metrics.read(outputs / "a" / "metrics.jsonl")
    assert [record["loss"] for record in again] == [record["loss"] for record in first]


def test_run_without_the_final_checkpoint_keeps_the_earlier_ones(settings, outputs, run_command_line, capfd):
    """Another launch repeats the steps after the latest checkpoint."""
    settings = [*settings, "name=a", "trainer.save_final=false", "trainer.checkpoint_every=2", "trainer.steps=4"]
    for _ in range(2):
        assert run_command_line(*settings) == 0
        assert [path.name for path in (outputs / "a" / "checkpoints").iterdir()] == ["step_00000002"]
    output = capfd.readouterr().out
    assert "step_00000002" in output, "the second launch saves no checkpoint"
    assert output.count("checkpoint  none") == 1, "the second launch saves no checkpoint"
    assert [record["step"] for record in metrics.read(outputs / "a" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_checkpoints_follow_from_the_settings():
    config = TrainerConfig(steps=7, checkpoint_every=3)
    assert [step for step in range(1, 8) if trainer.saves_after_step(step, config)] == [3, 6, 7]
    config = replace(config, save_final=False)
    assert [step for step in range(1, 8) if trainer.saves_after_step(step, config)] == [3, 6]
    config = TrainerConfig(steps=6, checkpoint_every=0, save_final=False)
    assert not any(trainer.saves_after_step(step, config) for step in range(1, 7))


def test_signal_during_a_save_stops_the_run_after_this_save(settings, outputs, run_command_line, monkeypatch, capfd):
    """A further step and its save might not end before torchrun kills the ranks."""
    monkeypatch.setattr(preemption, "_received_signals", set())
    write = storage._write_tensors

    def write_during_signal(*arguments):
        receive_signal(signal.SIGTERM)
        return write(*arguments)

    monkeypatch.setattr(storage, "_write_tensors", write_during_signal)
    settings = [*settings, "name=a", "trainer.background_saves=false"]
    assert run_command_line(*settings, "trainer.checkpoint_every=2", "trainer.steps=9") == 0
    assert "step 2 is saved" in capfd.readouterr().out
    assert [path.name for path in (outputs / "a" / "checkpoints").iterdir()] == ["step_00000002"]


def stop_in_batch(number: int, how: str):
    """A replacement for `forward` in which the process receives SIGTERM, or its time limit passes, in one batch."""
    forward, batches = evaluation.forward, []

    def forward_with_request(*arguments):
        batches.append(len(batches) + 1)
        if batches[-1] == number and how == "signal":
            receive_signal(signal.SIGTERM)
        elif batches[-1] == number:
            preemption.LAUNCH_TIME -= 1e6
        return forward(*arguments)

    return forward_with_request, batches


@pytest.mark.parametrize(
    ("how", "step", "overrides"),
    [
        ("signal", 2, ["trainer.checkpoint_every=0", "trainer.steps=3"]),
        pytest.param("time limit", 2, ["trainer.checkpoint_every=2", "trainer.steps=3"], marks=pytest.mark.slow),
        pytest.param("signal", 2, ["trainer.steps=2"], marks=pytest.mark.slow),
        ("time limit", 2, ["trainer.steps=2", "trainer.save_final=false"]),
    ],
    ids=["without a checkpoint", "after a checkpoint", "after the last step", "without the final checkpoint"],
)
def test_request_during_an_evaluation_stops_it(how, step, overrides, settings, outputs, run_command_line, monkeypatch, capfd):
    """The step is saved, and the next launch repeats the evaluation, and changes nothing else."""
    settings = [*settings, "data.eval_fraction=0.2", "trainer.eval_every=2", "trainer.eval_tokens=320", *overrides]
    with monkeypatch.context() as patched:
        patched.setattr(preemption, "_received_signals", set())
        patched.setattr(preemption, "LAUNCH_TIME", preemption.LAUNCH_TIME)
        forward, batches = stop_in_batch(2, how)
        patched.setattr(evaluation, "forward", forward)
        assert run_command_line(*settings, "name=a", "trainer.time_limit_s=1e5") == 0
    assert batches == [1, 2, 3]
    assert f"step {step} is saved" in capfd.readouterr().out
    assert [path.name for path in (outputs / "a" / "checkpoints").iterdir()] == [f"step_0000000{step}"]
    records = metrics.read(outputs / "a" / "metrics.jsonl")
    assert [record["step"] for record in records] == [*range(1, step + 1)]
    assert "eval_loss" not in records[-1]
    for name in ("a", "b"):
        assert run_command_line(*settings, f"name={name}") == 0
    stopped, whole = (
        [
            {key: value for key, value in record.items() if "loss" in key}
            for record in metrics.read(outputs / name / "metrics.jsonl")
        ]
        for name in ("a", "b")
    )
    assert stopped == whole
    assert "eval_loss" in stopped[step - 1]
    assert summary_of(outputs / "a")["eval_loss"] == summary_of(outputs / "b")["eval_loss"]


def test_crash_in_the_last_evaluation_does_not_lose_the_step(settings, outputs, run_command_line, monkeypatch):
    settings = [*settings, "name=a", "data.eval_fraction=0.2", "trainer.steps=2"]
    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "forward", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            run_command_line(*settings)
    disconnect_ranks()
    assert [path.name for path in (outputs / "a" / "checkpoints").iterdir()] == ["step_00000002"]
    assert [record["step"] for record in metrics.read(outputs / "a" / "metrics.jsonl")] == [1, 2]
    assert run_command_line(*settings) == 0
    assert summary_of(outputs / "a")["eval_loss"] > 0


def test_parts_of_the_start_are_shown_and_in_the_summary(settings, outputs, run_command_line, capfd):
    assert run_command_line(*settings, "name=a", "trainer.steps=2") == 0
    (line,) = [text for text in capfd.readouterr().out.splitlines() if text.startswith("start-up ")]
    parts = summary_of(outputs / "a")["start_up_s"]
    assert {"settings", "data", "model", "W&B", "first step"} <= parts.keys()
    assert min(parts.values()) >= 0
    assert all(f"{name} {seconds:.1f}" in line for name, seconds in parts.items())
