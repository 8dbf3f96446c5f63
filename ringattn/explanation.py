"""Describe what `ring_attention` would do in each hop, and the reasons for its schedules."""

import torch
from torch import Tensor

from ringattn.comm.connect import Group, connect, rank_and_size
from ringattn.kernels.validation import as_integer, check_precision, check_tensors
from ringattn.layout import Layout
from ringattn.mask import Mask, check_mask
from ringattn.planning.cost_model import HopCost, Interconnect, attention_flops, interconnect
from ringattn.planning.rank_plan import CIRCULATING, Plan, get_plan
from ringattn.planning.schedule import Message, RankStep
from ringattn.planning.workload import Work, backward_work, forward_work, head_chunk
from ringattn.spec import check_choices, check_layout


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
    route: str = "auto",
    transport: str = "auto",
    precision: str = "ieee",
) -> str:
    """Return a text that describes the chosen schedules of both passes, with the reasons.

    For every hop, the text lists the messages, and says whether computation hides the communication.

    This function does not compute attention. The times in the text are estimates from a table of link and kernel speeds, see
    `ringattn.planning.cost_model`.

    Args:
        q, k, v, layout, mask, schedule, route, transport, precision: as for `ring_attention`. q, k and v may be on the "meta"
            device.
        group: the process group of the ring; None to describe a ring on one host.
        rank: the rank whose hops are described. By default, the text describes this rank, or rank 0 if there is no group.

    Raises:
        ValueError: an argument is invalid, or does not fit the layout.
    """
    check_choices(schedule, route, transport)
    check_precision(precision)
    check_layout(layout)
    check_mask(mask)
    check_tensors(q, k, v)
    rank_and_size(group)
    if group is None:
        flops = attention_flops(q.device) if q.device.type != "meta" else 5.8e14
        name = "nccl" if transport == "p2p" or route == "relay" else "nvlink"
        if q.device.type == "cpu" and transport == "nvlink":
            raise ValueError("transport='nvlink' is unavailable: the tensors are on cpu; use transport='p2p' or 'auto'")
        joined, this_rank = interconnect("gloo" if q.device.type == "cpu" else name, flops=flops), 0
    else:
        connection = connect(group.group_name, q.device, transport, relays=route == "relay")
        joined, this_rank = connection.interconnect, connection.rank
        check_layout(layout, connection.size)
    joined = joined.with_route(route)
    rank = this_rank if rank is None else as_integer("rank", rank, high=layout.ranks - 1, remedy=", a rank of the layout")
    mask.check(layout.seq_len, q.shape[0])
    plan = get_plan(mask, layout, rank, torch.device("cpu"))
    lines = [_describe_ring(layout, joined), _describe_shapes(q, k, v, layout, rank)]
    if (count := plan.head_chunks_for_memory(q, k, v)) > 1:
        q, k, v = (head_chunk(x, count) for x in (q, k, v))
        lines.append(f"{count} chunks of {q.shape[2]} query and {k.shape[2]} key heads, one ring pass each; one is shown")
    for work in (forward_work(q, k, v, precision), backward_work(q, k, v)):
        lines += ["", *_describe_direction(plan, work, joined, schedule)]
    return "\n".join(lines)


def _describe_ring(layout: Layout, joined: Interconnect) -> str:
    route = "messages go directly to the rank that needs them" if joined.all_pairs else "neighbours relay messages"
    return (
        f"{layout.ranks} ranks over {joined.name}, {route}: {joined.bytes_per_second / 1e9:.0f} GB/s and "
        f"{1e6 * joined.latency:.0f} us per message, {joined.flops / 1e12:.3g} TFLOP/s per rank"
    )


def _describe_shapes(q: Tensor, k: Tensor, v: Tensor, layout: Layout, rank: int) -> str:
    values = f" (values {v.shape[3]})" if v.shape[3] != q.shape[3] else ""
    return (
        f"rank {rank} holds {layout.rows(rank):,} of {layout.seq_len:,} positions ({layout.name}); batch {q.shape[0]}, "
        f"{q.shape[2]} query and {k.shape[2]} key heads, head dim {q.shape[3]}{values}, {str(q.dtype).removeprefix('torch.')}"
    )


def _describe_direction(plan: Plan, work: Work, joined: Interconnect, schedule: str) -> list[str]:
    chosen = plan.choose_schedule(schedule, work, joined)
    block, result = CIRCULATING[work.direction, chosen]
    lines = [plan.describe_choice(schedule, work, joined)]
    results = getattr(work.row_bytes, chosen)[1] > 0
    steps = plan.schedule(chosen, results, joined.all_pairs, work.row_multiple).by_rank[plan.rank]
    costs = plan.costs(chosen, work, joined, plan.rank)
    names = {"block": block, "result": result}
    for t, (step, cost) in enumerate(zip(steps, costs, strict=True)):
        lines.append(f"  hop {t}: {_describe_step(step, names)}; {_describe_time(cost)}")
    return lines


def _describe_step(step: RankStep, names: dict[str, str]) -> str:
    blocks = ", ".join(
        f"rows {local_step.rows.start}:{local_step.rows.stop} of rank {local_step.owner}" for local_step in step.local_steps
    )
    parts = [f"computes with {blocks}" if blocks else "computes nothing"]
    parts += [f"sends {_describe_message(message, names)} to rank {message.dst}" for message in step.outgoing]
    parts += [f"receives {_describe_message(message, names)} from rank {message.src}" for message in step.incoming]
    return ", ".join(parts)


def _describe_message(message: Message, names: dict[str, str]) -> str:
    return f"{names[message.kind]} rows {message.rows.start}:{message.rows.stop} of rank {message.owner}"


def _describe_time(cost: HopCost) -> str:
    text = f"{1e6 * cost.compute:.0f} us of kernels"
    if not cost.bytes:
        return text
    exposed = cost.communication - cost.compute
    hidden = "hidden" if exposed <= 0 else f"{1e6 * exposed:.0f} us of it not hidden"
    return f"{text}, while {cost.bytes / 2**20:,.1f} MiB move in {1e6 * cost.communication:.0f} us, {hidden}"
