"""Ring attention computes exact attention over a sequence whose tokens are sharded over the ranks of a ring."""

from functools import partial

import torch
from torch import Tensor

from ringattn import custom_op
from ringattn.comm.connect import Group, rank_and_size
from ringattn.kernels.validation import as_integer, as_number, check_dense, check_flag, shown
from ringattn.layout import Layout
from ringattn.mask import Mask, check_mask
from ringattn.planning.rank_plan import get_plan
from ringattn.ring import Ring
from ringattn.spec import (
    AttentionSpec,
    autocast,
    check_attention,
    check_choices,
    check_layout,
    check_shard,
    count_pairs,
    resolve_scale,
)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask,
    group: Group | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    first_head: int = 0,
    schedule: str = "auto",
    route: str = "auto",
    transport: str = "auto",
    backend: str = "auto",
    precision: str = "ieee",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * q k^T + mask) v over the whole sequence.

    Every rank of `group` calls this function with its own tokens.

    The call is one differentiable operator. The backward pass computes the gradients of q, k and v from the gradients of out
    and lse. The result is exact attention and not an approximation. The partial results of tiles and of hops are fp32 tensors
    (Dao et al. 2022, FlashAttention, https://arxiv.org/abs/2205.14135; Liu et al. 2023, Ring Attention,
    https://arxiv.org/abs/2310.01889).

    Args:
        q: (B, N, Hq, D), this rank's tokens in layout order; N = layout.rows(rank), which may be 0.
        k: (B, N, Hkv, D), v: (B, N, Hkv, Dv); Hkv divides Hq. q, k and v have the same dtype (fp16, bf16, fp32 or fp64) and the
            same device. Under `torch.autocast`, q, k and v are cast to the autocast dtype.
        layout: which positions each rank holds; the same on all ranks.
        mask: which keys each position may attend to; the same on all ranks.
        group: the ranks of the ring; None for this process alone.
        scale: positive factor on the scores before the softmax; None for D ** -0.5.
        dropout_p: probability of dropping an entry of the softmax, 0 <= p < 1. Only `seed` and the indices of the query, key,
            head and batch entry decide whether an entry is dropped. The indices count over the whole problem. Therefore the
            number of ranks and the layout do not change which entries are dropped.
        seed: seed of the dropout; the same on all ranks. Use a different seed for every layer and step.
        first_head: the index of q's first head among all heads of the layer; 0 unless the heads are divided among several
            rings. Only the dropout uses this index.
        schedule: "state" (queries and states circulate), "kv" (keys and values circulate), or "auto". With "auto", the forward
            pass and the backward pass each use the KV ring, unless the state ring is predicted to be at least 3% faster. On
            CPUs, "auto" always chooses the state ring. `ringattn.explain` shows the reason for the choice.
        route: "relay" (neighbours relay blocks and results around the ring), "direct" (each message goes directly to the rank
            that needs it), or "auto" ("direct" if all ranks are in one host, and "relay" otherwise). A ring with
            route="relay" uses NCCL or gloo instead of NVLink copies.
        transport: "nvlink", "p2p" (NCCL or gloo) or "auto", see `ringattn.comm.connect.connect`. All calls of a process must
            use one CUDA stream, or streams that wait for each other.
        backend: the kernels, see `ringattn.kernels.backends`.
        precision: "ieee" or "tf32", the precision in which the Triton kernels multiply fp32 inputs; or "fp8". With "fp8", the
            forward pass uses FP8, as `flash_attention` explains. Either all ranks must use "fp8", or none of them. Every rank
            rounds its own tokens to FP8, in blocks of 128 rows of its shard. Queries, keys and values then circulate in FP8,
            which halves the number of bytes to send. States circulate in fp32. The backward pass computes in the dtype of the
            inputs, or in bf16 if this is fp16, and its blocks circulate in this dtype. Dropout is not supported with "fp8".
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out (B, N, Hq, Dv) in q's dtype. With `return_lse`, the tuple (out, lse), in which lse (B, N, Hq) is fp32 (fp64 for fp64
        inputs). For a query that may attend to no key, `out` is 0 and `lse` is -inf.

    Raises:
        ValueError: the shapes, dtypes, layout, mask, group, schedule, route or transport contradict each other. All arguments
            are checked before any work starts.
        RingFault: a rank of the ring does not respond. If the host is waiting for a GPU that waits for another rank, Python
            cannot raise an exception. In this case, the process prints the reason and exits. The environment variable
            RINGATTN_TIMEOUT sets the timeout in seconds.
    """
    check_dense(q, k, v)
    q, k, v = autocast(q, k, v)
    scale, dropout_p = resolve_scale(q, scale), as_number("dropout_p", dropout_p)
    seed, first_head = as_integer("seed", seed), as_integer("first_head", first_head, high=2**31 - 1)
    check_flag("return_lse", return_lse)
    check_choices(schedule, route, transport)
    rank, size = rank_and_size(group)
    check_layout(layout, size)
    check_shard(q, k, layout, rank)
    options = dict(scale=scale, dropout_p=dropout_p, seed=seed, backend=backend, precision=precision)
    check_attention(q, k, v, mask=mask, seq_len=layout.seq_len, **options)
    options |= dict(first_head=first_head, schedule=schedule, route=route, transport=transport)
    spec = AttentionSpec.create(mask, layout, group="" if group is None else group.group_name, **options)
    out, lse, _ = _attention(q, k, v, spec)
    return (out, lse) if return_lse else out


def plan_ahead(mask: Mask, layout: Layout, like: tuple[Mask, Layout], *, group: Group | None, device: torch.device) -> None:
    """Prepare the plan of future calls with a new mask while the GPU is busy. This function does not change any results.

    The first call with a new mask computes a plan on the host. Computing a plan takes milliseconds, or up to a second for many
    ranks, and the GPU is idle during this time. To avoid this idle time, call this function while the GPU is still working on
    the previous step.

    Args:
        mask, layout: the mask and the layout of the future calls. For a layout that is split for Ulysses, pass `layout.whole`.
        like: the mask and the layout of earlier calls with the same shapes and options as the future calls.
        group, device: the group and the device, which must be the same in the earlier calls and in the future calls.

    Raises:
        ValueError: a layout is split, a layout has a different number of ranks than the group, or a mask has a different length
            than its layout.
    """
    rank, size = rank_and_size(group)
    if not isinstance(like, tuple | list) or len(like) != 2:
        raise ValueError(f"like={shown(like)}: it must be a pair (mask, layout) of earlier calls")
    try:
        # The device of tensors has an index, and the device that the caller passes may have none.
        device = torch.empty(0, device=torch.device(device)).device
    except (TypeError, RuntimeError):
        raise ValueError(f"device={shown(device)}: it must be a device of this machine, such as q.device") from None
    for each_mask, each_layout in ((mask, layout), like):
        check_mask(each_mask)
        check_layout(each_layout)
        if each_layout.parts > 1:
            raise ValueError(f"{each_layout} is split: pass layout.whole, which is the layout of the ring")
        check_layout(each_layout, size)
        each_mask.check(each_layout.seq_len)
    get_plan(mask, layout, rank, device).prepare(get_plan(*like, rank, device).requests())


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> custom_op.Results:
    # A backward pass needs no handshake, because the forward pass of the same call has already connected the ring. Therefore
    # only the forward pass provides its settings for the handshake.
    ring = Ring.of(spec, q.device, partial(spec.as_call, "forward", q, k, v))
    return *ring.forward(q.contiguous(), k.contiguous(), v.contiguous()), []


def _backward(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    # autograd may pass expanded tensors, for example as the gradient of a sum. Copy engines and kernels need contiguous memory.
    tensors = (x if x is None else x.contiguous() for x in (*saved, dout, dlse))
    return Ring.of(spec, dout.device).backward(*tensors)


def pairs_per_rank(batch: int, num_queries: int, num_keys: int, spec: AttentionSpec) -> float:
    """Return the number of (query, key) pairs of the whole call, divided by the number of ranks."""
    return count_pairs(batch, spec.seq_len, spec.documents, spec.is_causal, spec.window) / spec.ranks


# The operator is registered when the module is imported, because a compiler must know the operator before the first call.
_attention = custom_op.register("ring_attention", AttentionSpec, _forward, _backward, pairs_per_rank)
