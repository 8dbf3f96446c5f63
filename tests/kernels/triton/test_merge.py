"""Gradients of several ranks, added up and rounded at once."""

import pytest
import torch

from ringattn.kernels import dispatch, reference
from ringattn.kernels.triton import merge

PARTS = {  # (first row, rows) of each, of 37 rows
    "none": [],
    "all-rows": [(0, 37)],
    "some-rows": [(5, 11)],
    "three": [(0, 37), (0, 18), (36, 1)],
    "seven": [(i, 30 - i) for i in range(7)],
}


def make(parts: list[tuple[int, int]], batch: int, device: torch.device) -> tuple:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(batch, rows, 3, 40, generator=generator).to(device)

    return normal(37), [(first, normal(rows)) for first, rows in parts]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("parts", PARTS)
def test_total(parts: str, dtype: torch.dtype, device: torch.device) -> None:
    base, added = make(PARTS[parts], 1, device)
    exact = reference.total(base.double(), [(first, x.double()) for first, x in added], torch.float64)
    got = merge.total(base, added, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=2e-3 if dtype == torch.float16 else 1e-6, atol=1e-5)


@pytest.mark.parametrize("batch", (1, 2))
def test_any_device_and_batch(batch: int, device: torch.device) -> None:
    base, added = make(PARTS["three"], batch, device)
    exact = base.double()
    for first, x in added:
        exact[:, first : first + x.shape[1]] += x
    torch.testing.assert_close(dispatch.total(base, added, torch.float32).double(), exact, rtol=1e-6, atol=1e-6)


def test_no_rows(device: torch.device) -> None:
    assert merge.total(torch.zeros(1, 0, 2, 8, device=device), [], torch.float16).shape == (1, 0, 2, 8)
