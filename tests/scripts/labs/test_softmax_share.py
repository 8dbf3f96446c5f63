from pathlib import Path

import pytest
import torch

from scripts.labs import softmax_share
from scripts.labs.naive_attention import STEPS, Sizes, random_inputs


def test_flops_of_the_products_grow_with_the_head_dim() -> None:
    flops = softmax_share.step_flops(8, Sizes([8], 3, 16, torch.float32))
    assert list(flops) == list(STEPS)
    assert flops["S = Q K^T"] == flops["O = P V"] == 3 * 8 * 8 * 2 * 16
    assert flops["softmax"] == 5 * flops["scale"] == 5 * 3 * 8 * 8


def test_every_step_has_a_time() -> None:
    inputs = random_inputs(64, Sizes([64], 2, 16, torch.float32), torch.device("cpu"), 3)
    times = softmax_share.step_times(inputs)
    assert list(times) == list(STEPS)
    assert min(times.values()) > 0
    assert sum(softmax_share.shares(times).values()) == pytest.approx(1)


@pytest.mark.slow
def test_table_and_picture_are_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "lab.png"
    softmax_share.main(["--device", "cpu", "--length", "64", "--output", str(path)])
    rows = [row.strip("| ").split(" | ")[0] for row in capsys.readouterr().out.splitlines()[2:9]]
    assert rows == [*STEPS, "naive attention", "tiled attention"]
    assert path.stat().st_size < 100_000
