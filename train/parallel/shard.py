"""Prepare a model for training: shard its parameters (FSDP2), add activation checkpointing, and apply torch.compile.

Parameters, gradients and optimizer state are sharded over all ranks, so the size of the ring does not affect their memory.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ringattn import save_attention
from ringattn.checkpointing import SavedAttention
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.activations import HostActivations, offload_blocks
from ringattn.train.parallel.memory.host_parameters import HostGroup, StagingBuffers
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import Mesh


def shard_model(model: GPT, mesh: Mesh, device: torch.device, seed: int, bf16: bool, host_blocks: int = 0) -> list[HostGroup]:
    """Initialise a model on the meta device with random weights, and shard its parameters over all ranks.

    For one group of blocks at a time, every rank draws all weights, and keeps only its own shard. The weights therefore do not
    depend on the number of ranks. With `bf16`, the model computes in bf16, but parameters and sums of gradients are fp32.

    The FSDP groups of the last `host_blocks` blocks are moved to host memory. Parameters outside the blocks stay on the device,
    because the next forward pass needs these parameters first. Return the FSDP groups that are in host memory.
    """
    precision = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32, cast_forward_inputs=False)
    # With `reshard_after_forward=None`, FSDP frees the gathered parameters after the forward pass, except in the root module.
    reshard = None if estimate.reshard_after_forward(model.config, bf16) else False
    generator = torch.Generator(device).manual_seed(seed)
    size, blocks = estimate.blocks_per_group(model.config, bf16, mesh.all.size(), host_blocks), list(model.blocks)
    groups = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    on_host = [start >= len(blocks) - host_blocks for start in range(0, len(blocks), size)]
    # A single group contains all parameters. If there are several groups, parameters outside the blocks stay on the device.
    on_host.append(len(groups) == 1 and host_blocks > 0)
    host_groups, staging = list[HostGroup](), StagingBuffers(device)
    for group, is_on_host in zip((*groups, [model]), on_host, strict=True):
        for module in group:
            # `recurse` is False for the whole model, because its blocks are already sharded.
            module.to_empty(device=device, recurse=module is not model)
            module.init_weights(generator)
        if len(groups) == 1 and model not in group:
            # A second FSDP group would add hooks, which need time on the host.
            continue
        fully_shard(list[nn.Module](group), mesh=mesh.all, mp_policy=precision, reshard_after_forward=reshard)
        root = cast("FSDPModule", group[0])
        # Gradients are summed, not averaged, because each rank's loss is already divided by the tokens of all ranks.
        root.set_gradient_divide_factor(1.0)
        root.set_force_sum_reduction_for_comms(True)
        if is_on_host:
            host_groups.append(HostGroup(group[0], device, staging))
    return host_groups


def local_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor. Return a plain tensor unchanged.

    Unless gradients are disabled, autograd records this function.
    """
    return x.to_local() if isinstance(x, DTensor) else x


def compile_blocks(model: GPT) -> None:
    """Compile two functions per block: the operations before attention, and the operations after attention."""
    for block in cast("list[Any]", model.blocks):
        block.before, block.after = torch.compile(block.before), torch.compile(block.after)


def checkpoint_activations(model: GPT, plan: MemoryPlan, device: torch.device, host_bytes: float) -> None:
    """Save only the inputs and the attention outputs of the blocks that `plan` recomputes.

    The saved tensors are on the GPU or in host memory. The first `plan.attention_blocks` blocks also recompute attention.
    """
    blocks = cast("list[Any]", model.blocks)
    for index in range(plan.offloaded_blocks, plan.recomputed_blocks):
        rerun = partial(save_attention, SavedAttention(keeps=False))
        blocks[index].forward = partial(
            checkpoint,
            blocks[index].forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=rerun if index < plan.attention_blocks else save_attention,
        )
    if plan.offloaded_blocks:
        host = HostActivations(device)
        host.reserve(host_bytes)
        offload_blocks(blocks, plan.offloaded_blocks, host, plan.attention_blocks)
