"""The kernel that adds the partial gradients of several ranks, against the reference."""

import pytest
import torch

from ringattn.kernels import reference
from ringattn.kernels.triton import merge
from tests.covering import every_pair

PARTS = {  # (first token, number of tokens) of each part of a sum of 37 tokens
    "none": [],
    "all-tokens": [(0, 37)],
    "some-tokens": [(5, 11)],
    "three": [(0, 37), (0, 18), (36, 1)],
    "seven": [(i, 30 - i) for i in range(7)],
}


@every_pair(parts=PARTS, dtype=[torch.float32, torch.float16])
def test_sum_matches_the_reference(parts, dtype, device):
    generator = torch.Generator().manual_seed(0)
    base, *tensors = (torch.randn(1, n, 3, 40, generator=generator).to(device) for n in (37, *(n for _, n in PARTS[parts])))
    added = [(first, x) for (first, _), x in zip(PARTS[parts], tensors, strict=True)]
    exact = reference.sum_partials(base.double(), [(first, x.double()) for first, x in added], torch.float64)
    total = merge.sum_partials(base, added, dtype)
    assert total.dtype == dtype
    torch.testing.assert_close(total.double(), exact, rtol=2e-3 if dtype == torch.float16 else 1e-6, atol=1e-5)


def test_sum_in_fp32_is_written_to_the_base(device):
    base = torch.ones(1, 4, 2, 8, device=device)
    assert merge.sum_partials(base, [(1, torch.ones(1, 2, 2, 8, device=device))], torch.float32) is base
    assert base[0, :, 0, 0].tolist() == [1, 2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sum_of_no_tokens_is_empty(dtype, device):
    assert merge.sum_partials(torch.zeros(1, 0, 2, 8, device=device), [], dtype).shape == (1, 0, 2, 8)
