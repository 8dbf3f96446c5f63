import errno
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
import tokenizers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from omegaconf.errors import OmegaConfBaseException

from ringattn.comm import watchdog
from ringattn.train import metrics, run
from ringattn.train import setup as run_setup
from ringattn.train import trainer as trainer_module
from ringattn.train.checkpoint import storage
from ringattn.train.config import Config, ConfigError, TrainerConfig
from ringattn.train.parallel import mesh as parallel
from tests.train.hub_models import write_folder
from tests.train.launch import ROOT, SCRIPT, SMALL, command, descendants, environment, launch, own_errors, write_corpus

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    threads, root = torch.get_num_threads(), logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))  # Hydra puts others there, and sets the level
    level = root.level
    yield write_corpus(tmp_path / "corpus")
    torch.set_num_threads(threads)
    root.setLevel(level)


def main(monkeypatch, *arguments: str) -> int:
    """The exit status of train/run.py, run in this process."""
    monkeypatch.setattr(sys, "argv", ["train/run.py", *arguments])
    return run.main()


BAD = {
    "unknown option": (["model.width=3"], "unknown option model.width: choose one of vocab_size, layers, dim"),
    "unknown option, forced": (["+model.width=3"], "unknown option model.width"),
    "unknown group": (["color=red"], "unknown option color: choose one of name, model, data"),
    "unknown file of a group": (
        ["model=huge"],
        "Available options in 'model': 1.4b 124m 350m 8b llama-3.1-8b llama-3.2-1b qwen2.5-7b qwen3-0.6b qwen3-8b tiny",
    ),
    "wrong type": (["model.layers=two"], "model.layers: Value 'two' of type 'str' could not be converted to Integer"),
    "no value": (["trainer.steps"], "missing EQUAL"),
    "heads that do not divide": (["model.heads=3"], "model.kv_heads=2 does not divide model.heads=3"),
    "sequence shorter than the ring": (["data.seq_len=0"], "data.seq_len=0 makes no sense: it must be at least 1"),
    "window below 1": (["model.window=0"], "model.window=0 makes no sense: it must be at least 1"),
    "unknown layout": (["parallel.layout=spiral"], "choose one of contiguous, zigzag, striped"),
    "ring that does not divide": (["parallel.ring=2"], "parallel.ring=2 does not divide the 1 ranks launched"),
    "no GPU": (["trainer.device=cuda"], "usable GPUs for 1 ranks"),
    "vocabulary below the tokenizer's": (["model.vocab_size=100"], "model.vocab_size=100 is less than the tokenizer's 257"),
    "kernel without its device": (["parallel.kernel=triton"], "parallel.kernel=triton needs a GPU"),
    "Hopper kernel without its device": (["parallel.kernel=hopper"], "parallel.kernel=hopper needs a GPU"),
    "deterministic by a kernel that is not": (
        ["trainer.deterministic=true", "parallel.kernel=hopper"],
        "trainer.deterministic=true and parallel.kernel=hopper contradict each other",
    ),
    "missing data file": (["data.path=/missing/*.txt"], "data.path=/missing/*.txt matches no file"),
    "no data path": (["data.path=null"], "data.source=text needs data.path"),
    "corpus shorter than a sequence": (["data.seq_len=1000000"], "data.seq_len=1000000 needs 1,000,001"),
    "path without a use": (["data.source=stdlib"], "but data.source=stdlib reads no file"),
    "subset of files": (["data.subset=en"], "data.subset=en, but only datasets of the hub have subsets"),
    "column of files": (["data.column=body"], "data.column=body, but data.source=text has no columns"),
    "decay without its schedule": (["optim.decay_fraction=0.5"], "a cosine schedule has no such phase"),
    "held-out text that is trained on": (
        ["data.eval_split=train"],
        "held-out text, data.eval_split=train data.eval_path=None",
    ),
    "held-out files without a use": (
        ["data=stdlib", "data.path=null", "data.eval_path=a"],
        "data.eval_path=a, but data.source",
    ),
    "missing held-out files": (["data.eval_path=/missing"], "data.eval_path=null): data.eval_path=/missing matches no file"),
    "tilde": (["data.path=~/c/*.txt"], "data.path=~/c/*.txt: no value that Hydra can read; quote brackets, ~ and"),
    "a folder": (["data.path=corpus"], "data.path=corpus is a folder: give its files, such as 'corpus/**/*.*'"),
    "seed beyond 64 bits": (["trainer.seed=99999999999999999999"], "trainer.seed=99999999999999999999 makes no sense"),
    "brackets": (["data.split=train[:10]"], "data.split=train[:10]: mismatched input '[' expecting <EOF>; quote brackets"),
    "two beginnings": (["trainer.init_from=a", "trainer.resume=b"], "init_from=a and trainer.resume=b contradict each other"),
    "parameters of nothing": (
        ["trainer.init_from=/missing"],
        "init_from=/missing is neither a checkpoint, a step_... directory",
    ),
    "parameters of no checkpoint": (
        ["trainer.init_from=/x/step_00000001"],
        "step_00000001 is no checkpoint: no such directory",
    ),
    "a time limit of the past": (["trainer.time_limit_s=-5"], "trainer.time_limit_s=-5.0 makes no sense: it must be positive"),
    "no name": (["name=null"], "name=null names no directory"),
    "empty name": (["name="], "name= names no directory"),
    "a file where the directory shall be": (["hydra.run.dir=corpus/00.txt"], "directory cannot be made or written: [Errno"),
    "reference to nothing": (["data.column=${foo}"], "error: data.column: Interpolation key 'foo' not found"),
    "a directory that is no checkpoint": (["trainer.resume=."], "is no checkpoint: give the path of a step_... directory"),
    "missing checkpoint": (["trainer.resume=/missing"], "/missing is no checkpoint"),
    "W&B without a login": (["logger.wandb=online"], "W&B is not logged in"),
}


