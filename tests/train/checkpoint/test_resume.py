import json

import pytest

from tests.train.launch import SMALL, launch, launch_and_kill, write_corpus

pytestmark = pytest.mark.timeout(600)


def losses(run) -> list[tuple[int, float, float | None]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row.get("eval_loss")) for row in rows]


def test_a_run_killed_twice_ends_bit_for_bit_as_one_that_was_not(tmp_path):
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.accumulate=2"]
    settings += ["trainer.steps=30", "trainer.checkpoint_every=5", "trainer.keep_checkpoints=3"]
    settings += ["data.split='train[:80%]'", "data.eval_split='train[80%:]'", "trainer.eval_every=5"]
    whole = launch(2, tmp_path, *settings, "name=whole")
    assert whole.returncode == 0, whole.stderr

    killed = tmp_path / "outputs" / "killed"
    for step in (10, 20):
        checkpoint = killed / "checkpoints" / f"step_{step:08d}"
        launch_and_kill(2, tmp_path, *settings, "name=killed", when=checkpoint)
    last = launch(2, tmp_path, *settings, "name=killed")
    assert last.returncode == 0, last.stderr
    assert "resumed" in last.stdout

    assert losses(killed) == losses(tmp_path / "outputs" / "whole")
    assert [step for step, *_ in losses(killed)] == list(range(1, 31))
    names = ["__0_0.distcp", "__1_0.distcp"]  # parameters and optimizer state of the two ranks
    end = "checkpoints/step_00000030"
    for name in names:
        assert (killed / end / name).read_bytes() == (tmp_path / "outputs" / "whole" / end / name).read_bytes()
