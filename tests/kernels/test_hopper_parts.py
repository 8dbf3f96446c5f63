"""The plain Triton kernels around the main kernel of the Hopper backward, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from kernels import hopper_backward, intervals, reference
from tests.kernels.masks import intervals_of

BATCH, HEADS = 2, 3


def prepare(
    config: hopper_backward.Config, rows: tuple[Tensor | None, ...], lo: Tensor, hi: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """scalars (B, H, tiles, 2, rows of a tile), dq_sums (B, H, tiles, ...) and transposed intervals (B or 1, 2, keys)."""
    num_queries, block = lo.shape[1], hopper_backward.KEYS.value
    num_blocks, num_tiles = -(-num_keys // block), -(-num_queries // config.queries)
    scalars = torch.full((BATCH, HEADS, num_tiles, 2, config.queries), float("nan"), device=lo.device)
    dq_sums = torch.full((BATCH, HEADS, num_tiles, config.queries * config.dim), float("nan"), device=lo.device)
    transposed = torch.full((lo.shape[0], 2, num_blocks * block), -1, dtype=torch.int32, device=lo.device)
    num_searches = lo.shape[0] * num_blocks
    hopper_backward._prepare_kernel[(num_searches + BATCH * HEADS * num_tiles,)](
        *rows, lo, hi, scalars, dq_sums, transposed, num_queries, num_keys, num_blocks, num_tiles, num_searches, CONFIG=config
    )
    return scalars, dq_sums, transposed


@pytest.mark.parametrize("given", ("delta", "out", "out and dlse"))
@pytest.mark.parametrize("dims", ((128, 120), (64, 64)), ids=str)
def test_prepare(dims, given, device):
    num_queries, num_keys = 150, 200
    lo, hi = (x.to(device) for x in intervals_of("window", num_queries, num_keys))
    config = hopper_backward._configure(*dims, HEADS, HEADS, (False, False, False))
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, num_queries, HEADS
    out, dout = (torch.randn(*shape, dims[1], generator=generator, dtype=torch.float16).to(device) for _ in range(2))
    lse, dlse = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    lse[:, 7] = float("-inf")
    delta = reference.row_delta(out, dout, dlse if given == "out and dlse" else None)
    rows = {"delta": (delta, None, None, None), "out": (None, out, dout, None), "out and dlse": (None, out, dout, dlse)}
    scalars, dq_sums, transposed = prepare(config, (lse, *rows[given]), lo, hi, num_keys)

    by_row = scalars.transpose(2, 3).flatten(3)[..., :num_queries].permute(2, 0, 3, 1)
    expected = torch.where(lse == float("-inf"), float("inf"), lse / torch.log(torch.tensor(2.0)))
    torch.testing.assert_close(by_row[0], expected)
    torch.testing.assert_close(by_row[1], delta, rtol=1e-4, atol=1e-4)
    assert (scalars[:, :, -1, 0, num_queries % config.queries :] == float("inf")).all()
    assert (dq_sums == 0).all()
    for got, exact in zip(transposed[:, :, :num_keys].unbind(1), intervals.transpose(lo, hi, num_keys), strict=True):
        assert torch.equal(got, exact)
    assert (transposed[:, 0, num_keys:] >= num_queries).all()
