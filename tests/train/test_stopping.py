import os
import signal
import subprocess
import time

import datasets
import pytest
import torch

from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.launch import SCRIPT, SMALL, command, environment, launch, write_corpus
from train import loop, metrics, stopping
from train.stopping import Stopped, requests

pytestmark = pytest.mark.timeout(300)


def test_a_first_sigterm_asks_and_a_second_one_ends():
    before = signal.getsignal(signal.SIGTERM)
    with requests(None) as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked() and signal.getsignal(signal.SIGTERM) is before
    with requests(None) as asked:
        assert not asked()
    assert signal.getsignal(signal.SIGTERM) is before


def test_time_runs_from_the_launch(monkeypatch):
    monkeypatch.setattr(stopping, "LAUNCHED", time.monotonic() - 100)
    for limit, over in ((None, False), (1e4, False), (99, True)):
        with requests(limit) as asked:
            assert asked() == over


def ask_at(step: int, rank: int):
    """A `take_step` in which SIGTERM comes at this step, to this rank."""
    take_step = loop.take_step

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
    take_step, loop.take_step = loop.take_step, ask_at(2, rank=1)
    with pytest.raises(Stopped):
        loop.train(small_job(corpus, 2), directory / "stopped")
    loop.take_step = take_step
    for name in ("stopped", "whole"):
        loop.train(small_job(corpus, 2), directory / name)


def test_all_ranks_stop_where_one_is_asked_and_go_on_bit_for_bit(tmp_path):
    run_ranks(stop_on_one_rank, 2, tmp_path / "store", write_corpus(tmp_path / "corpus"), tmp_path)
    stopped, whole = (metrics.read(tmp_path / name / "metrics.jsonl") for name in ("stopped", "whole"))
    assert [row["loss"] for row in stopped] == [row["loss"] for row in whole] and len(whole) == 4
    assert "eval_loss" in whole[1] and "eval_loss" not in stopped[1]  # those who ask may not wait for long


def test_a_last_step_is_no_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(loop, "take_step", ask_at(4, rank=0))
    with one_rank():
        summary = loop.train(small_job(write_corpus(tmp_path / "corpus"), 1), tmp_path / "run")
    assert summary["steps"] == 4 and (tmp_path / "run" / "summary.json").exists()


def test_a_time_limit_ends_a_sweep(tmp_path):
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "name=a", "trainer.steps=5"]
    result = launch(1, tmp_path, "-m", *settings, "trainer.time_limit_s=0.001", "data.seed=0,1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("stopped     as asked, after step 1, which is saved") == 1
    assert [path.name for path in (tmp_path / "outputs" / "a").glob("*/checkpoints/*")] == ["step_00000001"]
    assert not (tmp_path / "outputs" / "a" / "1").exists()


def test_sigterm_to_torchrun_saves(tmp_path):
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "name=a", "trainer.steps=100000"]
    run = tmp_path / "outputs" / "a"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            command(2, SCRIPT, *settings, "trainer.checkpoint_every=0"),
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=log,
            stderr=log,
        )
        while not metrics.read(run / "metrics.jsonl"):
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        process.terminate()
        process.wait(60)
    steps = len(metrics.read(run / "metrics.jsonl"))
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{steps:08d}"]
    assert f"stopped     as asked, after step {steps}, which is saved" in (tmp_path / "log").read_text()
