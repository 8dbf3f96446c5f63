"""The public call: exact attention over a sequence whose rows are spread over the ranks of a ring."""

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from ringattn import custom_op
from ringattn.comm import transport as transports
from ringattn.comm.group import Group, rank_and_size
from ringattn.graphs import keep_if_captured
from ringattn.kernels import dispatch
from ringattn.kernels.reference import under_autocast
from ringattn.kernels.validation import PRECISIONS
from ringattn.layout import Layout
from ringattn.mask import Mask, check_mask
from ringattn.planning.rank_plan import SCHEDULES, Plan, plan
from ringattn.ring import Ring

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    transport: str = "auto",
    backend: str = "auto",
    precision: str = "ieee",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v over the whole sequence; every rank of `group` calls it with its own rows.

    One operator with autograd: gradients of q, k, v follow from those of the output and of lse. Exact: partial results stay
    in fp32 between tiles and hops (Dao et al. 2022; Liu et al. 2023, Ring Attention).

    Args:
        q: (B, N, Hq, D), this rank's rows in layout order; N = layout.rows(rank), which may be 0.
        k: (B, N, Hkv, D), v: (B, N, Hkv, Dv); Hkv divides Hq. All of one dtype (fp16, bf16, fp32, fp64) and device; under
            `torch.autocast` they are cast to its dtype.
        layout: which positions each rank holds, the same on all ranks.
        mask: which keys a position may see, the same on all ranks.
        group: the ring; None: this process alone.
        scale: positive factor on the scores; None: D ** -0.5.
        dropout_p: probability of dropping a probability of the softmax, 0 <= p < 1. The mask follows from `seed` and the
            position in the whole (query, key, head, batch row): it is the same on any number of ranks and in any layout.
        seed: of the dropout, the same on all ranks; another one for every layer and step.
        first_head: for the dropout, the place of q's first head among all, where heads are split over rings.
        schedule: "state" (queries and states travel), "kv" (keys and values travel), or "auto": in each direction the one
            that is expected to take less time, then fewer bytes; `ringattn.explain` shows why.
        transport: "nvlink", "p2p" (NCCL, gloo) or "auto", see `ringattn.comm.transport.resolve`. All calls of a process go to one
            CUDA stream, or to streams that wait for each other.
        backend: the kernels, see `ringattn.kernels.dispatch`.
        precision: of products of fp32 inputs in the Triton kernels, "ieee" or "tf32".
        return_lse: also return the log of the softmax's denominator.

    Returns:
        out (B, N, Hq, Dv) in q's dtype; with `return_lse` (out, lse), lse (B, N, Hq) in fp32 (fp64 for fp64 inputs). A row
        that may see no key gives 0 and -inf.

    Raises:
        ValueError: shapes, dtypes, layout, mask, group, schedule or transport that contradict each other, before any work
            starts.
        RingFault: a rank of the ring does not answer. Where no exception can be raised, because the host waits for a GPU that
            waits for a peer, the process prints the reason and ends. RINGATTN_TIMEOUT sets the seconds of patience.
    """
    q, k, v = autocast(q, k, v)
    scale = scale_of(q, scale)
    check_choices(schedule, transport)
    rank, size = rank_and_size(group)
    check_layout(layout, size)
    if q.ndim == 4 and q.shape[1] != layout.rows(rank):
        raise ValueError(f"rank {rank} has {q.shape[1]} rows but its shard has {layout.rows(rank)}: use layout.shard")
    if isinstance(first_head, float) or first_head < 0:
        raise ValueError(f"first_head = {first_head}: give the number of query heads before this ring's, 0 or more")
    check_inputs(q, k, v, mask, layout.seq_len, scale, dropout_p, seed, backend, precision)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} rows and k has {k.shape[1]}: a rank holds the same positions of both")
    name = "" if group is None else group.group_name
    settings = mask.lengths, mask.is_causal, mask.window or 0, layout.kind, layout.seq_len, layout.ranks, name
    options = schedule, transport, scale, float(dropout_p), seed, first_head, backend, precision
    out, lse = _attention(q, k, v, *settings, *options)
    return (out, lse) if return_lse else out


def scale_of(q: Tensor, scale: float | None) -> float:
    """The factor on the scores: `scale`, or D ** -0.5. Some number for a q without features, or one that will be refused.

    Raises:
        ValueError: a scale that is to be learned.
    """
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError("scale requires a gradient, which attention does not pass to it: multiply q by it, and give scale=1.0")
    return max((*q.shape[-1:], 1)) ** -0.5 if scale is None else float(scale)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of `torch.autocast` where it is on, as torch's own attention takes them; fp64 stays."""
    device = tensors[0].device
    if not under_autocast(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def check_layout(layout: Layout, size: int | None = None) -> None:
    """Refuse what is no layout, or one over another number of ranks than the `size` of a group.

    Raises:
        ValueError: naming what was given.
    """
    if not isinstance(layout, Layout):
        raise ValueError(f"layout is a {type(layout).__name__}: give a ringattn.Layout, such as Layout.zigzag(seq_len, ranks)")
    if size not in (None, layout.ranks):
        alone = " (group=None is this process alone)" if size == 1 else ""
        raise ValueError(f"the layout is cut for {layout.ranks} ranks but the group has {size}{alone}: they must be equal")


def check_choices(schedule: str, transport: str) -> None:
    """Refuse a schedule or a transport that there is not.

    Raises:
        ValueError: naming those that there are.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    if transport not in transports.TRANSPORTS:
        raise ValueError(f"unknown transport {transport!r}: choose one of {', '.join(transports.TRANSPORTS)}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse kinds, shapes, dtypes and devices that are none of attention's.

    Raises:
        ValueError: naming those given.
    """
    if any(hasattr(x, "to_local") for x in (q, k, v)):
        raise ValueError("q, k, v are DTensors: give each rank's own rows as plain tensors, x.to_local()")
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v have {q.ndim}, {k.ndim}, {v.ndim} dimensions: give (B, N, H, D)")
    (batch, _, num_heads, head_dim), (_, num_keys, num_key_heads, _) = q.shape, k.shape
    if k.shape != (batch, num_keys, num_key_heads, head_dim) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: give q (B, N, Hq, D), k (B, N, Hkv, D), "
            "v (B, N, Hkv, Dv)"
        )
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(f"{num_heads} query heads do not divide into {num_key_heads} key heads: Hkv must divide Hq")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}: give one dtype and device"
        )
    if q.dtype not in DTYPES:
        raise ValueError(f"q, k, v are {q.dtype}: give fp16, bf16, fp32 or fp64")


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    seq_len: int,
    scale: float,
    dropout_p: float,
    seed: int,
    backend: str,
    precision: str,
) -> None:
    """Refuse what no attention can honour, on a ring or alone, before any work starts.

    Raises:
        ValueError: saying what, why and what to do.
    """
    check_mask(mask)
    check_tensors(q, k, v)
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale = {scale}: give a positive, finite factor; for a negative one negate q")
    if not 0 <= dropout_p < 1 or isinstance(seed, float | None) or not 0 <= seed < 2**63:
        raise ValueError(f"dropout_p = {dropout_p}, seed = {seed}: give 0 <= dropout_p < 1 and an integer 0 <= seed < 2**63")
    mask.check(seq_len, q.shape[0])
    dispatch.choose_backend(q.device, q.dtype, backend, (q.shape[3], v.shape[3]), plain=dropout_p == 0)
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}")


