"""What is applied to a model before training: sharded parameters (FSDP2), activation checkpointing and torch.compile.

Parameters, gradients and optimizer state are sharded over all ranks, including the ranks that share a sequence. A larger ring
therefore does not need more memory for them.
"""

from functools import partial

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ringattn import save_attention
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel import memory
from ringattn.train.parallel.mesh import Mesh


def shard_model(model: GPT, mesh: Mesh, device: torch.device, seed: int, bf16: bool) -> None:
    """Give a model on the meta device random initial weights, and shard its parameters over all ranks.

    Every rank draws the weights of a whole group of consecutive blocks (`memory.blocks_per_group`), keeps its own shard, and
    then continues with the next group. The weights therefore do not depend on the number of ranks, and no rank ever holds the
    whole model. During training, FSDP gathers the parameters of one group at a time. It gathers them before the forward pass
    of the group and, unless the model is small (`memory.reshard_after_forward`), again before its backward pass.

    Args:
        model: the model, whose parameters are on the meta device.
        mesh: the mesh of all ranks.
        device: the device of this rank.
        seed: the seed of the initial weights.
        bf16: whether the model computes in bf16. Parameters stay in fp32, and gradients are summed in fp32.
    """
    precision = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32, cast_forward_inputs=False)
    # None stands for FSDP's default, which shards all parameters again except those of the root module.
    reshard = None if memory.reshard_after_forward(model.config, bf16) else False
    options = dict(mesh=mesh.all, mp_policy=precision, reshard_after_forward=reshard)
    generator = torch.Generator(device).manual_seed(seed)
    size, blocks = memory.blocks_per_group(model.config, bf16), list(model.blocks)
    for group in (*(blocks[start : start + size] for start in range(0, len(blocks), size)), [model]):
        for module in group:
            # The blocks are already sharded when the parameters of the model outside the blocks are allocated.
            module.to_empty(device=device, recurse=module is not model)
            module.init_weights(generator)
        fully_shard(group, **options)
        # FSDP must sum gradients instead of averaging them, because the loss of every rank is already divided by the number
        # of tokens of all ranks.
        group[0].set_gradient_divide_factor(1.0)
        group[0].set_force_sum_reduction_for_comms(True)


def compile_blocks(model: GPT) -> None:
    """Compile the parts of every block before and after attention. Attention and its communication are not compiled."""
    for block in model.blocks:
        block.before, block.after = torch.compile(block.before), torch.compile(block.after)


def checkpoint_activations(model: GPT) -> None:
    """Save only the input and the attention output of every block, and recompute the rest in the backward pass.

    Attention is expensive and communicates with other ranks, so it is never computed twice. The all-to-alls of q, k and v may
    run twice (`recompute_all_to_all`), because they take little time compared with the memory that their results would need.
    """
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=save_attention
        )
