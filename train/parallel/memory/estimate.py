"""Estimate the memory that a rank needs. A run that does not fit is rejected before it allocates any large tensor."""

import os

import torch

from ringattn.train.model.gpt import padded_vocabulary
from ringattn.train.model.loss import chunk_size
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.parallel.ranks import ranks_per_host
from ringattn.train.settings.config import MOMENT_BLOCK, Config, ConfigError, ModelConfig

GIB = 2**30

# If all blocks together have at most this many bytes, their parameters stay gathered between the forward and the backward pass.
# Sharding the parameters again would save little memory and cost a second all-gather per micro-step.
SMALL_MODEL = GIB

# The fraction of a GPU's memory that a run may need before blocks are recomputed. Memory is fragmented, and torch's allocator
# does not own the receive buffers of a ring over NVLink.
COMFORTABLE_FRACTION = 0.85

# A run is rejected if its estimate exceeds this fraction of a GPU's memory. CUDA and NCCL need 2 to 4 GiB.
USABLE_FRACTION = 0.95

# FSDP gathers consecutive blocks together, until their parameters reach this many bytes. The host would take longer to launch a
# smaller all-gather than the interconnect takes to transfer it.
GROUP_BYTES = 2**28


def reshard_after_forward(model: ModelConfig, bf16: bool) -> bool:
    return model.layers * _block_bytes(model, bf16) > SMALL_MODEL


