"""The plain Triton kernels around the main kernel of the Hopper backward, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.hopper import backward as hopper_backward

BATCH, HEADS = 2, 3


def prepare(config: hopper_backward.Config, lse: Tensor, *rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """scalars (B, H, tiles, 2, rows of a tile) and the sums of dq, a flat tensor, behind the spare chunk."""
    num_queries = lse.shape[1]
    num_tiles = -(-num_queries // config.queries)
    scalars = torch.full((BATCH, HEADS, num_tiles, 2, config.queries), float("nan"), device=lse.device)
    size = config.chunk_size + BATCH * HEADS * num_tiles * config.queries * config.dim
    dq_sums = torch.full((size,), float("nan"), device=lse.device)
    hopper_backward._prepare_kernel[(BATCH * HEADS * num_tiles,)](
        lse, *rows, scalars, dq_sums, num_tiles, num_queries, CONFIG=config
    )
    return scalars, dq_sums


@pytest.mark.parametrize("given", ("delta", "out", "out and dlse"))
@pytest.mark.parametrize("dims", ((128, 120), (64, 64)), ids=str)
def test_prepare(dims, given, device):
    num_queries = 150
    config = hopper_backward._configure(*dims, HEADS, HEADS, (False, False, False))
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, num_queries, HEADS
    out, dout = (torch.randn(*shape, dims[1], generator=generator, dtype=torch.float16).to(device) for _ in range(2))
    lse, dlse = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    lse[:, 7] = float("-inf")
    delta = reference.row_delta(out, dout, dlse if given == "out and dlse" else None)
    rows = {"delta": (delta, None, None, None), "out": (None, out, dout, None), "out and dlse": (None, out, dout, dlse)}
    scalars, dq_sums = prepare(config, lse, *rows[given])

    by_row = scalars.transpose(2, 3).flatten(3)[..., :num_queries].permute(2, 0, 3, 1)
    expected = torch.where(lse == float("-inf"), float("inf"), lse / torch.log(torch.tensor(2.0)))
    torch.testing.assert_close(by_row[0], expected)
    torch.testing.assert_close(by_row[1], delta, rtol=1e-4, atol=1e-4)
    assert (scalars[:, :, -1, 0, num_queries % config.queries :] == float("inf")).all()
    assert dq_sums[: config.chunk_size].isnan().all() and (dq_sums[config.chunk_size :] == 0).all()
