"""Compute attention on one device, without a process group.

A model can call `flash_attention` instead of `scaled_dot_product_attention`.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ringattn import custom_op
from ringattn.kernels import dispatch, validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.caching import cached_on_device, is_capturing
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.validation import check_dense, check_flag
from ringattn.mask import Mask, shared_intervals
from ringattn.spec import autocast, check_attention, count_pairs, resolve_scale

# These masks are created once, because every mask holds a tensor, and creating a tensor takes time on the host.
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * q k^T + mask) v tile by tile. The memory is linear in the number of tokens.

    The call is differentiable. The backward pass computes the gradients of q, k and v from the gradients of out and lse (Dao et
    al. 2022, FlashAttention, https://arxiv.org/abs/2205.14135). On a Hopper GPU the last bits of dq may differ from run to run.
    Under `torch.use_deterministic_algorithms(True)`, dq has the same bits in every run, and the backward pass takes longer. All
    other results always have the same bits in every run.

    Calls may run on any CUDA stream, and on several streams at the same time. A CUDA graph can capture a call if the same call
    has run once before the capture.

    There are three differences from `scaled_dot_product_attention`. Tensors have the shape (B, N, H, D), in which tokens come
    before heads. `mask` replaces `attn_mask`. If there are fewer queries than keys, `is_causal` aligns the last query with the
    last key, and not the first query with the first key.

    Args:
        q: (B, Nq, Hq, D), k: (B, Nk, Hkv, D), v: (B, Nk, Hkv, Dv); Hkv divides Hq. All three tensors have the same dtype (fp16,
            bf16, fp32 or fp64) and the same device. Under `torch.autocast`, q, k and v are cast to the autocast dtype. All
            values must be finite: a NaN in v may affect all queries of a tile, even queries that do not attend to its key.
        mask: which keys each query may attend to, over the Nk positions of the keys. The last query is at the last position, as
            in FlashAttention:

                Nq = 2, Nk = 4, causal:  1 1 1 0
                                         1 1 1 1

        is_causal: a short form of mask=Mask.causal(). The last query is aligned with the last key. If neither `mask` nor
            `is_causal` is given, every query attends to every key.
        scale: positive factor on the scores before the softmax; None for D ** -0.5.
        dropout_p: probability of dropping an entry of the softmax, 0 <= p < 1.
        seed: the seed of the dropout. If `seed` is None and `dropout_p` is not 0, every call draws a new seed from torch's
            default generator on the CPU, which `torch.manual_seed` seeds. `torch.compile` and the capture of a CUDA graph do
            not accept None with dropout. All replays of a graph drop the same entries.
        blocks: which pairs of (query block, key block) are computed, in addition to `mask`; None for all pairs. The kernels
            read lists of blocks, which are computed once for each version of `blocks.keep`. A replay of a CUDA graph that
            writes `blocks.keep` does not change this version, so pass a copy of `blocks.keep` after the replay.
        backend: the kernels, see `ringattn.kernels.backends`.
        precision: "ieee" or "tf32", the precision in which the Triton kernels multiply fp32 inputs; or "fp8". With "fp8", the
            forward pass rounds q, k and v to FP8 (e4m3, with one scale per head and block of 128 tokens, see
            `ringattn.kernels.fp8`), and the output has an error of a few percent. Sums and states stay fp32. The backward pass
            does not use FP8. It computes the gradients of attention for the rounded inputs, in the dtype of the original
            inputs, or in bf16 if this dtype is fp16, which cannot represent all rounded inputs. The rounding itself does not
            change the gradients. "fp8" supports neither dropout nor `blocks`. On a Hopper GPU, head dims 64, 128 and 256 use a
            kernel that reads FP8 inputs. In all other cases, "fp8" rounds the inputs in the same way, but is slower than the
            usual forward pass.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out (B, Nq, Hq, Dv) in q's dtype. With `return_lse`, the tuple (out, lse), in which lse (B, Nq, Hq) is fp32 (fp64 for
        fp64 inputs). For a query that may attend to no key, `out` is 0 and `lse` is -inf.

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
    # A k with a wrong number of dimensions has no sequence length. check_attention raises an error for such a k.
    seq_len = k.shape[1] if k.ndim == 4 else 0
    options = dict(scale=resolve_scale(q, scale), dropout_p=dropout_p, seed=seed, backend=backend, precision=precision)
    check_attention(q, k, v, mask=mask, seq_len=seq_len, **options)
    if precision == "fp8":
        validation.check_fp8(has_dropout=False, has_blocks=blocks is not None)
    # The operator receives the mask and the block mask as tensors and numbers, because a compiler cannot trace objects such as
    # `Mask` and `BlockMask`.
    spec = FlashSpec(
        keep=None if blocks is None else blocks.keep,
        block_size=0 if blocks is None else blocks.size,
        documents=mask.lengths,
        is_causal=mask.is_causal,
        window=mask.window or 0,
        **options,
    )
    out, lse, _ = _attention(q, k, v, spec)
    return (out, lse) if return_lse else out


def _draw_seed(device: torch.device) -> int:
    """Draw the seed of a dropout from torch's default generator on the CPU.

    Activation checkpointing restores the state of this generator, so the recomputation of a call draws the same seed.
    """
    if torch.compiler.is_compiling():
        raise ValueError("seed=None: torch.compile requires a seed for the dropout: pass a different integer in every call")
    if is_capturing(device):
        raise ValueError(
            "seed=None: every replay of this CUDA graph would drop the same entries: capture the call without dropout, or pass "
            "a seed if all replays may drop the same entries"
        )
    with unset_fake_temporarily():  # a fake tensor has no value
        return int(torch.randint(2**63 - 1, (), device="cpu"))


class FlashSpec(NamedTuple):
    """The settings of a call on a single device. The other fields of `ringattn.spec.AttentionSpec` describe a ring."""

    keep: Tensor | None  # `BlockMask.keep`; None without a block mask
    block_size: int  # `BlockMask.size`; 0 without a block mask
    documents: Tensor
    is_causal: bool
    window: int
    scale: float
    dropout_p: float
    seed: int
    backend: str
    precision: str


# All layers of a model use the same few masks, so a small cache suffices. A larger cache would keep the intervals of earlier
# masks in GPU memory. The key of the cache contains the lengths of the documents as integers, because tensors are hashed by
# identity and not by their values.
@lru_cache(maxsize=8)
def _intervals(
    documents: tuple[int, ...], is_causal: bool, window: int, num_queries: int, num_keys: int, device: torch.device
) -> Intervals:
    mask = Mask.from_lengths(is_causal, window or None, documents, num_keys)
    return Intervals.of(*shared_intervals(mask, num_keys, num_queries), num_keys, device)


@cached_on_device(maxsize=8)
def _positions(num_tokens: int, seq_len: int, device: torch.device) -> Tensor:
    """Return the last `num_tokens` positions of a sequence of `seq_len` tokens, int32."""
    return torch.arange(seq_len - num_tokens, seq_len, dtype=torch.int32, device=device)


# A cache of the most recent block masks. The key contains the id and the version of the tensor `keep`. Each cached block mask
# keeps its tensor alive, so no other tensor can have the same id as long as the block mask is in the cache.
_block_masks: dict[tuple[int, int, int], BlockMask] = {}
_MAX_BLOCK_MASKS = 8


def _block_mask(keep: Tensor, size: int) -> BlockMask:
    """Return the block mask of `keep`. The lists of blocks are built only once for each version of the tensor `keep`."""
    if keep.is_inference():  # inference tensors have no version counter
        return BlockMask(keep, size)
    key = id(keep), keep._version, size
    mask = _block_masks.get(key)
    if mask is None:
        mask = _block_masks[key] = BlockMask(keep, size)
        # A dict keeps the order of insertion, so the first key is the oldest entry.
        if len(_block_masks) > _MAX_BLOCK_MASKS:
            _block_masks.pop(next(iter(_block_masks)), None)
    return mask


def _kernel_arguments(q: Tensor, k: Tensor, spec: FlashSpec) -> tuple[tuple, dict]:
    """Return (intervals, scale) and the options of the kernels."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    # The host can read the lengths without waiting for the GPU, because the tensor of the lengths is on the CPU.
    documents = tuple(spec.documents.tolist())
    intervals = _intervals(documents, spec.is_causal, spec.window, num_queries, num_keys, q.device)
    dropout = None
    if spec.dropout_p:
        # The dropout of an entry depends on the positions of its query and its key in the whole sequence. Therefore
        # `flash_attention` and `ring_attention` drop the same entries.
        positions = (_positions(count, num_keys, q.device) for count in (num_queries, num_keys))
        dropout = Dropout(spec.dropout_p, spec.seed, *positions)
    blocks = None if spec.keep is None else _block_mask(spec.keep, spec.block_size)
    # A captured CUDA graph contains the addresses of these tensors. Without this call, the caches in this file could release
    # the tensors before the graph is replayed.
    custom_op.keep_for_graph((intervals, dropout, blocks), q.device)
    options = {"dropout": dropout, "blocks": blocks, "backend": spec.backend, "precision": spec.precision}
    return (intervals, spec.scale), options


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: FlashSpec) -> custom_op.Results:
    arguments, options = _kernel_arguments(q, k, spec)
    return *dispatch.forward(q, k, v, *arguments, final=True, **options), []


