"""Predict the size of the receive buffers of attention over NVLink. PyTorch's allocator does not count them."""

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringattn.comm.connect import TRANSPORT_VARIABLE
from ringattn.planning.cost_model import interconnect
from ringattn.planning.ulysses_degree import chunk_of_heads, scaled_plan
from ringattn.planning.workload import chunk_work
from ringattn.train.parallel.mesh import MeshShape, attention_inputs, causal_masks, count_layers
from ringattn.train.parallel.timing import SLOW_GPU, Machine
from ringattn.train.settings.config import Config


def receive_bytes(config: Config, shape: MeshShape, machine: Machine) -> float:
    """Return the bytes of the receive buffers on a rank, for sequences of one document.

    Only GPUs of one host communicate over NVLink. The prediction assumes that the backward pass repeats the all-to-all.
    """
    if machine.device.type != "cuda" or os.environ.get(TRANSPORT_VARIABLE) == "p2p":
        return 0
    chunks, (*qkv, out) = chunk_of_heads(*attention_inputs(config, machine.bf16), shape.sequence, shape.ulysses)
    total = 0.0
    if 1 < shape.ulysses <= machine.ranks_per_host:
        # The all-to-all of the backward pass collects q, k, v and dout, and returns dq, dk and dv.
        total += config.data.seq_len / shape.ring * chunks * sum(x.nbytes for x in (*qkv, *qkv, out))
    if shape.ring > 1 and shape.sequence <= machine.ranks_per_host and config.parallel.route != "relay":
        total += max(_ring_bytes(config, shape.ring, machine, qkv))
    return total


def _ring_bytes(config: Config, ranks: int, machine: Machine, qkv: Sequence[Tensor]) -> Iterator[int]:
    from ringattn.comm.nvlink import Slots  # requires a torch build with symmetric memory

    seq_len, parallel, layers = config.data.seq_len, config.parallel, count_layers(config.model, causal_masks(config.model))
    joined = interconnect("nvlink", flops=(machine.gpu or SLOW_GPU).attention)
    for mask in layers:
        plan, scale = scaled_plan(mask, layers, (parallel.layout, seq_len, ranks))
        q, k, v = qkv
        for work in chunk_work(q, k, v, mask.pairs(seq_len)[0] / ranks, config.trainer.attention_precision(True))[1]:
            work = work.scaled(scale)
            name, _ = plan.choose(parallel.schedule, work, joined)
            sizes = getattr(work.row_bytes, name)
            block, result = (torch.empty(work.batch, 1, round(x), dtype=torch.uint8, device="meta") for x in sizes)
            schedule = plan.schedule(name, result.numel() > 0, all_pairs=True)
            yield Slots(schedule, {"block": (block,), "result": (result,)}).total_bytes
