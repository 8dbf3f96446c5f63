"""The predicted bytes against the bytes that the tiles of the blockwise kernel load."""

import pytest
import torch

from ringattn import Mask, flash_attention
from ringattn.kernels.interval_mask import Intervals
from scripts.labs.blockwise_bytes import TileSize, counted_loads, predicted_loads, tile_size

LENGTH, HEADS, DIM = 256, 2, 16
# Each mask, and the largest accepted ratio of predicted to counted bytes. The model rounds loops up to whole tiles.
MASKS = {"full": (Mask.full(), 1.0), "causal": (Mask.causal(), 1.2), "window": (Mask.causal(window=100), 1.6)}
TILE = TileSize(32, 64)


def counted(mask: Mask, tile: TileSize) -> dict[str, int]:
    """Count the bytes that the tiles load in the forward pass and in the backward pass of `flash_attention`."""
    q, k, v = (torch.randn(1, LENGTH, HEADS, DIM, requires_grad=True) for _ in range(3))
    with tile_size(tile):
        with counted_loads() as forward:
            out = flash_attention(q, k, v, mask=mask, backend="blockwise")
        with counted_loads() as backward:
            out.sum().backward()
    return {"forward": forward.bytes, "backward": backward.bytes}


def predicted(mask: Mask) -> dict[str, int]:
    return predicted_loads(Intervals.of(*mask.intervals(LENGTH), LENGTH), HEADS, DIM, TILE)


def agree(predicted: dict[str, float], counted: dict[str, int], most: float) -> bool:
    """Return whether every prediction is at least the counted bytes, and at most `most` times the counted bytes."""
    return all(1 <= predicted[direction] / counted[direction] <= most for direction in ("forward", "backward"))


@pytest.mark.parametrize("name", MASKS)
def test_counted_bytes_agree_with_the_model(name: str) -> None:
    mask, most = MASKS[name]
    assert agree(predicted(mask), counted(mask, TILE), most)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [3, 1 / 3], ids=("too-many", "too-few"))
def test_error_of_the_model_by_a_factor_of_three_is_detected(factor: float) -> None:
    for mask, most in MASKS.values():
        wrong = {direction: factor * number for direction, number in predicted(mask).items()}
        assert not agree(wrong, counted(mask, TILE), most)


def test_kernel_that_loads_every_tile_three_times_is_detected() -> None:
    """With a third of the queries per tile, every key is loaded three times as often."""
    mask, most = MASKS["full"]
    assert not agree(predicted(mask), counted(mask, TileSize(TILE.queries // 3, TILE.keys)), most)


def test_traffic_with_full_attention_is_exact() -> None:
    """Every tile of 32 queries loads its queries once, and all keys and values once."""
    tiles, row = LENGTH // TILE.queries, DIM * 4
    assert counted(Mask.full(), TILE)["forward"] == HEADS * LENGTH * row * (1 + 2 * tiles)
