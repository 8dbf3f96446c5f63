from pathlib import Path

import pytest
import torch

from ringattn import flash_attention
from scripts.labs import measure, naive_attention
from scripts.labs.naive_attention import Sizes

CPU = torch.device("cpu")
MIB = 2**20


def test_naive_attention_computes_causal_attention() -> None:
    inputs = naive_attention.random_inputs(50, Sizes([50], 2, 16, torch.float64), CPU, 3)
    torch.testing.assert_close(naive_attention.naive_attention(*inputs), flash_attention(*inputs, is_causal=True))


@pytest.mark.slow
def test_table_and_picture_are_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "lab.png"
    naive_attention.main(["--device", "cpu", "--lengths", "64", "32", "--output", str(path)])
    rows = capsys.readouterr().out.splitlines()[2:4]
    assert [row.split(" | ")[0] for row in rows] == ["| 32", "| 64"]
    assert 1_000 < path.stat().st_size < 100_000


@pytest.mark.slow
@pytest.mark.skipif(not measure.MEMORY_FILE.exists(), reason="the limit exists only on Linux")
def test_naive_attention_stops_when_the_memory_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of 2,048 tokens and four heads need 64 MiB, and tiled attention needs a few MiB."""
    monkeypatch.setattr(measure, "milliseconds", lambda call, device: 1.0)
    sizes = Sizes([64, 2048, 2112], 4, 8, torch.float32)
    found = naive_attention.compare(sizes, CPU, 48 * MIB)
    assert list(found["naive"]) == [64, 2048]
    assert found["naive"][2048] is None
    assert found["tiled"][2112].bytes < 24 * MIB
    first, second, third = naive_attention.results_table(found, sizes.lengths).splitlines()[2:]
    assert first.startswith("| 64 | 1.00 | ")
    assert second.startswith("| 2,048 | out of memory | out of memory | 1.00 | ")
    assert third.startswith("| 2,112 | - | - | 1.00 | ")


def test_other_errors_are_not_hidden() -> None:
    def attend(q, k, v):
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        naive_attention.cost(attend, 8, Sizes([8], 1, 8, torch.float32), CPU, 64 * MIB)
