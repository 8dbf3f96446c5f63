"""What a rank needs of its GPU's memory, roughly: a length that cannot fit is refused before anything large is made."""

import torch

from ringattn.train.config import ConfigError, ModelConfig
from ringattn.train.model.gpt import padded_vocabulary
from ringattn.train.model.loss import CHUNK

GIB = 2**30
SMALL = GIB  # bytes of parameters that are gathered once a micro-step: to gather them twice would spare little
COMFORTABLE = 0.85  # of a GPU's memory: estimates are rough, and a GPU may have other work
UNIT = 2**26  # bytes of parameters that travel together: for fewer the host takes longer than the links


def stay_whole(model: ModelConfig, bf16: bool) -> bool:
    """Whether the blocks' parameters, once gathered in the forward, stay whole until the backward."""
    return model.layers * _block_bytes(model, bf16) <= SMALL


def unit(model: ModelConfig, bf16: bool) -> int:
    """How many blocks' parameters are gathered, and their gradients summed, together."""
    return min(max(UNIT // _block_bytes(model, bf16), 1), model.layers)


def _block_bytes(model: ModelConfig, bf16: bool) -> int:
    return (2 if bf16 else 4) * _block_parameters(model)


def _block_parameters(model: ModelConfig) -> int:
    return model.dim * (2 * (model.heads + model.kv_heads) * model.resolved_head_dim + 3 * model.resolved_ffn_dim)


def estimate(
    model: ModelConfig,
    recompute: bool,
    vocab_size: int,
    rows: int,
    ranks: int,
    bf16: bool,
    exchanged: bool = False,
    compiled: bool = False,
) -> dict[str, float]:
    """Bytes a rank needs, by what for. From shapes alone: what an allocator wastes and kernels borrow is not in it.

    Args:
        recompute: whether blocks keep only their input and their attention's output for the backward.
        rows: tokens of a micro-step on this rank, batch_size * N.
        ranks: over how many the parameters are sharded.
        exchanged: whether ranks exchange heads, and so keep attention's output in both arrangements.
        compiled: whether torch.compile fuses what lies around attention: it keeps what products need and makes the rest anew.
    """
    size = 2 if bf16 else 4
    vocab = padded_vocabulary(model, vocab_size)
    query, keys = model.heads * model.resolved_head_dim, 2 * model.kv_heads * model.resolved_head_dim
    block = _block_parameters(model)
    units = min(2 * unit(model, bf16), model.layers)  # blocks of two units, one in use and one that travels
    whole = model.layers if stay_whole(model, bf16) else units
    ends = vocab * model.dim * (1 if model.tie_embeddings else 2)
    total = model.layers * block + ends
    # features a token that a block keeps for its backward: the residual stream twice, its norms, q k v before and after
    # rotation, attention's output, and four of SwiGLU; compiled q k v once, and three of SwiGLU
    once = 4 * model.dim + 2 * query + keys + 3 * model.resolved_ffn_dim
    again = query + keys + model.resolved_ffn_dim
    if model.qk_norm:  # q and k before their norms
        again += query + keys // 2
    kept = size * (once if compiled else once + again) + 4 * model.heads
    checkpointed = size * (model.dim + query) + 4 * model.heads
    if exchanged:
        kept, checkpointed = kept + size * query, checkpointed + size * query
    if recompute:
        activations = rows * (model.layers * checkpointed + kept)
    else:
        activations = rows * model.layers * kept
    return {
        "parameters, gradients and optimizer, fp32": 16 * total / ranks,
        "whole parameters and gradients in use": size * (ends + whole * block) + (size + 4) * (ends + units * block),
        "activations": activations,
        "a ring's blocks in flight": rows * (8 * query + 2 * size * keys),
        "logits of a chunk": (2 * size if compiled else 14) * min(rows, CHUNK) * vocab,
    }


def is_tight(needed: dict[str, float], device: torch.device) -> bool:
    """Whether a GPU would be too full for comfort; a CPU never is."""
    return sum(needed.values()) > COMFORTABLE * _available(device)


def check(needed: dict[str, float], device: torch.device) -> None:
    """Refuse what exceeds the memory of a GPU.

    Raises:
        ConfigError: with what needs how much.
    """
    available = _available(device)
    if sum(needed.values()) > available:
        parts = ", ".join(f"{name} {count / GIB:.1f}" for name, count in needed.items())
        raise ConfigError(
            f"a rank would need about {sum(needed.values()) / GIB:.1f} GiB ({parts}), and has {available / GIB:.1f}: "
            "use more ranks, a shorter data.seq_len, a smaller model or batch, or leave out activation_checkpointing=false"
        )


def _available(device: torch.device) -> float:
    """Bytes of a GPU; a CPU is not asked."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else float("inf")
