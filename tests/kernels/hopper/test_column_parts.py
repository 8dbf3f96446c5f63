"""The products in parts, whose source runs in the emulator of `tests.kernels.gluon_emulator`, so that no GPU is needed."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ringattn.kernels.hopper import column_parts, common
from tests.kernels import gluon_emulator
from tests.kernels.gluon_emulator import Shared


@contextmanager
def partition():
    """Run the products of this thread as those of a partition."""
    gluon_emulator._partition.products = []
    yield SimpleNamespace(**gluon_emulator.source_functions([common, column_parts]))
    assert not gluon_emulator._partition.products, "a product was not waited for"


def padded_tile(rows: int, columns: int) -> torch.Tensor:
    """Return a random tile whose number of columns is a power of two. Columns from `columns` on are NaN, so no product may use
    them.
    """
    tile = torch.full((rows, 64 if columns == 64 else 128), float("nan"), dtype=torch.float64)
    tile[:, :columns] = torch.randn(rows, columns, dtype=torch.float64)
    return tile


@pytest.mark.parametrize("in_registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize("columns", [64, 96, 128])
def test_products_of_rows_skip_unused_columns(columns, in_registers):
    left, right = padded_tile(64, columns), padded_tile(32, columns)
    with partition() as run:
        parts = run.load_left(Shared(left), 32, columns) if in_registers else run.split_tile(Shared(left), columns)
        product = run.warpgroup_mma_wait(0, (run.multiply_rows(parts, Shared(right), columns),))
    torch.testing.assert_close(product, left[:, :columns] @ right[:, :columns].T)


@pytest.mark.parametrize("columns", [64, 96, 128])
def test_sums_of_products_skip_unused_columns(columns):
    left, right = torch.randn(64, 32, dtype=torch.float64), padded_tile(32, columns)
    with partition() as run:
        sums = run.zero_parts(columns)
        for _ in range(2):
            pending = run.add_product(left, Shared(right), sums, columns)
            assert len(gluon_emulator._partition.products) == run.num_parts(columns)
            sums = run.wait_for_parts(pending, 0, run.num_parts(columns))
        joined = run.join_parts(sums, columns)
    assert joined.shape == (64, right.shape[1])
    torch.testing.assert_close(joined[:, :columns], 2 * left @ right[:, :columns])
    assert (joined[:, columns:] == 0).all()
