"""Define the public call `flash_attention`, which computes attention on one device without a process group."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ringattn import custom_op
from ringattn.kernels import dispatch, validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.caching import cached_on_device, is_capturing, keep_for_graph
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.validation import check_dense, check_flag
from ringattn.mask import Mask, shared_intervals
from ringattn.sinks import check_sink_logits, with_sinks
from ringattn.spec import AttentionSpec, autocast, check_attention, resolve_scale

_CAUSAL, _FULL = Mask.causal(), Mask.full()


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    blocks: BlockMask | None = None,
    backend: str = "auto",
    precision: str = "ieee",
    return_lse: bool = False,
    sink_logits: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * q k^T + mask) v in tiles, with memory that is linear in the number of tokens.

    The call is differentiable (Dao et al. 2022, FlashAttention, https://arxiv.org/abs/2205.14135). On a Hopper GPU, the last
    bits of dq may differ between runs. For equal bits, set `torch.use_deterministic_algorithms(True)`, which takes longer.

    Calls may run on several CUDA streams at the same time. A CUDA graph can capture a call that has run before. If a CUDA graph
    modifies `blocks.keep`, pass a copy of `blocks` to later calls. If the value vector of a key contains NaN, outputs of the
    same tile may become NaN, even if their queries do not attend to the key.

    With `precision="fp8"`, the forward pass rounds q, k and v to FP8, see `ringattn.kernels.fp8`. The error is a few percent.
    The backward pass also uses the rounded inputs. Rounded fp16 inputs become bf16, and other inputs keep their dtype. FP8
    supports neither dropout nor `blocks`. FP8 saves time only on Hopper GPUs with head dims 64, 128 and 256.

    There are three differences from `scaled_dot_product_attention`. Tensors have the shape (B, N, H, D), in which tokens come
    before heads. `mask` replaces `attn_mask`. With fewer queries than keys, `is_causal` aligns the last query with the last
    key. Torch aligns the first query with the first key.

    Args:
        q: (B, Nq, Hq, D), k: (B, Nk, Hkv, D), v: (B, Nk, Hkv, Dv); Hkv divides Hq. dtypes and autocast as for `ring_attention`.
        mask: which of the Nk keys each query may attend to. The last query is at the last position:

                Nq = 2, Nk = 4, causal:  1 1 1 0
                                         1 1 1 1

        is_causal: a short form of mask=Mask.causal(). Without `mask` and `is_causal`, every query attends to every key.
        scale: a positive factor on the scores; None for D ** -0.5.
        dropout_p: the probability of dropping an entry of the softmax, 0 <= p < 1.
        seed: the seed of the dropout. With None, every call with dropout draws a seed from torch's default CPU generator. CUDA
            graphs require a seed, because all replays drop the same entries. `torch.compile` also requires a seed.
        blocks: which pairs of (query block, key block) are computed, in addition to `mask`; None for all pairs.
        backend: the kernels, see `ringattn.kernels.backends`.
        precision: "ieee" or "tf32", the precision in which the Triton kernels multiply fp32 inputs; or "fp8".
        return_lse: also return the log-sum-exp of the scores.
        sink_logits: as for `ring_attention`.

    Returns:
        As `ring_attention`, with Nq rows.

    Raises:
        ValueError: arguments contradict each other, or a CUDA graph captures a call with dropout and without a seed. All
            arguments are checked before any work starts.
        RuntimeError: a CUDA graph captures a call that has not run before.
    """
    check_dense(q, k, v)
    check_flag("is_causal", is_causal)
    check_flag("return_lse", return_lse)
    dropout_p = validation.as_number("dropout_p", dropout_p)
    if mask is not None and is_causal:
        raise ValueError("both mask and is_causal are given: pass only one of them; Mask.causal(...) is causal already")
    if blocks is not None and not isinstance(blocks, BlockMask):
        raise ValueError(f"blocks is a {type(blocks).__name__}: it must be a ringattn.BlockMask")
    if mask is None:
        mask = _CAUSAL if is_causal else _FULL
    q, k, v = autocast(q, k, v)
    if seed is None:
        seed = _draw_seed(q.device) if dropout_p else 0
    seed = validation.as_integer("seed", seed)
    # `check_attention` later rejects a wrong number of dimensions.
    seq_len = k.shape[1] if k.ndim == 4 else 0
    options = dict(scale=resolve_scale(q, scale), dropout_p=dropout_p, seed=seed, backend=backend, precision=precision)
    check_attention(q, k, v, mask=mask, seq_len=seq_len, **options)
    check_sink_logits(sink_logits, q)
    if precision == "fp8":
        validation.check_fp8(has_dropout=False, has_blocks=blocks is not None)
    keep, block_size = (None, 0) if blocks is None else (blocks.keep, blocks.size)
    spec = AttentionSpec(mask.numbers, *mask.reach, "contiguous", seq_len, ranks=1, keep=keep, block_size=block_size, **options)
    out, lse, _ = _attention(q, k, v, spec)
    return with_sinks(out, lse, sink_logits, return_lse)


