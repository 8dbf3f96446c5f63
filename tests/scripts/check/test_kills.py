"""Tests of the check that kills training runs."""

import os
import random
import signal
import subprocess
import sys

import pytest

from scripts.check import kills


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_survive_kills(capsys: pytest.CaptureFixture) -> None:
    """Two launchers restart one run. Another run is killed twice and launched again.

    With this seed, the kills happen inside a save, inside an evaluation and at a random moment.
    """
    arguments = ["--kills", "3", "--kills-per-run", "2", "--seed", "10", "--ways", "fork", "two launchers"]
    settings = ["trainer.steps=40", "trainer.eval_tokens=1024", "trainer.accumulate=2"]
    assert kills.main([*arguments, "--settings", *settings]) == 0
    output = capsys.readouterr().out
    assert "3 of 3 kills" in output
    assert all(f"{moment}: " in output for moment in kills.MOMENTS)


def test_processes_of_a_run_are_found_and_killed(tmp_path) -> None:
    run = kills.Run(tmp_path, "test-of-kills", "worker")
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {kills.MARKER: str(run.directory)}
    )
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert run.processes() == [process.pid]
        assert kills.kill_one(run, [launcher], random.Random(0))
        assert process.wait(60) == -signal.SIGKILL
        assert kills.check_no_process_left(run) < 10
    finally:
        launcher.kill()
        launcher.wait()


def test_a_run_that_starts_again_in_spite_of_a_checkpoint_is_noticed(tmp_path) -> None:
    run = kills.Run(tmp_path, "a", "worker")
    kills.check_resumed_steps(run, "resumed     outputs/a/checkpoints/step_00000014\nstep 15/20", "step_00000014")
    kills.check_resumed_steps(run, "step 1/20", None)
    for log in ("resumed     outputs/a/checkpoints/step_00000007\nstep 8/20", "step 1/20"):
        with pytest.raises(AssertionError, match="step_00000014 was complete"):
            kills.check_resumed_steps(run, log, "step_00000014")


@pytest.mark.parametrize(
    ("lines", "running"),
    [("", set()), ('{"step": 9}', set()), ('{"step": 10}', {"10"}), ('{"step": 10, "eval_loss": 1.0}', set())],
)
def test_a_running_evaluation_is_found(lines, running, tmp_path) -> None:
    run = kills.Run(tmp_path, "a", "worker")
    run.directory.mkdir(parents=True)
    (run.directory / "metrics.jsonl").write_text(lines)
    assert kills.evaluations(run) == running
