"""The ring in real processes: gloo on CPUs, NCCL on GPUs."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn import Layout
from ringattn.layout import KINDS
from tests.distributed import run_ranks
from tests.ringattn.rings import Case, assert_close, masks

GPUS = torch.cuda.device_count()


def check_rings(seq_len: int, dim: int, dtype: torch.dtype, backend: str, tolerance: float, device: str = "cpu") -> None:
    """On every rank: each layout, mask and schedule over all ranks of the job, against float64 on one rank."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    case = Case.random(seq_len=seq_len, batch=2, dim=dim, value_dim=dim).to(dtype)
    for mask in masks(seq_len).values():
        exact = case.to(torch.float64).unsharded(mask)
        for kind, schedule in product(KINDS, ("state", "kv")):
            layout = Layout(kind, seq_len, ranks)
            shards = case.to(device).on_rank(layout, mask, rank, group, schedule=schedule, backend=backend)
            assert_close([layout.unshard(shard, group=group).cpu() for shard in shards], exact, tolerance)


def check_subgroups() -> None:
    """Two rings of two ranks in one job, whose ranks are not those of the world."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, case, layout = groups[rank % 2], Case.random(seq_len=21, seed=rank % 2), Layout.zigzag(21, 2)
    mask = masks(21)["causal"]
    shards = case.on_rank(layout, mask, group.rank(), group)
    assert_close([layout.unshard(shard, group=group) for shard in shards], case.unsharded(mask), 1e-10)


def check_gloo() -> None:
    check_rings(33, 8, torch.float64, "reference", 1e-10)
    check_rings(33, 8, torch.float32, "auto", 1e-5)
    if dist.get_world_size() == 4:
        check_subgroups()


@pytest.mark.parametrize("ranks", (1, 2, 3, 4), ids=lambda n: f"P{n}")
def test_gloo(ranks: int, tmp_path: Path) -> None:
    run_ranks(check_gloo, ranks, tmp_path / "ranks")


def check_nccl() -> None:
    device = f"cuda:{dist.get_rank()}"
    check_rings(515, 64, torch.float32, "triton", 1e-5, device)
    check_rings(515, 64, torch.bfloat16, "triton", 2e-2, device)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", (2, 4), ids=lambda n: f"P{n}")
def test_nccl(ranks: int, tmp_path: Path) -> None:
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs")
    run_ranks(check_nccl, ranks, tmp_path / "ranks", backend="nccl")