def plan_ahead(mask: Mask, layout: Layout, like: tuple[Mask, Layout], *, group: Group | None, device: torch.device) -> None:
    """Plan calls under a new mask before they come, as calls under an earlier one were planned when they came.

    A call under a new mask plans first, for milliseconds, of many ranks up to a second, in which a GPU has nothing to do. While
    the GPU still works on something else, that costs nothing. Without it all results are the same.

    Args:
        mask, layout: of the calls to come, of a ring: of a layout that is split, `layout.whole`.
        like: the (mask, layout) of earlier calls; the calls to come have their shapes and options.
        group, device: theirs, too.

    Raises:
        ValueError: a layout that is split, or over other ranks than the group's; a mask of another length.
    """
    rank, size = rank_and_size(group)
    for each, where in ((mask, layout), like):
        check_layout(where)
        if where.parts > 1:
            raise ValueError(f"{where} is split: give layout.whole, by which calls on a ring are planned")
        check_layout(where, size)
        each.check(where.seq_len)
    plan(mask, layout, rank, device).prepare_as(plan(*like, rank, device))


# The operators take the mask and the layout as values, so that a compiler may trace them and a plan is found by value.
SETTINGS = (
    "Tensor documents, bool is_causal, SymInt window, str layout, SymInt seq_len, SymInt ranks, str group, str schedule, "
    "str transport, float scale, float dropout_p, SymInt seed, SymInt first_head, str backend, str precision"
)


