"""The kernel that rounds a matrix to FP8 in both orders, against PyTorch."""

import pytest
import torch

from ringattn.kernels.triton.round_both import round_both
from tests.covering import every_pair


@every_pair(rows=[1, 48, 128, 301], columns=[16, 80, 128], dtype=[torch.float8_e4m3fn, torch.float8_e5m2])
def test_results_are_those_of_pytorch(rows, columns, dtype, device):
    # Triton's interpreter computes with bf16 incorrectly.
    sixteen_bits = torch.bfloat16 if device.type == "cuda" else torch.float16
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(device, sixteen_bits)
    scale = torch.finfo(dtype).max / x.abs().amax().float()
    padded = -(-rows // 16) * 16
    # The kernel must write every element, also the padding.
    rounded, transposed = (torch.full(shape, 1.0, device=device).to(dtype) for shape in ((rows, columns), (columns, padded)))
    round_both(x, scale, rounded, transposed)
    if x.is_cuda:  # Triton's interpreter does not round correctly
        assert torch.equal(rounded.view(torch.uint8), (x.float() * scale).to(dtype).view(torch.uint8))
    assert torch.equal(transposed[:, :rows].view(torch.uint8), rounded.t().view(torch.uint8))
    assert not transposed[:, rows:].float().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_become_nan(value, device):
    """The scale of a matrix with such a number is NaN or 0."""
    x = torch.tensor([[value, 1.0] * 8], dtype=torch.float16, device=device)
    rounded, transposed = (torch.empty(shape, dtype=torch.float8_e5m2, device=device) for shape in ((1, 16), (16, 16)))
    round_both(x, torch.finfo(rounded.dtype).max / x.abs().amax().float(), rounded, transposed)
    assert rounded[0, 0].isnan()
    assert transposed[0, 0].isnan()


def test_other_dtypes_are_rejected(device):
    x = torch.ones(16, 16, device=device)
    with pytest.raises(TypeError, match=r"x has the dtype torch\.float32: round_both requires"):
        round_both(x, x[0, 0], x, x)
