"""Tests of the profiles of a run."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from ringattn.train.reports.profiling import Profiler, profiled_steps
from ringattn.train.settings.config import TrainerConfig
from tests.train.launch import SMALL


@pytest.mark.parametrize(
    ("choice", "done", "steps"),
    [
        ("true", 0, [3, 4, 5]),
        ("True", 10, [13, 14, 15]),
        ("true", 16, [19, 20]),
        ("true", 19, [20]),
        ("10-12", 0, [10, 11, 12]),
        ("10-12", 11, [12]),
        ("10-12", 12, []),
        ("7-7", 0, [7]),
        ("false", 0, []),
        (None, 0, []),
    ],
)
def test_steps_of_a_launch_that_are_profiled(choice, done, steps):
    """The run has 20 steps."""
    assert list(profiled_steps(TrainerConfig(steps=20, profile=choice), done)) == steps


def profiled(trace: Path) -> list[str]:
    """The names of the steps in a trace."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted({event["name"] for event in events if event.get("name", "").startswith("step ")})


def test_run_that_stops_early_writes_the_steps_so_far(tmp_path):
    profiler = Profiler(TrainerConfig(steps=20, profile="2-9"), tmp_path, torch.device("cpu"))
    for step in (1, 2, 3):
        with profiler.profile_step(step):
            torch.ones(3).sum()
    assert not (tmp_path / "profile").exists()
    profiler.close()
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "trace-steps-2-3-rank0.json.gz"
    assert profiled(trace) == ["step 2", "step 3"]


@pytest.mark.slow
def test_profile_of_a_run(run_command_line, corpus, tmp_path, capfd):
    """The console shows the file and a viewer. A resumed run may profile other steps."""
    settings = [*SMALL, f"data.path={corpus}", "name=a", "trainer.checkpoint_every=0"]
    assert run_command_line(*settings, "trainer.steps=3", "trainer.profile=2-3") == 0
    trace = tmp_path / "outputs" / "a" / "profile" / "trace-steps-2-3-rank0.json.gz"
    output = capfd.readouterr().out
    assert str(trace.relative_to(tmp_path)) in output
    assert "ui.perfetto.dev" in output
    assert profiled(trace) == ["step 2", "step 3"]
    assert run_command_line(*settings, "trainer.steps=4", "trainer.profile=true") == 0
    assert "profile=" not in capfd.readouterr().out
    assert (trace.parent / "trace-steps-4-4-rank0.json.gz").exists()


@pytest.mark.parametrize("value", ["5-4", "0-2", "3-5", "3", "x", "1-2-3"])
def test_malformed_range_is_an_error(value, run_command_line, corpus, only_error):
    assert run_command_line(*SMALL, f"data.path={corpus}", "name=a", "trainer.steps=4", f"trainer.profile={value}") == 1
    assert f"trainer.profile={value}" in only_error()


@pytest.mark.gpu
def test_memory_snapshot(tmp_path):
    profiler = Profiler(TrainerConfig(steps=3, profile="2-3"), tmp_path, torch.device("cuda"))
    for step in (1, 2, 3):
        with profiler.profile_step(step):
            torch.ones(1000, device="cuda").sum()
    assert (tmp_path / "profile" / "memory-steps-2-3-rank0.pickle").stat().st_size > 0
    assert len(list((tmp_path / "profile").iterdir())) == 2
