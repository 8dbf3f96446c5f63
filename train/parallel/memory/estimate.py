"""Estimate the memory that a rank needs under a memory plan."""

from typing import NamedTuple

from ringattn import Mask
from ringattn.planning.workload import head_chunks_for_memory
from ringattn.train.model.gpt import padded_vocabulary
from ringattn.train.model.loss import chunk_size
from ringattn.train.parallel.memory.capacity import COPIES, GIB, Bytes, Needs
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape, attention_inputs
from ringattn.train.settings.config import MOMENT_BLOCK, Config, ModelConfig

# If all blocks together have at most SMALL_MODEL bytes, their parameters stay gathered until the backward pass. Sharding the
# parameters again would save little memory and cost a second all-gather per micro-step.
SMALL_MODEL = GIB

# FSDP gathers consecutive blocks together, until their parameters reach GROUP_BYTES bytes. Launching a smaller all-gather would
# take longer than its transfer.
GROUP_BYTES = 2**28


def reshard_after_forward(model: ModelConfig, bf16: bool) -> bool:
    return model.layers * _block_bytes(model, bf16) > SMALL_MODEL


def blocks_per_group(model: ModelConfig, bf16: bool, ranks: int, host_blocks: int = 0) -> int:
    """Return the number of blocks per FSDP group. `host_blocks` is the number of blocks in host memory."""
    if ranks == 1 and host_blocks == 0 and not reshard_after_forward(model, bf16):
        return model.layers  # A run with one rank transfers nothing, and CUDA graphs require a single group.
    return min(max(GROUP_BYTES // _block_bytes(model, bf16), 1), model.layers)


def _block_bytes(model: ModelConfig, bf16: bool) -> int:
    return (2 if bf16 else 4) * block_parameters(model)


def block_parameters(model: ModelConfig) -> int:
    return attention_parameters(model) + model.dim * ((model.experts or 1) * 3 * model.resolved_ffn_dim + (model.experts or 0))


def used_block_parameters(model: ModelConfig) -> int:
    """Count the parameters of a block that one token uses."""
    return attention_parameters(model) + model.dim * (3 * hidden_dim(model) + (model.experts or 0))


def other_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Count the parameters outside the blocks."""
    return padded_vocabulary(model, vocab_size) * model.dim * (1 if model.tie_embeddings else 2)


def projection_parameters(model: ModelConfig) -> int:
    """Count the parameters of a block's matrices before attention."""
    return model.dim * sum(_attention_dims(model))


def attention_parameters(model: ModelConfig) -> int:
    return model.dim * 2 * (model.heads + model.kv_heads) * model.resolved_head_dim


def hidden_dim(model: ModelConfig) -> int:
    """Return the width of the hidden layer, or the total width of the experts that one token uses."""
    return model.resolved_ffn_dim * (1 if model.experts is None else model.experts_per_token)


def _routed_dim(model: ModelConfig) -> int:
    return 0 if model.experts is None else model.experts_per_token * model.dim


def tokens_per_rank(config: Config, shape: MeshShape) -> int:
    return -(-config.data.seq_len // shape.sequence)


def tokens_per_micro_step(config: Config, shape: MeshShape) -> int:
    return config.trainer.batch_size * tokens_per_rank(config, shape)


class PlanIndependent(NamedTuple):
    """Holds numbers that are the same for all memory plans."""

    head_chunks: int  # the minimum number of head chunks in attention
    rotary_dims: int  # the elements per token of the cosines and sines of all layers

    @classmethod
    def of(cls, config: Config, shape: MeshShape) -> "PlanIndependent":
        model = config.model
        ropes = {model.layer(index).rope for index in range(model.layers)}
        return cls(_head_chunks(config, shape), sum(rope.dim for rope in ropes))


def needs(
    config: Config,
    shape: MeshShape,
    vocab_size: int,
    bf16: bool,
    compiled: bool,
    plan: MemoryPlan,
    common: PlanIndependent | None = None,
) -> Needs:
    """Estimate the peak of torch's allocator on a rank, and the rank's host memory, in bytes by purpose.

    The peak occurs in a backward pass (of the loss, a feed-forward network or attention) or in FSDP's last gradient reductions.
    The estimate reads only shapes. Fragmentation and the receive buffers of attention are left out.

    Args:
        common: the result of `PlanIndependent.of`, to avoid repeated computation.
    """
    common = common or PlanIndependent.of(config, shape)
    model, size, ranks, layers = config.model, 2 if bf16 else 4, shape.ranks, config.model.layers
    logits_dim = padded_vocabulary(model, vocab_size)
    head = logits_dim * model.dim
    block = block_parameters(model)
    vocab, blocks = other_parameters(model, vocab_size), layers * block
    group = blocks_per_group(model, bf16, ranks, plan.host_blocks) * block
    resharded = reshard_after_forward(model, bf16)
    # The parameters outside the blocks stay gathered during the whole step.
    gathered = size * (vocab if resharded else vocab + blocks)
    prefetched = size * group if resharded else 0
    kept = vocab + blocks - _host_parameters(model, vocab_size, bf16, ranks, plan)
    # The GPU keeps two fp32 buffers for weights from host memory.
    state = ((4 + moment_bytes(config)) * kept + (8 * group if plan.host_blocks else 0)) / ranks
    # Gradients exist before a backward pass only if a step has several micro-steps.
    gradients = 4 * kept / ranks if config.trainer.accumulate > 1 else 0

    tokens = tokens_per_micro_step(config, shape)
    saved = _Saved.of(config, shape, bf16, compiled, plan)
    # All layers share the fp32 cosines and sines, and the int64 tokens, labels and positions.
    shared = tokens * (4 * common.rotary_dims + 24)

    def moment(backward: float, gathered: float, activations: float, gradients: float = gradients) -> Bytes:
        return {
            "parameters and optimizer state": state,
            "gradients": gradients,
            "gathered parameters": gathered,
            "activations": activations,
            "intermediate results of the backward pass": backward,
        }

    loss = _loss_bytes(model.dim, logits_dim, size, tokens, compiled)
    moments = [moment(loss, gathered + prefetched, tokens * saved.resident(layers) + shared)]
    parts = _feed_forward_bytes(config, shape, size, plan), _attention_bytes(config, shape, size, plan, common.head_chunks)
    # The peak occurs at the first block, at the last block, or at a block where the memory plan changes.
    changes = {layers - 1, plan.recomputed_blocks - 1, plan.offloaded_blocks, plan.offloaded_blocks - 1, 0}
    for index in changes & set(range(layers)):
        # The backward pass has already replaced the activations of later blocks by gradients.
        later = max(gradients, 4 * block * max(layers - 1 - index - plan.host_blocks, 0) / ranks)
        activations = tokens * (saved.resident(index + 1) + saved.in_flight(index)) + shared
        for part in parts:
            backward = size * head + part + tokens * saved.recomputed(index)
            moments.append(moment(backward, gathered + 3 * prefetched, activations, later))
    # Before FSDP casts a group's gradients to fp32, it frees the group's parameters.
    if group == blocks:  # One group contains all parameters.
        moments.append(moment((size + 4) * (vocab + blocks), 0, shared))
    else:
        block_gradients = max(gradients, 4 * max(kept - vocab, 0) / ranks)
        moments.append(moment(size * (head + group) + 8 * group, gathered + 2 * prefetched, 0, block_gradients))
        moments.append(moment((size + 4) * vocab, 0, 0, block_gradients))
    peak = max(moments, key=lambda needed: sum(needed.values()))
    return Needs(peak, _host_bytes(config, shape, vocab_size, bf16, plan))


def inference_needs(config: Config, shape: MeshShape, vocab_size: int, bf16: bool, num_tokens: int = 0) -> Needs:
    """Return the minimum bytes per rank to generate `num_tokens` tokens, or to evaluate a batch if `num_tokens` is 0."""
    model, size, tokens = config.model, 2 if bf16 else 4, 0 if num_tokens else tokens_per_micro_step(config, shape)
    parameters = other_parameters(model, vocab_size) + model.layers * block_parameters(model)
    rows = sum(min(window or num_tokens, num_tokens) for window in model.windows) / shape.sequence
    device = {"parameters": 4 * parameters / shape.ranks, "keys and values": size * rows * _attention_dims(model)[1]}
    # The input of a block, and the int64 tokens, labels and positions
    return Needs(device | {"activations": tokens * (size * model.dim + 24)}, {})


def _loss_bytes(dim: int, logits_dim: int, size: int, tokens: int, compiled: bool) -> int:
    chunk, head = min(tokens, chunk_size(logits_dim)), logits_dim * dim
    logits = chunk * logits_dim
    chunk_bytes = size * max((3 if chunk < tokens else 2) * logits, logits + head + chunk * dim)
    if not compiled:
        chunk_bytes = max(chunk_bytes, (2 * size + 8) * logits)
    return 3 * size * tokens * dim + 4 * head + chunk_bytes


def _host_bytes(config: Config, shape: MeshShape, vocab_size: int, bf16: bool, plan: MemoryPlan) -> Bytes:
    model = config.model
    parameters = _host_parameters(model, vocab_size, bf16, shape.ranks, plan) / shape.ranks
    copied = bool(config.trainer.background_saves) * (
        other_parameters(model, vocab_size) + model.layers * block_parameters(model)
    )
    return {
        "parameters and optimizer state": 12 * parameters,
        "gradients": 4 * parameters,
        "activations": sum(offloaded_bytes(config, shape, bf16, plan)),
        COPIES: (4 + moment_bytes(config)) * copied / shape.ranks,
    }


def _host_parameters(model: ModelConfig, vocab_size: int, bf16: bool, ranks: int, plan: MemoryPlan) -> float:
    # A single FSDP group contains all parameters.
    has_one_group = blocks_per_group(model, bf16, ranks, plan.host_blocks) == model.layers
    others = other_parameters(model, vocab_size) if plan.host_blocks and has_one_group else 0
    return plan.host_blocks * block_parameters(model) + others


def offloaded_bytes(config: Config, shape: MeshShape, bf16: bool, plan: MemoryPlan) -> list[float]:
    saved = _Saved.of(config, shape, bf16, True, plan)
    tokens = tokens_per_micro_step(config, shape)
    return [tokens * saved.checkpointed(index) for index in range(plan.offloaded_blocks)]


def moment_bytes(config: Config) -> float:
    return 8 if config.memory.moments == "fp32" else 2 * (1 + 4 / MOMENT_BLOCK)


class _Saved(NamedTuple):
    """Bytes per token that blocks save for the backward pass."""

    plan: MemoryPlan
    kept: float  # of a block that is not recomputed
    attention: float  # of a block that recomputes everything but attention
    inputs: float  # of a block that recomputes everything

    @classmethod
    def of(cls, config: Config, shape: MeshShape, bf16: bool, compiled: bool, plan: MemoryPlan) -> "_Saved":
        model, size, outputs = config.model, 2 if bf16 else 4, 2 if shape.ulysses > 1 else 1
        kept, checkpointed = _saved_bytes_per_token(model, size, outputs, compiled)
        if config.trainer.float8:
            kept += _float8_bytes_per_token(model, outputs, compiled)
        if plan.num_chunks(tokens_per_rank(config, shape)) > 1:
            # A block that runs in chunks saves only the inputs and the outputs of attention.
            kept = checkpointed + size * sum(_attention_dims(model))
        return cls(plan, kept, checkpointed, size * model.dim)

    def checkpointed(self, index: int) -> float:
        return self.inputs if index < self.plan.attention_blocks else self.attention

    def resident(self, count: int) -> float:
        blocks = range(self.plan.offloaded_blocks, min(count, self.plan.recomputed_blocks))
        inputs = len(range(blocks.start, min(blocks.stop, self.plan.attention_blocks)))
        checkpointed = inputs * self.inputs + (len(blocks) - inputs) * self.attention
        return max(count - self.plan.recomputed_blocks, 0) * self.kept + checkpointed

    def in_flight(self, index: int) -> float:
        return sum(self.checkpointed(i) for i in (index, index - 1) if 0 <= i < self.plan.offloaded_blocks)

    def recomputed(self, index: int) -> float:
        return self.kept - self.checkpointed(index) if index < self.plan.recomputed_blocks else 0


def _feed_forward_bytes(config: Config, shape: MeshShape, size: int, plan: MemoryPlan) -> float:
    model, rows, tokens = config.model, tokens_per_rank(config, shape), tokens_per_micro_step(config, shape)
    query_dim = model.heads * model.resolved_head_dim
    if (count := plan.num_chunks(rows)) == 1:
        # Without chunks, the gradients of the residual stream and of the hidden layer exist for all tokens at once.
        return size * tokens * (model.dim + _routed_dim(model) + hidden_dim(model))
    # The tensors of the feed-forward network and their gradients exist for one chunk at a time. Weight gradients are summed in
    # fp32.
    chunk = 6 * model.dim + 4 * hidden_dim(model) + 3 * _routed_dim(model)
    sums = 4 * (block_parameters(model) - projection_parameters(model))
    return size * tokens * (2 * model.dim + query_dim) + size * -(-tokens // count) * chunk + sums


def _attention_bytes(config: Config, shape: MeshShape, size: int, plan: MemoryPlan, head_chunks: int) -> float:
    model, rows, tokens = config.model, tokens_per_rank(config, shape), tokens_per_micro_step(config, shape)
    query_dim, key_value_dim = _attention_dims(model)
    # A ring keeps three fp32 tensors of dq: this rank's dq, dq of the current local step, and a dq in flight.
    temporary = 12 * query_dim + 4 * key_value_dim if shape.sequence > 1 else 6 * query_dim + 2 * key_value_dim
    if head_chunks > 1:
        # A chunk of heads has its own q, k, v, out and dout. At the end of the backward pass, the gradients of all heads exist.
        temporary = (temporary + size * (3 * query_dim + key_value_dim)) / head_chunks + size * (query_dim + key_value_dim)
    freed = 0  # by the feed-forward network
    if plan.num_chunks(rows) == 1:
        freed = size * (2 * model.dim + 2 * _routed_dim(model) + 3 * hidden_dim(model))
        if config.trainer.float8 and model.experts is None:
            freed -= model.dim + hidden_dim(model)
    return tokens * (size * (model.dim + query_dim) + temporary - freed)


def _head_chunks(config: Config, shape: MeshShape) -> int:
    if config.data.mask_documents:
        return 1
    pairs = min(Mask.causal(window).pairs(config.data.seq_len)[0] for window in set(config.model.windows))
    return head_chunks_for_memory(*attention_inputs(config, bf16=True), pairs / shape.sequence)


def _attention_dims(model: ModelConfig) -> tuple[int, int]:
    return model.heads * model.resolved_head_dim, 2 * model.kv_heads * model.resolved_head_dim


def _saved_bytes_per_token(model: ModelConfig, size: int, attention_outputs: int, compiled: bool) -> tuple[int, int]:
    """Return the bytes per token that a block saves: without and with activation checkpointing.

    `size` is the number of bytes per element. `attention_outputs` is 2 if the output is saved before and after an all-to-all.
    """
    query_dim, key_value_dim = _attention_dims(model)
    # An eager block saves q, k and v before and after the rotation, and four tensors of SwiGLU. Compiled code saves q, k and v
    # only once, and only three tensors of SwiGLU.
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


def _float8_bytes_per_token(model: ModelConfig, attention_outputs: int, compiled: bool) -> int:
    """Return how many more bytes per token a block saves if its linear layers compute in FP8. The number may be negative.

    A layer saves its input in one byte per element instead of two. Compiled layers with the same input share one copy.
    """
    inputs, copies = model.dim, model.dim * (1 if compiled else 3)
    if model.experts is None:
        inputs += model.dim + hidden_dim(model)
        copies += model.dim * (1 if compiled else 2) + hidden_dim(model)
    # Attention still saves its output in bf16. After an all-to-all, the output of attention is saved only as a layer's input.
    query_dim, _ = _attention_dims(model)
    return copies + query_dim - 2 * (inputs + (attention_outputs - 1) * query_dim)