def blocks_per_group(model: ModelConfig, bf16: bool) -> int:
    """Return how many consecutive blocks share one all-gather of parameters and one reduce-scatter of gradients."""
    return min(max(GROUP_BYTES // _block_bytes(model, bf16), 1), model.layers)


def has_one_group(model: ModelConfig, bf16: bool) -> bool:
    """Return whether the parameters of all blocks are in one FSDP group, because they need at most GROUP_BYTES."""
    return model.layers * _block_bytes(model, bf16) <= GROUP_BYTES


def _block_bytes(model: ModelConfig, bf16: bool) -> int:
    return (2 if bf16 else 4) * block_parameters(model)


def block_parameters(model: ModelConfig) -> int:
    """Return the number of parameters in the matrices of a block."""
    return _attention_parameters(model) + model.dim * ((model.experts or 1) * 3 * model.resolved_ffn_dim + (model.experts or 0))


def used_block_parameters(model: ModelConfig) -> int:
    """Return the number of parameters in the matrices of a block that one token uses."""
    return _attention_parameters(model) + model.dim * (3 * hidden_dim(model) + (model.experts or 0))


def _attention_parameters(model: ModelConfig) -> int:
    return model.dim * 2 * (model.heads + model.kv_heads) * model.resolved_head_dim


def hidden_dim(model: ModelConfig) -> int:
    """Return the hidden width of the feed-forward network of a token, which may consist of several experts."""
    return model.resolved_ffn_dim * (1 if model.experts is None else model.experts_per_token)


def _routed_dim(model: ModelConfig) -> int:
    """Return the number of elements per token of the inputs of its experts, 0 in a dense model."""
    return 0 if model.experts is None else model.experts_per_token * model.dim


def tokens_per_rank(config: Config, shape: MeshShape) -> int:
    """Return the approximate number of tokens of a sequence that one rank holds."""
    return -(-config.data.seq_len // shape.sequence)


def peak_bytes(
    config: Config, shape: MeshShape, vocab_size: int, bf16: bool, compiled: bool, plan: MemoryPlan
) -> dict[str, float]:
    """Estimate the peak of torch's allocator on a rank, in bytes by purpose.

    A step reaches its peak at one of five moments: in the backward pass of the loss, of the last feed-forward network or of the
    last attention layer, or when FSDP reduces the gradients of the last group of blocks or of the other parameters. The
    estimate depends only on shapes, and includes neither fragmentation nor the receive buffers of a ring over NVLink.

    Args:
        shape: the numbers of ranks. With all-to-alls, each block saves its attention output before and after the all-to-all.
        vocab_size: the number of tokens of the tokenizer.
        bf16: whether the model computes in bf16.
        compiled: whether torch.compile is used. Compiled code saves only the inputs of matrix products.
        plan: where the rank keeps the data.
    """
    model, size, ranks = config.model, 2 if bf16 else 4, shape.ranks
    logits_dim = padded_vocabulary(model, vocab_size)
    head = logits_dim * model.dim
    vocab, blocks = head * (1 if model.tie_embeddings else 2), model.layers * block_parameters(model)
    group = blocks_per_group(model, bf16) * block_parameters(model)
    resharded = reshard_after_forward(model, bf16)
    # The parameters outside the blocks are gathered during the whole step.
    gathered = size * (vocab if resharded else vocab + blocks)
    prefetched = size * group if resharded else 0
    kept = vocab + blocks - _host_parameters(model, vocab_size, bf16, plan)
    # Weights in host memory pass through two fp32 buffers.
    moments = 8 if config.memory.moments == "fp32" else 2 * (1 + 4 / MOMENT_BLOCK)
    state = ((4 + moments) * kept + (8 * group if plan.host_blocks else 0)) / ranks
    # With a single micro-step, no gradients exist before the backward pass.
    gradients = 4 * kept / ranks if config.trainer.accumulate > 1 else 0

    rows = tokens_per_rank(config, shape)
    tokens = config.trainer.batch_size * rows
    query_dim, key_value_dim = _attention_dims(model)
    saved, checkpointed = _saved_bytes_per_token(model, size, 2 if shape.ulysses > 1 else 1, compiled)
    # Layers share fp32 cosines and sines. All layers share the int64 tokens, labels and positions.
    rotary_dims = sum(rope.dim for rope in {model.layer(index).rope for index in range(model.layers)})
    at_once = tokens * min(plan.chunk or rows, rows) / rows
    # q, k and v exist for all tokens. With chunks, blocks that are not recomputed save only these in addition.
    attention_inputs = size * (query_dim + key_value_dim)
    recomputed = tokens * attention_inputs + at_once * (saved - checkpointed - attention_inputs)
    if at_once < tokens:
        saved = checkpointed + attention_inputs
    blocks_saved = model.layers * saved - plan.recomputed_blocks * (saved - checkpointed)
    # If only the last block is not offloaded, the block before it returns to the GPU while the last one runs backward.
    blocks_saved -= min(plan.offloaded_blocks, model.layers - 2) * checkpointed
    activations = tokens * (blocks_saved + 4 * rotary_dims + 24)
    # At its peak, a step computes the gradients of the last block.
    recomputed = recomputed if plan.recomputed_blocks == model.layers else 0
    feed_forward = size * at_once * (2 * model.dim + 2 * _routed_dim(model) + 3 * hidden_dim(model))

    # With chunks, the gradients of the weights are summed in fp32, and the gradients of two inputs exist for all tokens.
    sums = 4 * block_parameters(model) + size * tokens * (model.dim + query_dim) if at_once < tokens else 0

    chunk = min(tokens, chunk_size(logits_dim))
    # The logits of a chunk, their gradient and the gradient of the previous chunk exist at the same time. Later, the gradient
    # and the results of its matrix products exist at the same time.
    logits = chunk * logits_dim
    chunk_bytes = size * max((3 if chunk < tokens else 2) * logits, logits + head + chunk * model.dim)
    if not compiled:
        chunk_bytes = max(chunk_bytes, 14 * logits)
    # A ring keeps three fp32 tensors with the shape of the queries: this rank's dq, a dq being computed and a dq being sent.
    attention = tokens * (12 * query_dim + 4 * key_value_dim if shape.sequence > 1 else 6 * query_dim + 2 * key_value_dim)

    def moment(backward: float, gathered: float, gradients: float = gradients, activations: float = activations):
        return {
            "parameters and optimizer state": state,
            "gradients": gradients,
            "gathered parameters": gathered,
            "activations": activations,
            "intermediate results of the backward pass": backward,
        }

    moments = [
        # The loss needs the last hidden states, their norm and its gradient, and the gradient of the head in fp32.
        moment(3 * size * tokens * model.dim + 4 * head + chunk_bytes, gathered + prefetched),
        # The last feed-forward network needs the gradients of the head, of the residual stream and of the hidden layer.
        moment(
            size * (head + tokens * model.dim + at_once * (_routed_dim(model) + hidden_dim(model))) + recomputed + sums,
            gathered + 3 * prefetched,
        ),
        moment(
            size * (head + tokens * (model.dim + query_dim)) + attention + recomputed - feed_forward, gathered + 3 * prefetched
        ),
    ]
    # FSDP frees the parameters of a group before it casts the group's gradients to fp32.
    if group == blocks:  # One group contains all parameters.
        moments.append(moment((size + 4) * (vocab + blocks), 0, activations=0))
    else:
        block_gradients = max(gradients, 4 * max(kept - vocab, 0) / ranks)
        # FSDP reduces the gradients of the last two groups of blocks at the same time, and then all other gradients.
        moments.append(moment(size * (head + group) + 8 * group, gathered + 2 * prefetched, block_gradients, activations=0))
        moments.append(moment((size + 4) * vocab, 0, block_gradients, activations=0))
    return max(moments, key=lambda needed: sum(needed.values()))


def host_bytes(config: Config, shape: MeshShape, bf16: bool, plan: MemoryPlan) -> float:
    """Return the bytes of host memory that a rank needs for the data of a plan."""
    outputs = 2 if shape.ulysses > 1 else 1
    _, checkpointed = _saved_bytes_per_token(config.model, 2 if bf16 else 4, outputs, compiled=False)
    return plan.offloaded_blocks * checkpointed * config.trainer.batch_size * tokens_per_rank(config, shape)


def host_optimizer_bytes(config: Config, shape: MeshShape, vocab_size: int, bf16: bool, plan: MemoryPlan) -> float:
    """Return the bytes of host memory that a rank needs for fp32 weights, gradients and two moments."""
    return 16 * _host_parameters(config.model, vocab_size, bf16, plan) / shape.ranks


def _host_parameters(model: ModelConfig, vocab_size: int, bf16: bool, plan: MemoryPlan) -> float:
    """Return the number of parameters whose fp32 weights are in host memory, on all ranks together."""
    vocab = padded_vocabulary(model, vocab_size) * model.dim * (1 if model.tie_embeddings else 2)
    # A single FSDP group contains all parameters.
    others = vocab if plan.host_blocks and has_one_group(model, bf16) else 0
    return plan.host_blocks * block_parameters(model) + others


def _attention_dims(model: ModelConfig) -> tuple[int, int]:
    """Return the number of elements per token of the queries, and of the keys and values together."""
    return model.heads * model.resolved_head_dim, 2 * model.kv_heads * model.resolved_head_dim


def _saved_bytes_per_token(model: ModelConfig, size: int, attention_outputs: int, compiled: bool) -> tuple[int, int]:
    """Return the bytes per token that a block saves for its backward pass, without and with activation checkpointing.

    `size` is the number of bytes per element, and `attention_outputs` is how often the attention output is saved.
    """
    query_dim, key_value_dim = _attention_dims(model)
    # Eager PyTorch saves the residual stream twice, both norms, q, k and v before and after the rotation, the attention output,
    # and four tensors of SwiGLU. Compiled code saves q, k and v once, and three tensors of SwiGLU.
    elements = 4 * model.dim + (1 + attention_outputs) * query_dim + key_value_dim + 3 * hidden_dim(model)
    elements += 2 * _routed_dim(model)  # the inputs and the outputs of the experts
    if model.norm_position == "both":
        elements += 2 * model.dim  # the outputs of attention and of the feed-forward network before their norms
    if model.sinks:
        elements += query_dim  # the attention output without sinks
    if model.qk_norm:
        elements += query_dim + key_value_dim // 2  # q and k before their norms
    if not compiled:
        elements += query_dim + key_value_dim + hidden_dim(model)
    checkpointed_elements = model.dim + attention_outputs * query_dim
    lse = 4 * model.heads
    return size * elements + lse, size * checkpointed_elements + lse


class InsufficientMemory(ConfigError):
    """A job needs more memory than its ranks have."""


def is_tight(needed: dict[str, float], device: torch.device) -> bool:
    """Return whether a run that needs this memory would leave too little free memory on a GPU."""
    return device.type == "cuda" and sum(needed.values()) > COMFORTABLE_FRACTION * _total_memory(device)


def fits(needed: dict[str, float], device: torch.device) -> bool:
    """Return whether this memory fits into the GPU, or into this rank's share of the host."""
    return sum(needed.values()) <= USABLE_FRACTION * _total_memory(device)


def check(needed: dict[str, float], device: torch.device) -> None:
    """Raise InsufficientMemory unless the estimated memory fits."""
    if not fits(needed, device):
        usable = USABLE_FRACTION * _total_memory(device) / GIB
        parts = ", ".join(f"{name} {count / GIB:.1f}" for name, count in needed.items())
        owner = "its GPU" if device.type == "cuda" else "its share of this host"
        raise InsufficientMemory(
            f"each rank would need about {sum(needed.values()) / GIB:.1f} GiB ({parts}), but {owner} has {usable:.1f} usable: "
            "use more ranks, a shorter data.seq_len, a smaller model or batch, or leave out memory.activations=keep and "
            "trainer.cuda_graphs=true"
        )


def check_host(needed: float) -> None:
    """Raise InsufficientMemory unless the host has this many bytes for the data of each of its ranks."""
    usable = USABLE_FRACTION * _total_memory(torch.device("cpu"))
    if needed > usable:
        raise InsufficientMemory(
            f"each rank would need {needed / GIB:.1f} GiB of host memory for offloaded data, but its share of this host has "
            f"{usable / GIB:.1f} usable: use more ranks, a shorter data.seq_len, or leave out offload in the settings of memory"
        )


def _total_memory(device: torch.device) -> float:
    """Return the bytes of a GPU, or of this rank's share of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_per_host()