def _backward(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, spec: FlashSpec) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    arguments, options = _kernel_arguments(q, k, spec)
    # With more queries than keys, and with a block mask, a query may have no keys. Its out and its lse are constant, so their
    # gradients have no effect. They may be NaN, for example if `torch.logaddexp` merged two such lse, and 0 * NaN would be NaN.
    if spec.keep is not None or q.shape[1] > k.shape[1]:
        has_no_keys = lse == float("-inf")
        dout = dout.masked_fill(has_no_keys[..., None], 0.0)
        dlse = None if dlse is None else dlse.masked_fill(has_no_keys, 0.0)

    def backward(q, k, v, out, lse, dout, dlse):
        return dispatch.backward(q, k, v, dout, lse, (out, dlse), *arguments, **options)

    if spec.precision == "fp8":
        return dispatch.backward_fp8(backward, q, k, v, out, lse, dout, dlse)
    return backward(q, k, v, out, lse, dout, dlse)


def _pairs(batch: int, num_queries: int, num_keys: int, spec: FlashSpec) -> float:
    # The share of pairs that are computed is approximated by the share of blocks that are kept. The approximation is exact if
    # the mask is full and all blocks have the same size.
    kept = 1 if spec.keep is None else spec.keep.float().mean().item()
    return kept * count_pairs(batch, num_keys, spec.documents, spec.is_causal, spec.window, num_queries)


_attention = custom_op.register("flash_attention", FlashSpec, _forward, _backward, _pairs)
