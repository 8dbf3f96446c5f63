"""Fresh memory is filled with NaN in these tests, so that an element nobody wrote shows; small tiles on request."""

import pytest
import torch

from ringattn.kernels.triton import common as triton_common

ON_GPU = torch.cuda.is_available()
SMALL_TILE = triton_common.Tile(64, 64, 8, 2) if ON_GPU else triton_common.Tile(32, 16, 8, 1)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(poison: None) -> None:
    """In every test of this folder."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles for short sequences, so that every edge of the walk occurs."""
    table = triton_common.choose_tile

    def choose_tile(kernel: str, dtype: torch.dtype, head_dim: int) -> triton_common.Tile:
        # the fp32 tile of the table is small, and a larger one may not fit into a GPU's shared memory
        return table(kernel, dtype, head_dim) if ON_GPU and dtype == torch.float32 else SMALL_TILE

    monkeypatch.setattr(triton_common, "choose_tile", choose_tile)
