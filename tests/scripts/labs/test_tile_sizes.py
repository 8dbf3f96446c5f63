from pathlib import Path

import pytest
import torch

from scripts.labs import tile_sizes
from scripts.labs.blockwise_bytes import TileSize
from scripts.labs.naive_attention import Sizes

KIB = 2**10


@pytest.mark.slow
def test_traffic_of_every_tile_size_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "lab.png"
    sizes = ["--queries", "32", "128", "--keys", "64", "16"]
    tile_sizes.main(["--device", "cpu", "--length", "128", *sizes, "--output", str(path)])
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()[2:6]]
    assert [row[:2] for row in rows] == [["32", "16"], ["32", "64"], ["128", "16"], ["128", "64"]]
    # A tile of 128 queries loads every key and value once, whatever the number of keys of a tile.
    assert {row[2] for row in rows[2:]} == {"0.2"}
    assert {row[5] for row in rows[2:]} == {"0.2 MiB counted"}
    assert path.stat().st_size < 100_000


def test_traffic_depends_on_both_sides_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of q, k or v has 64 bytes. Every tile of queries loads the tiles of keys up to its last query."""
    monkeypatch.setattr(tile_sizes.measure, "milliseconds", lambda call, device: 1.0)
    points = tile_sizes.sweep(Sizes([64], 1, 16, torch.float32), [16, 64], [16, 64], torch.device("cpu"))
    rows = {(16, 16): 16 + 32 + 48 + 64, (16, 64): 4 * 64, (64, 16): 64, (64, 64): 64}
    assert {point.tile: point.traffic for point in points} == {tile: 64 * (64 + 2 * keys) for tile, keys in rows.items()}


def test_memory_of_a_tile_grows_with_both_sides() -> None:
    inputs = [torch.randn(1, 64, 2, 16) for _ in range(3)]
    memory = [tile_sizes.measure_blockwise(TileSize(*tile), 1, inputs).on_chip for tile in ((16, 16), (32, 16), (16, 32))]
    # q, o, k and v have 16 columns, and the scores and probabilities have one column per key.
    assert memory == [(64 * 16 + 2 * 16 * 16) * 4, (96 * 16 + 2 * 32 * 16) * 4, (96 * 16 + 2 * 16 * 32) * 4]


@pytest.mark.gpu
def test_compiled_kernels_have_the_given_tile_sizes() -> None:
    sizes = Sizes([256], 2, 64, torch.bfloat16)
    points = tile_sizes.sweep(sizes, [64, 128], [64], torch.device("cuda"))
    assert [p.tile for p in points] == [(64, 64), (128, 64)]
    assert 16 * KIB < points[0].on_chip < points[1].on_chip
