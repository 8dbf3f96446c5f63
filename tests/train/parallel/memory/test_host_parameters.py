"""FSDP groups in host memory have the same weights and gradients as groups on the device."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.train.model.gpt import GPT
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.host_parameters import HostGroup, StagingBuffers
from ringattn.train.parallel.memory.pinned import empty_pinned
from ringattn.train.parallel.mesh import build_mesh
from ringattn.train.parallel.shard import shard_model
from ringattn.train.settings.config import ModelConfig
from tests.distributed import run_ranks

# Neither the width nor the vocabulary is a multiple of the three ranks.
MODEL = ModelConfig(layers=3, dim=32, heads=4, kv_heads=2, qkv_bias=True)


def build(host_blocks: int, bf16: bool) -> tuple[GPT, list[HostGroup]]:
    estimate.GROUP_BYTES = estimate._block_bytes(MODEL, bf16)  # one block per group
    with torch.device("meta"):
        model = GPT(MODEL, 257)
    mesh = build_mesh("cpu", dist.get_world_size())
    return model, shard_model(model, mesh, torch.device("cpu"), 3, bf16, host_blocks)


def backward(model: GPT, token: int) -> None:
    tokens = torch.tensor([[token, dist.get_rank()]])
    model(
        tokens, torch.arange(2), lambda q, k, v: q + k.mean() + v.mean(), lambda x, head: (x @ head.T).square().sum()
    ).backward()


def gradients(model: GPT, groups: list[HostGroup]) -> dict[str, Tensor]:
    """This rank's shard of every gradient, and its norm."""
    host = {p: g for group in groups for p, g in zip(group.parameters, group.gradients, strict=True)}
    norms = {p: norm for group in groups for p, norm in group.norms.items()}
    found = {}
    for name, p in model.named_parameters():
        assert (p.grad is None) == (p in host)
        found[name] = host[p].clone() if p in host else p.grad.to_local().clone()
        found[f"norm of {name}"] = norms[p] if p in host else torch._foreach_norm([p.grad.to_local()])[0]
    return found


def test_gradients_are_those_of_the_device(tmp_path: Path) -> None:
    run_ranks(_check, 3, tmp_path)


def _check() -> None:
    for bf16 in (False, True):
        model, groups = build(0, bf16)
        other, host_groups = build(2, bf16)
        assert (len(groups), len(host_groups)) == (0, 2)
        for name, weight in model.state_dict().items():
            assert torch.equal(weight.full_tensor(), other.state_dict()[name].full_tensor()), name
        for step in range(2):
            for token in (2 * step, 2 * step + 1):
                backward(model, token)
                backward(other, token)
            expected, found = gradients(model, groups), gradients(other, host_groups)
            assert all(expected[f"norm of blocks.2.{name}.weight"] > 0 for name in ("query", "down"))
            for name in expected:
                assert torch.equal(expected[name], found[name]), (step, name)
            for p in (*model.parameters(), *other.parameters()):
                p.grad = None
            for group in host_groups:
                group.clear_gradients()


@pytest.mark.gpu
def test_weights_stay_in_their_buffer_until_late_kernels_have_read_them() -> None:
    """Copies never stop the host. Without the wait for the previous reader of a buffer, its kernel would read later weights."""
    device, size, results = torch.device("cuda", 0), 2**24, []
    staging = StagingBuffers(device)
    staging.reserve(size)
    weights = [empty_pinned(size, device).fill_(group) for group in range(6)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for group in range(6):
            staging.begin_group()
            parts = [staging.copy(part, start) for start, part in zip((0, size // 2), weights[group].chunk(2), strict=True)]
            torch.cuda._sleep(20_000_000)
            results += [part.eq(group).all() for part in parts]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(results).all()
