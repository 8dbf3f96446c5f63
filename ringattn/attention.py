"""Define the public call `ring_attention`."""

from functools import partial

import torch
from torch import Tensor

from ringattn import custom_op
from ringattn.comm.connect import Group, rank_and_size
from ringattn.comm.transport import Tensors
from ringattn.kernels.validation import as_integer, as_number, check_dense, check_flag, shown
from ringattn.layout import Layout
from ringattn.mask import Mask, check_mask
from ringattn.planning.rank_plan import get_plan
from ringattn.ring import Ring
from ringattn.sinks import check_sink_logits, with_sinks
from ringattn.spec import (
    AttentionSpec,
    autocast,
    check_attention,
    check_choices,
    check_layout,
    check_shard,
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
    sink_logits: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * q k^T + mask) v for a sequence that is sharded over the ranks of `group`.

    Every rank calls this function with its own tokens. All calls of a process must use one CUDA stream, or streams that wait
    for each other. The call is one differentiable operator. Attention is exact, and partial results are fp32 (Liu et al. 2023,
    Ring Attention, https://arxiv.org/abs/2310.01889).

    Args:
        q: (B, N, Hq, D), this rank's tokens in layout order; N = layout.rows(rank), which may be 0.
        k: (B, N, Hkv, D), v: (B, N, Hkv, Dv); Hkv divides Hq. q, k and v have the same dtype (fp16, bf16, fp32 or fp64).
            `torch.autocast` casts q, k and v to the autocast dtype.
        layout, mask: which positions each rank holds, and which keys each query may attend to; the same on all ranks.
        group: the ranks of the ring; None for this process alone.
        scale, dropout_p, backend: as for `flash_attention`. The dropped entries do not depend on the ranks or the layout.
        seed: the seed of the dropout, the same on all ranks, but different for every layer and step.
        first_head: the index of q's first head among all heads of the layer. Dropout depends on this index.
        schedule: "state" (queries and states circulate), "kv" (keys and values circulate), or "auto". With "auto", a pass uses
            the state ring if a cost model predicts a gain of at least 3%. CPUs always use the state ring.
        route: "relay" (neighbours relay messages over NCCL or gloo), "direct", or "auto" ("direct" inside one host).
        transport: "nvlink", "p2p" (NCCL or gloo) or "auto", see `ringattn.comm.connect.connect`.
        precision: as for `flash_attention`, the same on all ranks. With "fp8", each block of 128 rows of a shard has one scale.
        return_lse: also return the log-sum-exp of the scores.
        sink_logits: (Hq,), learned logits that take part in the softmax but have no value. Sinks may require gradients. Each
            rank computes the gradient that comes from its own queries. None for no sinks. A sink may be -inf only if every
            query has a key; otherwise, the output of a query without keys is NaN.

    Returns:
        out (B, N, Hq, Dv) in q's dtype, or (out, lse). The log-sum-exp lse (B, N, Hq) is fp32 (fp64 for fp64 inputs). A query
        without allowed keys has out = 0 and lse = -inf. With `sink_logits`, lse includes the sinks.

    Raises:
        ValueError: arguments contradict each other. All arguments are checked before any work starts.
        RingFault: a rank does not respond within RINGATTN_TIMEOUT seconds (an environment variable). A process whose GPU waits
            for that rank prints a message and exits instead.
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
    check_sink_logits(sink_logits, q)
    options |= dict(first_head=first_head, schedule=schedule, route=route, transport=transport)
    spec = AttentionSpec.create(mask, layout, group="" if group is None else group.group_name, **options)
    out, lse, _ = _attention(q, k, v, spec)
    return with_sinks(out, lse, sink_logits, return_lse)


def plan_ahead(mask: Mask, layout: Layout, like: tuple[Mask, Layout], *, group: Group | None, device: torch.device) -> None:
    """While the GPU is busy, plan future calls with a new mask. For many ranks, planning takes up to a second.

    Args:
        mask, layout: the arguments of the future calls. For a split layout, pass `layout.whole`.
        like: (mask, layout) of earlier calls with the same shapes, options, group and device.

    Raises:
        ValueError: an argument is invalid, such as a split layout.
    """
    rank, size = rank_and_size(group)
    if not isinstance(like, (tuple, list)) or len(like) != 2:
        raise ValueError(f"like={shown(like)}: it must be a pair (mask, layout) of earlier calls")
    try:
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
    ring = Ring.of(spec, q.device, partial(spec.as_call, "forward", q, k, v))
    out, lse = ring.forward(q.contiguous(), k.contiguous(), v.contiguous())
    return out, lse, []


def _backward(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, spec: AttentionSpec) -> Tensors:
    tensors = (x if x is None else x.contiguous() for x in (*saved, dout, dlse))
    return Ring.of(spec, dout.device).backward(*tensors)


def pairs_per_rank(batch: int, num_queries: int, num_keys: int, spec: AttentionSpec) -> float:
    return spec.count_pairs(batch) / spec.ranks


_attention = custom_op.register("ring_attention", AttentionSpec, _forward, _backward, pairs_per_rank)
