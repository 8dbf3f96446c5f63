"""Predicted receive buffers equal those of the transport, and are part of memory plans."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn.comm.all_to_all import TokenSlice
from ringattn.comm.nvlink import Slots, padded_bytes
from ringattn.planning.rank_plan import Plan
from ringattn.planning.ulysses_degree import MAX_PLANNED_POSITIONS
from ringattn.train.parallel.memory.capacity import RECEIVE_BUFFERS, Capacity
from ringattn.train.parallel.memory.choice import choose_plan
from ringattn.train.parallel.memory.receive_buffers import receive_bytes
from ringattn.train.parallel.mesh import MeshShape, causal_masks, choose_layout
from ringattn.train.parallel.timing import Gpu, Machine
from ringattn.train.settings.config import Config, DataConfig, ModelConfig, ParallelConfig
from ringattn.ulysses import _HeadChunks

MIB = 2**20
LLAMA = ModelConfig(layers=2, dim=4096, heads=32, kv_heads=8, ffn_dim=14336)
MACHINE = Machine(torch.device("cuda"), Gpu.named("NVIDIA H200", 9), 8, 8, 257, True, True, Capacity(2.0**37, 2.0**37))
RING = MeshShape(1, 4, 1)


def job(seq_len: int, model: ModelConfig = LLAMA, **parallel: str) -> Config:
    return Config(model=model, data=DataConfig(seq_len=seq_len), parallel=ParallelConfig(**parallel))


def empty(rows: int, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(1, rows, *sizes, dtype=dtype, device="meta")


def used_bytes(config: Config, schedule: str) -> int:
    """Return the bytes that the transport reserves for the larger pass of a ring of four ranks, without chunks of heads."""
    masks, model, fp32 = causal_masks(config.model), config.model, torch.float32
    (mask,) = masks.values()
    layout = choose_layout(config, RING, masks)
    plan, rows = Plan(mask, layout, 0, torch.device("cpu")), layout.rows(0)
    q, k = (empty(rows, heads, 128) for heads in (model.heads, model.kv_heads))
    dq, dk, lse = q.to(fp32), k.to(fp32), empty(rows, model.heads, dtype=fp32)
    if schedule == "kv":
        passes = {"forward": ((k, k), ()), "backward": ((k, k), (dk, dk))}
    else:
        passes = {"forward": ((q,), (lse, lse, dq)), "backward": ((q, q, lse, lse), (dq,))}
    return max(
        Slots(plan.schedule(schedule, bool(result), True), {"block": block, "result": result}).total_bytes
        for block, result in passes.values()
    )


@pytest.mark.parametrize("schedule", ["kv", "state"])
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("length", [8192, 2 * MAX_PLANNED_POSITIONS])
def test_a_ring_reserves_the_slots_of_its_larger_pass(schedule, window, length):
    config = job(length, replace(LLAMA, window=window), schedule=schedule)
    expected = used_bytes(config, schedule)
    assert receive_bytes(config, RING, MACHINE) == pytest.approx(expected, rel=0.01)
    assert expected > 2 * MIB


def test_three_blocks_and_three_results_of_the_8b_model():
    """K and v of 32,768 tokens have 128 MiB. Dk and dv have 256 MiB."""
    assert receive_bytes(job(131_072), RING, MACHINE) == 3 * (128 + 256) * MIB


def test_the_all_to_all_reserves_everything_that_the_backward_pass_collects_and_returns():
    sizes = list[int]()
    heads: Any = object.__new__(_HeadChunks)
    heads.tokens, heads.ranks, heads.rank, heads.chunks = TokenSlice((2048,) * 4), 4, 0, 2
    heads.all_to_all = SimpleNamespace(
        start=lambda into, lengths, sends=1: sizes.extend(padded_bytes(x, max(lengths)) for x in into)
    )
    q, k = empty(2048, 32, 128), empty(2048, 8, 128)
    heads.to_heads(q, k, k, q)
    heads.to_tokens(q, k, k)
    assert receive_bytes(job(8192), MeshShape(1, 1, 4), MACHINE) == sum(sizes)
    # Two groups of two ranks, which a ring connects, exchange tensors of the same sizes.
    assert receive_bytes(job(8192), MeshShape(1, 2, 2), MACHINE) > sum(sizes)


@pytest.mark.parametrize(
    ("shape", "machine", "parallel"),
    [
        (MeshShape(4, 1, 1), MACHINE, {}),
        (MeshShape(1, 16, 1), MACHINE, {}),
        (RING, MACHINE, {"route": "relay"}),
        (RING, MACHINE._replace(device=torch.device("cpu")), {}),
    ],
)
def test_other_transports_have_no_receive_buffers(shape, machine, parallel):
    assert receive_bytes(job(8192, **parallel), shape, machine) == 0


def test_memory_plans_contain_the_receive_buffers(monkeypatch):
    config = job(131_072)
    _, needs = choose_plan(config, RING, MACHINE)
    assert needs.device[RECEIVE_BUFFERS] == 3 * (128 + 256) * MIB
    assert needs.allocated == sum(needs.device.values()) - needs.device[RECEIVE_BUFFERS]
    monkeypatch.setenv("RINGATTN_TRANSPORT", "p2p")
    assert choose_plan(config, RING, MACHINE)[1].device[RECEIVE_BUFFERS] == 0
