"""The comparison of the losses of several runs."""

import json
from pathlib import Path

import pytest

from scripts.tools import compare_losses


def write_run(directory: Path, losses: list[float], seconds: float) -> Path:
    directory.mkdir()
    records = [{"step": i + 1, "loss": x, "tokens_per_s_per_rank": 100 / seconds} for i, x in enumerate(losses)]
    records[-1]["eval_loss"] = losses[-1] + 0.5
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return directory


def test_runs_are_compared_with_the_first_one(tmp_path, capsys):
    runs = write_run(tmp_path / "a", [9.0] * 10 + [2.0] * 20, 1), write_run(tmp_path / "b", [9.0] * 10 + [2.01] * 20, 0.5)
    compare_losses.main([str(tmp_path / "losses.png"), *map(str, runs)])
    first, second = capsys.readouterr().out.splitlines()[2:4]
    assert first.endswith("a | 2.0000 | +0.00% | 2.5000 | 100 |")
    assert second.endswith("b | 2.0100 | +0.50% | 2.5100 | 200 |")
    assert (tmp_path / "losses.png").stat().st_size > 5_000


def test_runs_of_different_lengths_are_an_error(tmp_path, capsys):
    runs = write_run(tmp_path / "a", [2.0] * 3, 1), write_run(tmp_path / "b", [2.0] * 4, 1)
    with pytest.raises(SystemExit):
        compare_losses.main([str(tmp_path / "losses.png"), *map(str, runs)])
    assert "a has 3" in capsys.readouterr().err


def test_table_states_over_how_many_steps_the_loss_is_a_mean(tmp_path, capsys):
    compare_losses.main([str(tmp_path / "losses.png"), str(write_run(tmp_path / "a", [2.0] * 3, 1))])
    assert "mean loss of the last 3 steps" in capsys.readouterr().out


def test_picture_that_cannot_be_written_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare_losses.main([str(tmp_path / "new" / "losses.png"), str(write_run(tmp_path / "a", [2.0] * 3, 1))])
    assert f"error: cannot write {tmp_path}/new/losses.png: [Errno 2]" in capsys.readouterr().err
