"""Prepare a model for training: shard its parameters (FSDP2), add activation checkpointing, and apply torch.compile.

Parameters, gradients and optimizer state are sharded over all ranks, including the ranks that share a sequence. A larger ring
therefore does not increase the memory that they need on each rank.
"""

from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ringattn import save_attention
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel import memory
from ringattn.train.parallel.mesh import Mesh


def shard_model(model: GPT, mesh: Mesh, device: torch.device, seed: int, bf16: bool) -> None:
    """Give a model on the meta device random initial weights, and shard its parameters over all ranks.

    Every rank draws the weights of a whole group of consecutive blocks (`memory.blocks_per_group`), keeps its own shard, and
    then continues with the next group. The weights therefore do not depend on the number of ranks, and no rank ever stores the
    whole model. During training, FSDP gathers the parameters of one group at a time. FSDP gathers the parameters before the
    forward pass of the group. Unless the model is small (`memory.reshard_after_forward`), FSDP gathers the parameters a second
    time before the backward pass of the group.

    Args:
        model: the model, whose parameters are on the meta device.
        mesh: the mesh of all ranks.
        device: the device of this rank.
        seed: the seed of the initial weights.
        bf16: whether the model computes in bf16. Parameters stay in fp32, and gradients are summed in fp32.
    """
    precision = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32, cast_forward_inputs=False)
    # None selects FSDP's default: after the forward pass, FSDP shards the parameters of all modules again, except those of the
    # root module.
    reshard = None if memory.reshard_after_forward(model.config, bf16) else False
    generator = torch.Generator(device).manual_seed(seed)
    size, blocks = memory.blocks_per_group(model.config, bf16), list(model.blocks)
    groups = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    for group in (*groups, [model]):
        for module in group:
            # The blocks are sharded first. When the parameters outside the blocks are allocated, the blocks must stay
            # unchanged.
            module.to_empty(device=device, recurse=module is not model)
            module.init_weights(generator)
        if len(groups) == 1 and model not in group:
            # One group contains all parameters of the model, because the hooks of a second group would need time on the host.
            continue
        fully_shard(list[nn.Module](group), mesh=mesh.all, mp_policy=precision, reshard_after_forward=reshard)
        root = cast("FSDPModule", group[0])
        # FSDP must sum the gradients and not average them, because the loss of every rank is already divided by the number of
        # tokens of all ranks.
        root.set_gradient_divide_factor(1.0)
        root.set_force_sum_reduction_for_comms(True)


def compile_blocks(model: GPT) -> None:
    """Compile two parts of every block: the operations before attention and those after it. Attention is not compiled."""
    for block in model.blocks:
        block.before, block.after = torch.compile(block.before), torch.compile(block.after)


def checkpoint_activations(model: GPT, count: int) -> None:
    """Save only the input and the attention output of the first `count` blocks, and recompute all else in the backward pass.

    Attention is expensive and communicates with other ranks, so attention is never computed twice. The all-to-alls of q, k and
    v may run twice (`recompute_all_to_all`). All-to-alls take little time, whereas saving their results would need much memory.
    """
    for block in model.blocks[:count]:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=save_attention
        )