@pytest.mark.parametrize(("overrides", "message"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_one_line(overrides, message, corpus, monkeypatch, capfd):
    if "device=cuda" in overrides[0] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if "wandb" in overrides[0]:
        monkeypatch.setenv("NETRC", "/dev/null")
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert main(monkeypatch, *SMALL, f"data.path={corpus}", *overrides) == 1
    output = capfd.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in output.err and "step 1/" not in output.out


def test_a_run_then_a_checkpoint_that_does_not_fit_or_cannot_be_read(corpus, monkeypatch, tmp_path, capfd):
    settings = [*SMALL, f"data.path={corpus}", "name=a", "trainer.steps=3", "trainer.sample_tokens=5"]
    assert main(monkeypatch, *settings, "trainer.batch_size=2") == 0
    output = capfd.readouterr()
    assert "step 3/3" in output.out and "sample" in output.out
    files = {path.name for path in (tmp_path / "outputs" / "a").iterdir()}
    assert {".hydra", "checkpoints", "loss.png", "metrics.jsonl", "run.log", "sample.txt", "summary.json"} <= files

    assert main(monkeypatch, *settings) == 0  # the same again finds nothing left to do
    assert "all 3 steps" in capfd.readouterr().out
    summary = tmp_path / "outputs" / "a" / "summary.json"
    final_loss = json.loads(summary.read_text())["final_loss"]
    summary.unlink()  # as if it had been killed before
    assert main(monkeypatch, *settings) == 0
    assert json.loads(summary.read_text())["final_loss"] == final_loss

    assert main(monkeypatch, *settings, "trainer.steps=4", "model.dim=64") == 1
    assert_one_error(
        capfd, "step_00000003 was trained with model.dim=32 (now 64): resume with the same, or give the run another"
    )
    assert main(monkeypatch, *settings, "trainer.steps=4", "model.rope_theta=3") == 1
    assert_one_error(capfd, "was trained with model.rope_theta=10000.0 (now 3.0)")
    assert main(monkeypatch, *settings, "optim.lr=0.5") == 1
    assert_one_error(capfd, "step_00000003 has done all 3 steps, with optim.lr=0.002 (now 0.5): give the run another name")

    assert main(monkeypatch, *settings, "parallel.schedule=kv") == 0  # which means nothing where no step is left
    for other in ("trainer.seed=1", "optim.warmup_steps=1", "trainer.steps=2"):
        assert main(monkeypatch, *settings, other) == 1
        assert_one_error(capfd, f"step_00000003 has done all 3 steps, with {other.split('=')[0]}=")

    assert main(monkeypatch, *settings, "trainer.steps=4", "data.seed=1") == 1
    assert_one_error(capfd, "stands in another corpus")

    checkpoint = tmp_path / "outputs" / "a" / "checkpoints" / "step_00000003"
    (checkpoint / "__0_0.distcp").write_bytes(b"junk")
    assert main(monkeypatch, *settings, "trainer.steps=4") == 1
    assert_one_error(capfd, "step_00000003 is damaged")

    assert main(monkeypatch, *settings, "trainer.resume=never") == 1
    assert_one_error(capfd, "step_00000003 would be overwritten: give the run another name")
    assert main(monkeypatch, *settings, "name=b", "trainer.steps=1", "trainer.resume=never") == 0


def test_more_steps_do_not_begin_another_warmup(corpus, monkeypatch, tmp_path, capfd):
    settings = [*SMALL, f"data.path={corpus}", "name=a", "trainer.checkpoint_every=0"]
    assert main(monkeypatch, *settings, "trainer.steps=20") == 0
    assert main(monkeypatch, *settings, "trainer.steps=220", "optim.lr=1e-3") == 0
    assert "which was trained with optim.lr=0.002 (now 0.001)" in capfd.readouterr().out
    rows = metrics.read(tmp_path / "outputs" / "a" / "metrics.jsonl")
    assert [row["lr"] for row in rows[:2]] == [1e-3, 2e-3]
    assert 0.98e-3 < rows[20]["lr"] < 1e-3 and rows[20]["lr"] > rows[21]["lr"]
    summary = json.loads((tmp_path / "outputs" / "a" / "summary.json").read_text())
    assert summary["final_loss"] == pytest.approx(statistics.fmean(row["loss"] for row in rows[-22:]))


def test_a_run_from_the_checkpoint_of_another_goes_on_from_its_own(corpus, monkeypatch, tmp_path, capfd):
    settings = [*SMALL, f"data.path={corpus}", "trainer.checkpoint_every=1", "trainer.keep_checkpoints=9"]
    assert main(monkeypatch, *settings, "name=a", "trainer.steps=2") == 0
    first, second = (f"outputs/a/checkpoints/step_0000000{step}" for step in (1, 2))
    assert main(monkeypatch, *settings, "name=c", "trainer.steps=1") == 0
    branch = [*settings, "name=b", f"trainer.resume={first}"]
    assert main(monkeypatch, *branch, "trainer.steps=3") == 0
    assert f"{first}, which was trained with trainer.steps=2 (now 3)" in capfd.readouterr().out
    assert main(monkeypatch, *branch, "trainer.steps=4") == 0  # the same command, to go on
    assert f"resumed     {tmp_path}/outputs/b/checkpoints/step_00000003" in capfd.readouterr().out
    for name, other in (("b", second), ("c", first)):
        assert main(monkeypatch, *settings, f"name={name}", f"trainer.resume={other}", "trainer.steps=5") == 1
        assert_one_error(capfd, "is of a run that did not begin from it and would be lost: give the run another name")

    own = tmp_path / "outputs" / "b" / "checkpoints"
    assert main(monkeypatch, *settings, "name=b", f"trainer.resume={own}/step_00000002", "trainer.steps=3") == 0
    assert f"resumed     {own}/step_00000002" in capfd.readouterr().out
    assert sorted(path.name for path in own.iterdir()) == ["step_00000002", "step_00000003"]
    assert main(monkeypatch, *branch, "trainer.steps=3") == 0  # it has turned back, and is of the same origin
    with monkeypatch.context() as patch:
        patch.setattr("ringattn.train.trainer.take_step", Mock(side_effect=ConfigError("killed")))
        assert main(monkeypatch, *settings, "name=b", f"trainer.resume={own}/step_00000002", "trainer.steps=3") == 1
    assert storage.latest(own) == own / "step_00000002"  # killed before it saved: the next launch finds what it went back to


def test_another_mesh_or_batch_is_told_when_resuming(corpus, monkeypatch, capfd):
    settings = [*SMALL, f"data.path={corpus}", "name=a"]
    assert main(monkeypatch, *settings, "trainer.steps=1") == 0
    assert main(monkeypatch, *settings, "trainer.steps=2", "parallel.layout=zigzag", "trainer.batch_size=1") == 0
    changed = "trained with tokens_per_step=128 (now 64), parallel.layout=auto (now zigzag), trainer.steps=1 (now 2)"
    assert changed in capfd.readouterr().out


class Killed(BaseException):
    """As by kill -9: nothing catches it."""


def test_an_extended_run_that_was_killed_before_its_summary_gets_one(corpus, monkeypatch, tmp_path):
    settings = [*SMALL, f"data.path={corpus}", "name=a"]
    summary = tmp_path / "outputs" / "a" / "summary.json"
    assert main(monkeypatch, *settings, "trainer.steps=1") == 0
    with monkeypatch.context() as patched:
        patched.setattr(trainer_module, "finish", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            main(monkeypatch, *settings, "trainer.steps=2")
    parallel.stop()
    assert not summary.exists()
    assert main(monkeypatch, *settings, "trainer.steps=2") == 0
    assert json.loads(summary.read_text())["steps"] == 2


def test_a_finished_run_with_fewer_steps_has_the_summary_of_those(corpus, monkeypatch, tmp_path):
    settings = [*SMALL, f"data.path={corpus}", "name=a", "trainer.keep_checkpoints=9"]
    summary = tmp_path / "outputs" / "a" / "summary.json"
    assert main(monkeypatch, *settings, "trainer.steps=1") == 0
    first = json.loads(summary.read_text())
    assert main(monkeypatch, *settings, "trainer.steps=2") == 0
    assert main(monkeypatch, *settings, "trainer.steps=1", "trainer.resume=outputs/a/checkpoints/step_00000001") == 0
    assert {key: json.loads(summary.read_text())[key] for key in ("steps", "final_loss")} == {
        key: first[key] for key in ("steps", "final_loss")
    }


def test_a_kernel_that_cannot_take_the_model_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = Config(trainer=TrainerConfig(precision="fp32"))
    config.parallel.kernel = "hopper"
    with pytest.raises(ConfigError, match="parallel.kernel=hopper: .*torch.float32 is not fp16 or bf16"):
        run_setup._choose_kernel(config, torch.device("cuda", 7), bf16=False)


def parameters_of(path: Path) -> dict[str, torch.Tensor]:
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in stored.items() if name.startswith("model.")}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def test_a_run_from_parameters_alone(corpus, monkeypatch, tmp_path, capfd):
    settings = [*SMALL, f"data.path={corpus}", "trainer.steps=2"]
    assert main(monkeypatch, *settings, "name=a") == 0
    path = "outputs/a/checkpoints/step_00000002"
    more = [*settings, "name=b", "data.seq_len=24", "model.window=7", f"trainer.init_from={path}"]
    assert main(monkeypatch, *more, "optim.lr=1e-30") == 0
    assert "model.window=None (now 7)" in capfd.readouterr().out
    before, after = (parameters_of(tmp_path / "outputs" / name / "checkpoints" / "step_00000002") for name in "ab")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    later = [x for x in more if "init_from" not in x] + ["trainer.steps=3"]
    assert main(monkeypatch, *later) == 0  # from its own checkpoint, as the same command would
    assert main(monkeypatch, *later, f"trainer.init_from={tmp_path / path}") == 0
    assert main(monkeypatch, *later, "trainer.init_from=outputs/c") == 1
    assert_one_error(capfd, "is of a run that began with outputs/a/checkpoints/step_00000002")
    assert main(monkeypatch, *settings, "name=d", "model.ffn_dim=8", f"trainer.init_from={path}") == 1
    assert_one_error(capfd, "has shape (128, 32), in this run (8, 32)")
    assert main(monkeypatch, *settings, "name=d", "model.heads=8", "model.kv_heads=4", f"trainer.init_from={path}") == 1
    assert_one_error(capfd, f"{path} is a model of model.heads=4 (now 8), model.kv_heads=2 (now 4): set the same")


def test_other_text_of_the_same_lengths_is_another_corpus(corpus, monkeypatch, tmp_path, capfd):
    settings = [*SMALL, f"data.path={corpus}", "name=a"]
    assert main(monkeypatch, *settings, "trainer.steps=1") == 0
    for file in (tmp_path / "corpus").iterdir():
        file.write_text(file.read_text().upper())
    assert main(monkeypatch, *settings, "trainer.steps=2") == 1
    assert_one_error(capfd, "step_00000001 stands in another corpus")


def test_parameters_are_refused_another_tokenizer(corpus, monkeypatch, tmp_path, capfd):
    own, other = (write_tokenizer(tmp_path / name, letters) for name, letters in (("own.json", "abc"), ("other.json", "acb")))
    settings = [*SMALL, f"data.path={corpus}", "trainer.steps=1"]
    assert main(monkeypatch, *settings, "name=a", f"data.tokenizer={own}") == 0
    begin = [*settings, "name=b", "trainer.init_from=outputs/a/checkpoints/step_00000001"]
    assert main(monkeypatch, *begin, f"data.tokenizer={other}") == 1
    assert_one_error(
        capfd,
        f"data.tokenizer={other}, but {tmp_path}/outputs/a/checkpoints/step_00000001 was trained with another, then {own}",
    )
    (tmp_path / "moved.json").write_bytes(own.read_bytes())
    assert main(monkeypatch, *begin, f"data.tokenizer={tmp_path / 'moved.json'}") == 0

    folder = write_folder(tmp_path / "hf", tie_word_embeddings=True)
    shutil.copy(own, folder / "tokenizer.json")
    begin = [*settings, "name=c", f"trainer.init_from={folder}"]
    begin += ["model.head_dim=16", "model.ffn_dim=48", "model.vocab_size=259"]
    assert main(monkeypatch, *begin) == 1
    assert_one_error(
        capfd, f"data.tokenizer=bytes, but {folder} has one of its own, {folder}/tokenizer.json: tokens would mean"
    )
    assert main(monkeypatch, *begin, f"data.tokenizer={own}") == 0


def test_parameters_are_refused_before_the_text_is_read(corpus, monkeypatch, tmp_path, capfd):
    folder = write_folder(tmp_path / "hf")
    monkeypatch.setattr(run_setup, "load", lambda *_: pytest.fail("the text was read"))
    assert main(monkeypatch, *SMALL, f"data.path={corpus}", "name=a", f"trainer.init_from={folder}") == 1
    assert_one_error(capfd, f"{folder} is a model of model.")


def write_tokenizer(path: Path, letters: str) -> Path:
    vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", "?", *letters])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
    tokenizers.Tokenizer(model).save(str(path))
    return path


def test_a_run_that_has_ended_samples_again(corpus, monkeypatch, tmp_path):
    settings = [*SMALL, f"data.path={corpus}", "name=a", "trainer.steps=1"]
    assert main(monkeypatch, *settings) == 0
    assert not (tmp_path / "outputs" / "a" / "sample.txt").exists()
    assert main(monkeypatch, *settings, "trainer.sample_tokens=3", "trainer.sample_prompt=7 is") == 0
    assert (tmp_path / "outputs" / "a" / "sample.txt").read_text(encoding="utf-8").startswith("7 is")


def test_two_jobs_in_one_directory(corpus, monkeypatch, tmp_path, capfd):
    settings = [*SMALL, f"data.path={corpus}", "name=a", "trainer.steps=1"]
    (tmp_path / "outputs" / "a").mkdir(parents=True)
    with open(tmp_path / "outputs" / "a" / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(monkeypatch, *settings) == 1
        assert_one_error(capfd, "another process trains in ")
    assert main(monkeypatch, *settings) == 0


def test_fewer_steps_than_the_kept_warmup_are_refused(corpus, monkeypatch, capfd):
    settings = [*SMALL, f"data.path={corpus}", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=9"]
    assert main(monkeypatch, *settings, "name=a", "trainer.steps=6", "optim.warmup_steps=5") == 0
    settings += ["name=b", "trainer.resume=outputs/a/checkpoints/step_00000002"]
    assert main(monkeypatch, *settings, "trainer.steps=4") == 1
    assert_one_error(capfd, "trainer.steps=4 would end in the warmup of 5 steps that")


def test_an_error_without_an_option_names_none():
    assert run.describe(OmegaConfBaseException("out of luck\nand more")) == "out of luck"


OUTSIDE = {
    "full disk": (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device: check the disk"),
    "read-only disk": (OSError(errno.EROFS, "Read-only file system"), "[Errno 30] Read-only file system: check the disk"),
    "a rank in a ring": (
        watchdog.RingFault("ringattn: rank 1 gives no sign of life"),
        "ringattn: rank 1 gives no sign of life",
    ),
    "a rank, by gloo": (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error\nmore"), "another rank is gone, and its own"),
    "a rank, by NCCL": (
        dist.DistBackendError("NCCL error"),
        "another rank is gone, and its own output may say why",
    ),
}


@pytest.mark.parametrize(("error", "message"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_what_comes_from_outside_is_one_line(error, message, monkeypatch):
    monkeypatch.setattr(run, "end", Mock(side_effect=SystemExit))
    monkeypatch.setattr(run.dist, "get_rank", lambda: 1)
    with pytest.raises(SystemExit):
        try:
            raise error
        except Exception:
            run.crash(None)
    _, text, status = run.end.call_args.args
    assert text.startswith(f"rank 1 failed: {message}") and status == 1 and "\n" not in text


def test_a_rank_that_is_killed_ends_the_others_with_one_line(tmp_path):
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "name=a", "trainer.steps=100000"]
    with open(tmp_path / "log", "w") as log:
        options = dict(cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log)
        process = subprocess.Popen(command(2, SCRIPT, *settings, "trainer.checkpoint_every=0"), **options)
        while not metrics.read(tmp_path / "outputs" / "a" / "metrics.jsonl"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        os.kill(next(filter(is_rank_1, descendants(process.pid))), signal.SIGKILL)
        assert process.wait(60) != 0
    errors, *_ = (tmp_path / "log").read_text().split("failed (exitcode: ")  # the rest is torchrun's
    assert "Traceback" not in errors
    assert re.search(r"^rank 0 failed: (ringattn: rank 1 gives no sign of life|another rank is gone)", errors, re.MULTILINE)


def is_rank_1(pid: int) -> bool:
    return b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()


def test_each_job_has_its_own_patience(monkeypatch):
    parallel.start()
    try:
        mesh = parallel.build_mesh("cpu", 1)
        monkeypatch.setenv(watchdog.TIMEOUT, "600")
        monkeypatch.setattr(parallel, "USERS_TIMEOUT", None)
        patience = []
        for seconds in (50, 70):
            parallel.set_timeout(mesh, seconds)
            patience.append(watchdog.timeout_seconds())
        monkeypatch.setattr(parallel, "USERS_TIMEOUT", "70")
        parallel.set_timeout(mesh, 90)
        assert [*patience, watchdog.timeout_seconds()] == [50, 70, 70]
    finally:
        parallel.stop()


@pytest.mark.parametrize("in_use", [False, True], ids=["in time", "too late"])
def test_deterministic_too_late_is_told(in_use, monkeypatch, caplog):
    monkeypatch.setenv(parallel.CUBLAS, "")
    monkeypatch.delenv(parallel.CUBLAS)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    parallel.start()
    try:
        parallel.set_deterministic(True)
        assert ("set CUBLAS_WORKSPACE_CONFIG=:4096:8 before" in caplog.text) == in_use
        assert (parallel.CUBLAS in os.environ) != in_use
    finally:
        parallel.set_deterministic(False)
        parallel.stop()


def test_a_sweep_over_names_is_refused(corpus, monkeypatch, capfd):
    assert main(monkeypatch, "-m", *SMALL, f"data.path={corpus}", "name=a,b") == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and all("is one of several, which would scatter the sweep: give one name" in e for e in errors)


def test_divergence_stops_with_the_step(corpus, monkeypatch, capfd):
    settings = [*SMALL, f"data.path={corpus}", "trainer.steps=5", "optim.warmup_steps=0", "optim.lr=1e30"]
    assert main(monkeypatch, *settings) == 1
    assert_one_error(capfd, "error: step 2: the loss is")


def assert_one_error(capfd, message: str) -> None:
    output = capfd.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], output.err
    assert "Traceback" not in output.err


def test_the_first_failure_alone_is_reported(tmp_path):
    """Rank 1 fails amid training; rank 0, which then waits for it in vain, says nothing."""
    script = tmp_path / "fail.py"
    script.write_text(
        f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
from ringattn.train import run, trainer

take_step = trainer.take_step

def fail(*arguments):
    if dist.get_rank() == 1:
        raise RuntimeError("out of luck")
    return take_step(*arguments)

trainer.take_step = fail
run.main()
"""
    )
    arguments = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.steps=3"]
    result = launch(2, tmp_path, *arguments, script=script)
    assert result.returncode != 0
    errors = own_errors(result.stderr)
    assert errors.count("Traceback (most recent call last)") == 1
    assert "rank 1 failed:" in errors and "RuntimeError: out of luck" in errors


def test_our_packages_win_over_others_of_the_same_name(tmp_path):
    """Neither an installed `kernels` nor a `train/data.py` found as `data` gets in the way."""
    for name in ("kernels", "train", "ringattn"):
        (tmp_path / "decoy" / name).mkdir(parents=True)
        (tmp_path / "decoy" / name / "__init__.py").write_text("raise ImportError('a decoy')")
    result = subprocess.run(
        [sys.executable, str(ROOT / "train" / "run.py"), "--cfg", "job", "trainer.steps=7"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "decoy")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "steps: 7" in result.stdout and not (tmp_path / "outputs").exists()


def test_ranks_agree_on_an_error():
    parallel.start()
    try:
        with parallel.sync_errors():
            pass
        with pytest.raises(ConfigError, match="one file is missing"), parallel.sync_errors():
            raise ConfigError("one file is missing")
    finally:
        parallel.stop()


def test_checkpoints_come_regularly_and_at_the_end():
    assert [step for step in range(1, 8) if trainer_module.is_due(step, every=3, steps=7)] == [3, 6, 7]
    assert [step for step in range(1, 4) if trainer_module.is_due(step, every=0, steps=3)] == [3]


def test_a_setting_that_a_checkpoint_does_not_know_was_unset(corpus, monkeypatch, tmp_path, capfd):
    settings = [*SMALL, f"data.path={corpus}", "name=a"]
    assert main(monkeypatch, *settings, "trainer.steps=1") == 0
    path = tmp_path / "outputs" / "a" / "checkpoints" / "step_00000001" / "meta.json"
    meta = json.loads(path.read_text())
    for name in ("rope_factor", "rope_trained_len", "rope_scaling", "qkv_bias", "qk_norm"):
        del meta["config"]["model"][name]
    meta["config"]["model"]["rope_trained_len"] = 8192  # which means nothing there
    path.write_text(json.dumps(meta))
    assert main(monkeypatch, *settings, "trainer.steps=2", "model.rope_factor=8", "model.rope_trained_len=64") == 1
    assert_one_error(capfd, "was trained with model.rope_factor=None (now 8.0)")
    assert main(monkeypatch, *settings, "trainer.steps=2") == 0
