"""Estimate the memory that a rank needs. A run that does not fit is rejected before it allocates any large tensor."""

import os

import torch

from ringattn.train.config import Config, ConfigError, ModelConfig
from ringattn.train.model.gpt import padded_vocabulary
from ringattn.train.model.loss import chunk_size
from ringattn.train.parallel.mesh import Mesh
from ringattn.train.parallel.ranks import ranks_per_host

GIB = 2**30

# If the parameters of all blocks together need at most this many bytes, the parameters stay gathered between the forward and
# the backward pass. Sharding the parameters again would save little memory, and would cost a second all-gather per micro-step.
SMALL_MODEL = GIB

# The fraction of a GPU's memory that a run may need before blocks are recomputed in the backward pass. The rest is a reserve,
# because estimates are rough and the GPU may also be used by other processes.
COMFORTABLE_FRACTION = 0.85

# FSDP gathers the parameters of several consecutive blocks in one all-gather, until the parameters reach this many bytes. The
# host would take longer to launch a smaller all-gather than the interconnect takes to transfer its data.
GROUP_BYTES = 2**28


def reshard_after_forward(model: ModelConfig, bf16: bool) -> bool:
    """Return whether FSDP shards the parameters again after the forward pass, and gathers them again for the backward."""
    return model.layers * _block_bytes(model, bf16) > SMALL_MODEL


def blocks_per_group(model: ModelConfig, bf16: bool) -> int:
    """Return how many consecutive blocks share one all-gather of parameters and one reduce-scatter of gradients."""
    return min(max(GROUP_BYTES // _block_bytes(model, bf16), 1), model.layers)


def _block_bytes(model: ModelConfig, bf16: bool) -> int:
    return (2 if bf16 else 4) * block_parameters(model)


def block_parameters(model: ModelConfig) -> int:
    return model.dim * (2 * (model.heads + model.kv_heads) * model.resolved_head_dim + 3 * model.resolved_ffn_dim)


def tokens_per_rank(config: Config, mesh: Mesh) -> int:
    """Return the approximate number of tokens of a sequence that one rank holds."""
    return -(-config.data.seq_len // mesh.sequence.size())


def estimate(config: Config, mesh: Mesh, vocab_size: int, bf16: bool, compiled: bool, recompute: bool) -> dict[str, float]:
    """Estimate the bytes that a rank needs.

    The estimate depends only on shapes. The estimate does not include memory fragmentation and the workspaces of kernels.

    Args:
        config: the settings of the run.
        mesh: the mesh of all ranks. If ranks exchange heads by all-to-all, each block saves its attention output twice: before
            and after the all-to-all.
        vocab_size: the number of tokens that the tokenizer has.
        bf16: whether the model computes in bf16.
        compiled: whether torch.compile fuses the operations before and after attention. Compiled code saves only the inputs of
            matrix products, and recomputes the other intermediate results.
        recompute: whether the blocks save only their input and their attention output for the backward pass.

    Returns:
        A dict that maps each purpose of memory to a number of bytes.
    """
    model, size = config.model, 2 if bf16 else 4
    block = block_parameters(model)
    logits_dim = padded_vocabulary(model, vocab_size)
    vocab_parameters = logits_dim * model.dim * (1 if model.tie_embeddings else 2)
    sharded_bytes = 16 * (model.layers * block + vocab_parameters) / mesh.all.size()

    # Two groups of blocks are gathered at a time, because FSDP communicates the next group while the current group computes.
    gathered_gradients = min(2 * blocks_per_group(model, bf16), model.layers)
    gathered_parameters = gathered_gradients if reshard_after_forward(model, bf16) else model.layers
    gathered_bytes = size * (vocab_parameters + gathered_parameters * block)
    gathered_bytes += (size + 4) * (vocab_parameters + gathered_gradients * block)

    tokens = config.trainer.batch_size * tokens_per_rank(config, mesh)
    attention_outputs = 2 if mesh.ulysses.size() > 1 else 1
    saved, checkpointed = _saved_bytes_per_token(model, size, attention_outputs, compiled)
    # With recomputation, every block saves only its checkpointed tensors. The backward pass recomputes one block at a time.
    # During this recomputation, the block needs as much memory as it would save without recomputation.
    activation_bytes = tokens * (model.layers * checkpointed + saved if recompute else model.layers * saved)

    query_dim, key_value_dim = _attention_dims(model)
    return {
        "parameters, gradients and optimizer state in fp32": sharded_bytes,
        "gathered parameters and gradients": gathered_bytes,
        "activations": activation_bytes,
        "blocks that circulate in the ring": tokens * (8 * query_dim + 2 * size * key_value_dim),
        "logits of a chunk": (2 * size if compiled else 14) * min(tokens, chunk_size(logits_dim)) * logits_dim,
    }


def _attention_dims(model: ModelConfig) -> tuple[int, int]:
    """Return the number of query elements per token, and the total number of key and value elements per token."""
    return model.heads * model.resolved_head_dim, 2 * model.kv_heads * model.resolved_head_dim


def _saved_bytes_per_token(model: ModelConfig, size: int, attention_outputs: int, compiled: bool) -> tuple[int, int]:
    """Return the bytes per token that a block saves for its backward pass.

    Args:
        model: the settings of the model.
        size: the number of bytes per element.
        attention_outputs: how many times a block saves its attention output.
        compiled: whether torch.compile fuses the operations before and after attention.

    Returns:
        The bytes without activation checkpointing, and the bytes with activation checkpointing.
    """
    query_dim, key_value_dim = _attention_dims(model)
    # Eager PyTorch saves the residual stream twice, the outputs of both norms, q, k and v before and after the rotation, the
    # attention output, and four tensors of SwiGLU. Compiled code saves q, k and v only once, and only three tensors of SwiGLU.
    elements = 4 * model.dim + (1 + attention_outputs) * query_dim + key_value_dim + 3 * model.resolved_ffn_dim
    if not compiled:
        elements += query_dim + key_value_dim + model.resolved_ffn_dim
        if model.qk_norm:
            elements += query_dim + key_value_dim // 2  # q and k before their norms
    checkpointed_elements = model.dim + attention_outputs * query_dim
    lse = 4 * model.heads
    return size * elements + lse, size * checkpointed_elements + lse


class InsufficientMemory(ConfigError):
    """A job needs more memory than its ranks have."""


def is_tight(needed: dict[str, float], device: torch.device) -> bool:
    """Return True if a run that needs this memory would leave too little free memory on a GPU. For a CPU, return False."""
    return device.type == "cuda" and sum(needed.values()) > COMFORTABLE_FRACTION * _total_memory(device)


def check(needed: dict[str, float], device: torch.device) -> None:
    """Check that the estimated memory fits into the memory of the GPU, or into this rank's share of the memory of the host.

    Raises:
        InsufficientMemory: the rank has less memory than the estimate. The message lists the memory by purpose.
    """
    total = _total_memory(device)
    if sum(needed.values()) > total:
        parts = ", ".join(f"{name} {count / GIB:.1f}" for name, count in needed.items())
        owner = "its GPU" if device.type == "cuda" else "its share of this host"
        raise InsufficientMemory(
            f"each rank would need about {sum(needed.values()) / GIB:.1f} GiB ({parts}), but {owner} has {total / GIB:.1f}: "
            "use more ranks, a shorter data.seq_len, a smaller model or batch, or leave out activation_checkpointing=false"
        )


def _total_memory(device: torch.device) -> float:
    """Return the memory of a GPU, or this rank's share of the memory of the host, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_per_host()
