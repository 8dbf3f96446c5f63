"""What a call of `ring_attention` would do, hop by hop, and why: for people."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ringattn.attention import check_choices, check_layout, check_tensors
from ringattn.comm.group import Group
from ringattn.comm.transport import resolve
from ringattn.layout import Layout
from ringattn.mask import Mask, check_mask
from ringattn.planning.cost_model import Fabric, HopCost, attention_flops, fabric
from ringattn.planning.rank_plan import Plan, Work, backward_work, forward_work, part_of_heads, plan
from ringattn.planning.schedule import Message, RankStep

MOVES = {  # what travels, and what comes back
    ("forward", "kv"): ("k, v", ""),
    ("forward", "state"): ("q", "m, l, o"),
    ("backward", "kv"): ("k, v", "dk, dv"),
    ("backward", "state"): ("q, dout, lse, delta", "dq"),
}


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask,
    group: Group | None = None,
    rank: int | None = None,
    schedule: str = "auto",
    transport: str = "auto",
) -> str:
    """A text: for forward and backward the schedule, why it was chosen, and what every hop moves and hides behind.

    Nothing is computed. Times are estimates from a table of link and kernel speeds, see `ringattn.planning.cost_model`.

    Args:
        q, k, v, layout, mask, schedule, transport: as for `ring_attention`. Only shapes, dtypes and devices matter: tensors on
            the "meta" device will do, and without a group stand for a GPU.
        group: the ring. None: one that does not exist, on one host, over NVLink or, with transport "p2p", over NCCL.
        rank: whose hops are told. None: this rank's, or rank 0's where there is no group.

    Raises:
        ValueError: a layout for another number of ranks than the group has, a rank outside it, shapes or dtypes that are none
            of attention's, documents of another length, or unknown names.
    """
    check_choices(schedule, transport)
    check_layout(layout)
    if group is None:
        speed = attention_flops(q.device) if q.device.type != "meta" else 5.8e14
        joined, here = fabric("nccl" if transport == "p2p" else "nvlink", flops=speed), 0
    else:
        end = resolve(group.group_name, q.device, transport)
        joined, here = end.fabric, end.rank
        check_layout(layout, end.size)
    here = here if rank is None else rank
    if not 0 <= here < layout.ranks:
        raise ValueError(f"rank {here} of a ring of {layout.ranks}: give 0 to {layout.ranks - 1}")
    check_mask(mask)
    check_tensors(q, k, v)
    mask.check(layout.seq_len, q.shape[0])
    planned = plan(mask, layout, here, torch.device("cpu"))
    lines = [_ring(layout, joined), _shapes(q, k, v, layout, here)]
    if (count := planned.passes(q, k, v)) > 1:
        q, k, v = (part_of_heads(x, count) for x in (q, k, v))
        lines.append(f"{count} passes, of {q.shape[2]} query and {k.shape[2]} key heads each; this is one of them")
    for work in (forward_work(q, k, v), backward_work(q, k, v)):
        lines += ["", *_direction(planned, work, joined, schedule)]
    return "\n".join(lines)


def _ring(layout: Layout, joined: Fabric) -> str:
    way = "every pair linked" if joined.all_pairs else "blocks are relayed by neighbours"
    return (
        f"{layout.ranks} ranks over {joined.name}, {way}: {joined.bytes_per_second / 1e9:.0f} GB/s and "
        f"{1e6 * joined.latency:.0f} us a message, {joined.flops / 1e12:.3g} TFLOP/s a rank"
    )


def _shapes(q: Tensor, k: Tensor, v: Tensor, layout: Layout, rank: int) -> str:
    values = f", values of {v.shape[3]}" if v.shape[3] != q.shape[3] else ""
    return (
        f"rank {rank} holds {layout.rows(rank):,} of {layout.seq_len:,} positions ({layout.name}); batch {q.shape[0]}, "
        f"{q.shape[2]} query and {k.shape[2]} key heads of {q.shape[3]}{values}, {str(q.dtype).removeprefix('torch.')}"
    )


def _direction(planned: Plan, work: Work, joined: Fabric, schedule: str) -> list[str]:
    chosen = planned.choose(schedule, work, joined)
    traveller, result = MOVES[work.direction, chosen]
    homeward = f", {result} come home" if result else ""
    lines = [f"{work.direction}: {chosen} schedule, {traveller} travel{homeward}", _why(planned, work, joined, schedule)]
    results = getattr(work.row_bytes, chosen)[1] > 0
    steps = planned.schedule(chosen, results, joined.all_pairs).by_rank[planned.rank]
    costs = planned.costs(chosen, work, joined, planned.rank)
    names = {"traveller": traveller, "result": result}
    for t, (step, cost) in enumerate(zip(steps, costs, strict=True)):
        lines.append(f"  hop {t}: {_step(step, names)}; {_time(cost)}")
    return lines


def _why(planned: Plan, work: Work, joined: Fabric, schedule: str) -> str:
    """The two schedules side by side, for the whole ring."""
    texts = []
    for name in ("kv", "state"):
        hops = planned.costs(name, work, joined)
        moved = sum(hop.bytes for hop in hops) / 2**20
        texts.append(f"{name} {1e3 * sum(hop.seconds for hop in hops):.3g} ms with {moved:,.1f} MiB")
    reason = "asked for" if schedule != "auto" else "less time, then fewer bytes, of the busiest rank at each hop"
    return f"  {reason}: {', '.join(texts)}"


def _step(step: RankStep, names: dict[str, str]) -> str:
    computes = ", ".join(f"rows {_span(visit.rows)} of rank {visit.owner}" for visit in step.visits)
    parts = [f"computes with {computes}" if computes else "computes nothing"]
    parts += _moves("sends", "to", step.outgoing, [m.dst for m in step.outgoing], names)
    parts += _moves("receives", "from", step.incoming, [m.src for m in step.incoming], names)
    return ", ".join(parts)


def _moves(verb: str, way: str, messages: Sequence[Message], peers: Sequence[int], names: dict[str, str]) -> list[str]:
    return [
        f"{verb} {names[m.kind]} rows {_span(m.rows)} of rank {m.owner} {way} rank {peer}"
        for m, peer in zip(messages, peers, strict=True)
    ]


def _span(rows: range) -> str:
    return f"{rows.start}:{rows.stop}"


def _time(cost: HopCost) -> str:
    text = f"{1e6 * cost.compute:.0f} us of kernels"
    if not cost.bytes:
        return text
    late = cost.communication - cost.compute
    fate = "hidden" if late <= 0 else f"{1e6 * late:.0f} us of it not hidden"
    return f"{text} beside {cost.bytes / 2**20:,.1f} MiB in {1e6 * cost.communication:.0f} us, {fate}"
