"""A run that is killed and launched again ends with the same bits as a run that was never killed."""

import json
from pathlib import Path

import pytest

from tests.train.launch import SMALL, launch, launch_and_kill, write_corpus

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def losses(run: Path) -> list[tuple[int, float, float | None]]:
    """The step, the loss and the loss on held-out text, for every record of the metrics."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"], record.get("eval_loss")) for record in records]


def test_a_run_killed_twice_ends_with_the_same_bits(tmp_path):
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.accumulate=2"]
    settings += ["trainer.steps=30", "trainer.checkpoint_every=5", "trainer.keep_checkpoints=3"]
    settings += ["data.split='train[:80%]'", "data.eval_split='train[80%:]'", "trainer.eval_every=5"]
    uninterrupted, killed = tmp_path / "outputs" / "uninterrupted", tmp_path / "outputs" / "killed"
    result = launch(2, tmp_path, *settings, "name=uninterrupted")
    assert result.returncode == 0, result.stderr

    for step in (10, 20):
        checkpoint = killed / "checkpoints" / f"step_{step:08d}"
        launch_and_kill(2, tmp_path, *settings, "name=killed", when=checkpoint)
    result = launch(2, tmp_path, *settings, "name=killed")
    assert result.returncode == 0, result.stderr
    assert "resumed" in result.stdout

    assert losses(killed) == losses(uninterrupted)
    assert [step for step, *_ in losses(killed)] == list(range(1, 31))
    last = Path("checkpoints") / "step_00000030"
    for file in ("__0_0.distcp", "__1_0.distcp"):  # the parameters and the optimizer state of the two ranks
        assert (killed / last / file).read_bytes() == (uninterrupted / last / file).read_bytes()