def ring_of(
    q: Tensor,
    documents: Tensor,
    is_causal: bool,
    window: int,
    layout: str,
    seq_len: int,
    ranks: int,
    group: str,
    schedule: str,
    transport: str,
    scale: float,
    dropout_p: float,
    seed: int,
    first_head: int,
    backend: str,
    precision: str,
    call: Callable[[], dict[str, object]] | None = None,
) -> tuple[Ring, str]:
    """The ring that the settings describe, and the schedule; `call` as for `transport.resolve`."""
    end = transports.resolve(group, q.device, transport, call)
    planned = _plan(tuple(documents.tolist()), is_causal, window, layout, seq_len, ranks, end.rank, q.device)
    keep_if_captured(planned, q.device)
    return Ring(planned, end, scale, dropout_p, seed, first_head, backend, precision), schedule


def call_of(q: Tensor, k: Tensor, v: Tensor, *settings) -> dict[str, object]:
    """What must be the same on all ranks, by the names that callers know; `settings`: SETTINGS."""
    documents, is_causal, window, layout, seq_len, _, _, schedule, _, scale, dropout_p, seed = settings[:12]
    shape = {"batch size": q.shape[0], "heads": q.shape[2], "key heads": k.shape[2], "head dim": q.shape[3]}
    shape |= {"value head dim": v.shape[3], "dtype": str(q.dtype)}
    mask = {"causal": is_causal, "window": window or None, "documents": documents.tolist()}
    where = {"layout": layout, "seq_len": seq_len, "schedule": schedule}
    return shape | mask | where | {"scale": scale, "dropout_p": dropout_p, "seed": seed if dropout_p else None}


@lru_cache(
    maxsize=4
)  # as in `ringattn.planning.rank_plan`; found anew in every layer, and at 4,096 rows a rank every 10 us count
def _plan(
    documents: tuple[int, ...],
    is_causal: bool,
    window: int,
    layout: str,
    seq_len: int,
    ranks: int,
    rank: int,
    device: torch.device,
) -> Plan:
    mask = Mask.from_lengths(is_causal, window or None, documents, seq_len)
    return plan(mask, Layout(layout, seq_len, ranks), rank, device)


def _forward(q, k, v, *settings):
    ring, schedule = ring_of(q, *settings, call=partial(call_of, q, k, v, *settings))
    return ring.forward(q.contiguous(), k.contiguous(), v.contiguous(), schedule=schedule)


def _backward(q, k, v, out, lse, dout, dlse, *settings):
    ring, schedule = ring_of(q, *settings)
    q, k, v, out, lse, dout = (x.contiguous() for x in (q, k, v, out, lse, dout))
    return ring.backward(q, k, v, out, lse, dout, dlse if dlse is None else dlse.contiguous(), schedule=schedule)


def pairs_a_rank(batch, num_queries, num_keys, documents, is_causal, window, layout, seq_len, ranks, *_):
    """The mean over the ranks of a ring, so that their counts sum to what all compute."""
    return pairs_of_batch(batch, seq_len, documents, is_causal, window) / ranks


def pairs_of_batch(
    batch: int, seq_len: int, documents: Tensor, is_causal: bool, window: int, num_queries: int | None = None
) -> float:
    """How many (query, key) pairs of one head all rows of a batch compute, of a mask as operators carry it."""
    lengths = documents.tolist() if documents.numel() else ()
    counts = Mask.from_lengths(is_causal, window or None, lengths, seq_len).pairs(seq_len, num_queries)
    return batch * sum(counts) / len(counts)


_attention = custom_op.register("ring_attention", SETTINGS, _forward, _backward, pairs_a_rank)
