"""Tests that ranks with different batches are named."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn import check_same, simulate
from tests.distributed import run_ranks


def ids(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# The batch of a rank, and the ranks of a group of three whose batch differs from that of the others.
BATCHES = [
    (lambda rank: ids(1, 2), []),
    (lambda rank: {"ids": ids(1), "more": [(ids(2), None, "x", 3, 0.5, True)]}, []),
    (lambda rank: {"a": ids(1), "b": ids(2)} if rank else {"b": ids(2), "a": ids(1)}, []),  # another order of the names
    (lambda rank: torch.arange(6).view(2, 3).T if rank else torch.tensor([[0, 3], [1, 4], [2, 5]]), []),  # another stride
    (lambda rank: torch.tensor([float("nan"), -1.0]).bfloat16(), []),
    (lambda rank: [torch.zeros(0), torch.tensor(True), torch.tensor(1j).conj()], []),
    (lambda rank: ids(1, rank), [1, 2]),
    (lambda rank: ids(1, rank == 1), [1]),
    (lambda rank: ids(1, rank == 0), [0]),  # the other two agree
    (lambda rank: {"ids": ids(1), "labels": [ids(7), (ids(rank // 2),)]}, [2]),
    (lambda rank: (ids(1), [5, 3] if rank else [3, 5]), [0]),  # the lengths of documents
    (lambda rank: ids(1, 2).view(1, 2) if rank == 2 else ids(1, 2), [2]),
    (lambda rank: ids(0, dtype=torch.int32) if rank == 2 else ids(0, dtype=torch.float32).float(), [2]),
    (lambda rank: {"a" if rank == 2 else "b": ids(1)}, [2]),
    (lambda rank: [ids(1), ids(2)] if rank == 2 else [ids(1, 2)], [2]),
    (lambda rank: None if rank == 2 else ids(1), [2]),
]


def check_batches() -> None:
    rank = dist.get_rank()
    for i, (batch, different) in enumerate(BATCHES):
        message = None
        try:
            check_same(batch(rank), dist.group.WORLD)
        except ValueError as error:
            message = str(error)
        named = (
            f"rank {', '.join(map(str, different))} of the group has another batch than rank {0 if 0 not in different else 1}:"
        )
        assert (message is None) if not different else (message or "").startswith(named), f"batch {i}: {message}"
        assert "\n" not in (message or "")
    with pytest.raises(ValueError, match="group=None would compare nothing"):
        check_same(ids(1), None)


def test_ranks_with_different_batches_are_named(tmp_path: Path) -> None:
    """Names, nesting, shapes, dtypes and bits of a batch are compared; its strides and the order of names are not."""
    run_ranks(check_batches, 3, tmp_path)


@pytest.mark.parametrize("batch", [{1}, torch.eye(2).to_sparse(), [iter("x")]], ids=type)
def test_a_batch_of_other_types_is_an_error(batch: object) -> None:
    with pytest.raises(ValueError, match="batch contains a"):
        check_same(batch, None)
    check_same(ids(1), None)
    simulate(2, lambda rank, group: check_same(ids(1), group))
