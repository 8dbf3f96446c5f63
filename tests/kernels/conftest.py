"""In these tests, fresh memory is filled with NaN, so that an element that no kernel wrote is noticed."""

import pytest
import torch

ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(poison: None) -> None:
    """Apply the fixture `poison` to every test of this folder."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Triton kernels use small tiles, so that short sequences have several tiles."""
    from ringattn.kernels.triton import common as triton_common  # these import Triton, which some machines do not have
    from tests.kernels.triton.problems import SMALL_TILE

    choose_tile = triton_common.choose_tile

    def choose_small_tile(kernel: str, dtype: torch.dtype, head_dim: int) -> triton_common.Tile:
        # The usual fp32 tile is small already, and a larger one may not fit into the shared memory of a GPU.
        return choose_tile(kernel, dtype, head_dim) if ON_GPU and dtype == torch.float32 else SMALL_TILE

    monkeypatch.setattr(triton_common, "choose_tile", choose_small_tile)