def _draw_seed(device: torch.device) -> int:
    """Draw a seed from torch's default CPU generator, because activation checkpointing restores its state."""
    if torch.compiler.is_compiling():
        raise ValueError("seed=None: torch.compile requires a seed for the dropout: pass a different integer in every call")
    if is_capturing(device):
        raise ValueError(
            "seed=None: every replay of this CUDA graph would drop the same entries: capture the call without dropout, or pass "
            "a seed if all replays may drop the same entries"
        )
    with unset_fake_temporarily():  # a fake tensor has no value
        return int(torch.randint(2**63 - 1, (), device="cpu"))


# The cache is small, because intervals occupy GPU memory. The arguments are numbers, because tensors are hashed by identity.
@lru_cache(maxsize=8)
def _intervals(
    numbers: tuple[int, ...], reach: tuple[int, int], num_queries: int, num_keys: int, device: torch.device
) -> Intervals:
    mask = Mask.from_numbers(reach, numbers, num_keys)
    return Intervals.of(*shared_intervals(mask, num_keys, num_queries), num_keys, device)


@cached_on_device(maxsize=8)
def _positions(num_tokens: int, seq_len: int, device: torch.device) -> Tensor:
    return torch.arange(seq_len - num_tokens, seq_len, dtype=torch.int32, device=device)


# Each cached mask keeps its tensor `keep` alive, so id(keep) in the cache key stays unique.
_block_masks: dict[tuple[int, int, int], BlockMask] = {}
_MAX_BLOCK_MASKS = 8


def _block_mask(keep: Tensor, size: int) -> BlockMask:
    if keep.is_inference():  # inference tensors have no version counter
        return BlockMask(keep, size)
    key = id(keep), keep._version, size
    mask = _block_masks.get(key)
    if mask is None:
        mask = _block_masks[key] = BlockMask(keep, size)
        if len(_block_masks) > _MAX_BLOCK_MASKS:
            _block_masks.pop(next(iter(_block_masks)), None)
    return mask


def _kernel_arguments(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[tuple[Intervals, float], dict[str, Any]]:
    num_queries, num_keys = q.shape[1], k.shape[1]
    intervals = _intervals(tuple(spec.numbers.tolist()), (spec.before, spec.after), num_queries, num_keys, q.device)
    dropout = None
    if spec.dropout_p:
        query_positions, key_positions = (_positions(count, num_keys, q.device) for count in (num_queries, num_keys))
        dropout = Dropout(spec.dropout_p, spec.seed, query_positions, key_positions)
    blocks = None if spec.keep is None else _block_mask(spec.keep, spec.block_size)
    # A CUDA graph may read cached tensors after the caches have dropped them.
    keep_for_graph((intervals, dropout, blocks), q.device)
    options = {"dropout": dropout, "blocks": blocks, "backend": spec.backend, "precision": spec.precision}
    return (intervals, spec.scale), options


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> custom_op.Results:
    arguments, options = _kernel_arguments(q, k, spec)
    out, lse = dispatch.forward(q, k, v, *arguments, final=True, **options)
    return out, lse, []


def _backward(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, ...]:
    q, k, v, out, lse = saved
    arguments, options = _kernel_arguments(q, k, spec)
    intervals, _ = arguments
    if spec.keep is not None or intervals.num_nonempty_rows < intervals.lo.numel():
        dout, dlse = dispatch.clear_without_keys(lse, dout, dlse)

    def backward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, ...]:
        return dispatch.backward(q, k, v, dout, lse, (out, dlse), *arguments, **options)

    if spec.precision == "fp8":
        return dispatch.backward_fp8(backward, q, k, v, out, lse, dout, dlse)
    return backward(q, k, v, out, lse, dout, dlse)


def _pairs(batch: int, num_queries: int, num_keys: int, spec: AttentionSpec) -> float:
    kept = 1 if spec.keep is None else spec.keep.float().mean().item()
    return kept * spec.count_pairs(batch, num_queries)


_attention = custom_op.register("flash_attention", AttentionSpec, _forward, _backward, _pairs)
