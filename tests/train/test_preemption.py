import logging
import os
import signal
import subprocess
import sys
import time

import datasets
import pytest
import torch

from ringattn.train import metrics, preemption, run
from ringattn.train import trainer as trainer_module
from ringattn.train.preemption import Stopped, is_asked, listening
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.launch import SCRIPT, SMALL, command, descendants, environment, write_corpus

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.setattr(preemption, "_terminated", False)


def test_sigterm_is_heard_however_often_it_comes():
    before = signal.getsignal(signal.SIGTERM)
    with listening():
        assert not is_asked(None)
        os.kill(os.getpid(), signal.SIGTERM)  # by whoever ends the job, and by torchrun
        os.kill(os.getpid(), signal.SIGTERM)
    assert is_asked(None) and signal.getsignal(signal.SIGTERM) is before


def test_time_runs_from_the_launch(monkeypatch):
    monkeypatch.setattr(preemption, "LAUNCHED", time.monotonic() - 100)
    assert [is_asked(limit) for limit in (None, 1e4, 99)] == [False, False, True]


def ask_at(step: int, rank: int):
    """A `take_step` in which SIGTERM comes at this step, to this rank."""
    take_step = trainer_module.take_step

    def asked(run, number, *arguments):
        if number == step and torch.distributed.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(run, number, *arguments)

    return asked


def small_job(corpus: str, ring: int):
    config = job(corpus, 1, ring=ring)
    config.trainer.steps, config.trainer.eval_every = 4, 2
    return config


def stop_on_one_rank(corpus: str, directory) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    take_step, trainer_module.take_step = trainer_module.take_step, ask_at(2, rank=1)
    with pytest.raises(Stopped):
        trainer_module.train(small_job(corpus, 2), directory / "stopped")
    trainer_module.take_step, preemption._terminated = take_step, False
    for name in ("stopped", "whole"):
        trainer_module.train(small_job(corpus, 2), directory / name)


def test_all_ranks_stop_where_one_is_asked_and_go_on_bit_for_bit(tmp_path):
    run_ranks(stop_on_one_rank, 2, tmp_path / "store", write_corpus(tmp_path / "corpus"), tmp_path)
    stopped, whole = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("stopped", "whole"))
    assert [row["loss"] for row in stopped] == [row["loss"] for row in whole] and len(whole) == 4
    assert "eval_loss" in whole[1] and "eval_loss" not in stopped[1]  # those who ask may not wait for long


def test_a_last_step_is_no_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(trainer_module, "take_step", ask_at(4, rank=0))
    with one_rank():
        summary = trainer_module.train(small_job(write_corpus(tmp_path / "corpus"), 1), tmp_path / "run")
    assert summary["steps"] == 4 and (tmp_path / "run" / "summary.json").exists()


def limited_after(step: int):
    """A `take_step` after whose so manieth run the launch is over its time."""
    take_step = trainer_module.take_step

    def limited(run, number, *arguments):
        if number == step:
            preemption.LAUNCHED -= 1e6
        return take_step(run, number, *arguments)

    return limited


@pytest.mark.parametrize(("step", "message"), [(2, "as asked, after step 2, which is saved"), (4, "as asked, before ")])
def test_a_time_limit_ends_a_sweep(step, message, tmp_path, monkeypatch, capfd):
    """In the last step, too, after which the job is done, but not the next."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(preemption, "LAUNCHED", preemption.LAUNCHED)
    monkeypatch.setattr(trainer_module, "take_step", limited_after(step))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.chdir(tmp_path)
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "name=a", "trainer.steps=4"]
    monkeypatch.setattr(sys, "argv", ["train/run.py", "-m", *settings, "trainer.time_limit_s=1e5", "data.seed=0,1"])
    assert run.main() == 0
    assert capfd.readouterr().out.count(f"stopped     {message}") == 1
    assert [path.name for path in (tmp_path / "outputs" / "a").glob("*/checkpoints/*")] == [f"step_0000000{step}"]
    assert (tmp_path / "outputs" / "a" / "0" / "summary.json").exists() == (step == 4)


def test_sigterm_to_all_processes_saves(tmp_path):
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "name=a", "trainer.steps=100000"]
    directory = tmp_path / "outputs" / "a"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command(2, SCRIPT, *settings, "trainer.checkpoint_every=0"),
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=log,
            stderr=log,
        )
        while not metrics.read(directory / "metrics.jsonl"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        ranks = descendants(process.pid)
        for each in (process.pid, *ranks):  # as a scheduler does; torchrun then hands it on
            os.kill(each, signal.SIGTERM)
        process.wait(60)
    steps = len(metrics.read(directory / "metrics.jsonl"))
    assert [path.name for path in (directory / "checkpoints").iterdir()] == [f"step_{steps:08d}"]
    assert f"stopped     as asked, after step {steps}, which is saved" in (tmp_path / "log").read_text()


def ask_rank_1() -> None:
    preemption._terminated = torch.distributed.get_rank() == 1
    assert preemption.any_asked(None)


def test_one_rank_that_was_asked_between_two_jobs_is_enough(tmp_path):
    run_ranks(ask_rank_1, 2, tmp_path / "store")
