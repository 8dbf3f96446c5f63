"""Time ring attention on several GPUs, the same kernels without communication, and PyTorch's context_parallel.

    torchrun --nproc_per_node=4 -m scripts.bench.ring
    torchrun --nproc_per_node=4 -m scripts.bench.ring --cases causal-16k causal-64k --variants nvlink-auto local --rounds 5

All cases use bf16 and B = 1. Packed documents use the layout that balances the work, and all other cases use the zigzag layout.
The module `scripts/bench/ring_variants.py` explains the variants. The output and the gradients of a variant are first compared
with a float64 reference on a short sequence. The speed is reported only if the results are correct.

The variants are timed in turn in several rounds, because GPUs lower their clock rates when they warm up. Each round measures
the mean time per call on the slowest rank. The reported time is the median over all rounds. The variants `local` and
`ulysses-4-local` run the kernels of `nvlink-auto` and `ulysses-4` without communication. Variants that end with `-graph` replay
CUDA graphs, so their times do not include the time of the host. The host time matters for short shards. With 4,096 tokens per
rank, the host takes about as long as the GPU.

A forward pass has 4 H D FLOPs per (query, key) pair that the mask allows. A backward pass has 2.5 times as many FLOPs. Rates
are per GPU. Memory is the peak of torch's allocator during a forward and a backward pass, including the inputs. The receive
buffer of the NVLink transport is reported separately (`receive_buffer_bytes`). For every ring, the report also contains the
hops, the bytes that the busiest rank sends, and the exposed time. The exposed time is the time of a ring minus the time of
`local`.

Rank 0 writes README.md, ring.json and a plot to --output, with the functions of `scripts/bench/ring_report.py`.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.comm import pass_graphs
from ringattn.comm.connect import connect
from ringattn.comm.nvlink import NvlinkTransport
from ringattn.kernels.interval_mask import Intervals
from ringattn.planning import workload
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.rank_plan import get_plan
from scripts import command, gpus
from scripts.accuracy import GROUP_TOLERANCE, float64_results, group_error
from scripts.bench import ring_report
from scripts.bench import ring_variants as variants
from scripts.bench.cases import Case
from scripts.bench.ring_report import PARTS
from scripts.bench.ring_variants import Call, Calls
from scripts.tools.plan_ring import bytes_sent

CHECKED_LENGTH = 1536  # the comparison with the float64 reference has this many tokens per rank
NAMES = ("out", "dq", "dk", "dv")
# At ASSUMED_SPEED (FLOP/s), a measurement takes MEASUREMENT_SECONDS.
MEASUREMENT_SECONDS, ASSUMED_SPEED = 0.2, 4e14


def check(case: Case, variant: str) -> dict[str, float]:
    """Run the variant on a short sequence. Return the largest `group_error` of each result."""
    rank, ranks, ulysses = dist.get_rank(), dist.get_world_size(), variants.ulysses_degree(variant)
    small = Case(case.kind, CHECKED_LENGTH * ranks, case.heads, case.head_dim, key_heads=case.key_heads)
    layout, shard = variants.ring_layout(small, ranks, ulysses), variants.random_shard(small, ulysses, seed=1)
    calls = variants.make_calls(small, variant, shard)
    assert calls is not None
    results = calls.both()
    assert isinstance(results, tuple)
    q, k, v, dout = (layout.unshard(x.detach(), dist.group.WORLD) for x in shard)
    intervals = Intervals.of(*small.mask.intervals(small.length), small.length, shard[0].device)
    expected = float64_results(q, k, v, dout, intervals)
    errors = [group_error(x, layout.shard(expected[name], rank)) for name, x in zip(NAMES, results, strict=True)]
    worst = torch.stack(errors)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(NAMES, worst.tolist(), strict=True))


def largest_of_ranks(value: float) -> float:
    x = torch.tensor(value, device="cuda", dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.item()


def mean_ms(call: Call, repeats: int) -> float:
    """Return the milliseconds per call on the slowest rank."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return largest_of_ranks(start.elapsed_time(end) / repeats)


def peak_bytes(call: Call) -> int:
    """Return the peak memory of a call in bytes, the maximum over all ranks."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(largest_of_ranks(torch.cuda.max_memory_allocated()))


def receive_buffer_bytes(transport: NvlinkTransport) -> int:
    """Return the bytes of the receive buffers, which torch's allocator does not count."""
    buffers = transport.receive_buffer, transport.all_to_all_buffer
    return sum(buffer.memory.nbytes for buffer in buffers if buffer.memory is not None)


def count_messages(case: Case, schedule: str, ranks: int, interconnect: Interconnect) -> dict[str, dict[str, Any]]:
    """Count the hops in which messages are sent, and the bytes that the busiest rank sends.

    Returns:
        A dict with the keys "forward" and "both". The key "both" has sums over both passes.
    """
    plan = get_plan(case.mask, variants.ring_layout(case, ranks), 0, torch.device("cpu"))
    heads = case.heads, case.num_key_heads
    q, k = (torch.empty(1, 1, count, case.head_dim, dtype=torch.bfloat16, device="meta") for count in heads)
    chunks, passes = workload.chunk_work(q, k, k, plan.pairs / ranks)
    names: list[str] = []
    hops, sent = 0, [0] * ranks
    found: dict[str, dict[str, Any]] = {}
    for part, work in zip(PARTS, passes, strict=True):
        names.append(plan.choose_schedule(schedule, work, interconnect))
        block, result = getattr(work.row_bytes, names[-1])
        steps = plan.schedule(names[-1], result > 0, interconnect.all_pairs)
        hops += chunks * sum(bool(step.messages) for step in steps.steps)
        sent = [a + chunks * b for a, b in zip(sent, bytes_sent(steps, block, result), strict=True)]
        found[part] = {"schedule": " / ".join(names), "hops": hops, "bytes_sent": max(sent)}
    return found


def add_communication(case: Case, found: dict[str, dict[str, Any]], ranks: int, interconnects: dict[str, Interconnect]) -> None:
    for variant, interconnect in interconnects.items():
        row, base = found[variant], found.get(ring_report.base_of(variant), {})
        if "both" not in row:
            continue
        for part, sent in count_messages(case, variant.split("-")[1], ranks, interconnect).items():
            row[part] |= sent
            if part in base:
                row[part]["exposed_us"] = 1e3 * (row[part]["ms"] - base[part]["ms"])


def time_in_rounds(case: Case, calls: dict[str, Calls], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the median milliseconds, the TFLOP/s per GPU and the samples of each variant and part."""
    samples: dict[tuple[str, str], list[float]] = {(variant, part): [] for variant in calls for part in PARTS}
    if case.flops("forward") / dist.get_world_size() <= pass_graphs.MAX_FORWARD_FLOPS:
        # With short shards, the ring soon replays CUDA graphs. Therefore warm up.
        for timed in calls.values():
            with timed.context():
                for _ in range(pass_graphs.CALLS_BEFORE_CAPTURE):
                    timed.both()
    for _ in range(rounds):
        for (variant, part), times in samples.items():
            seconds = case.flops(part) / (ASSUMED_SPEED * dist.get_world_size())
            repeats = max(1, min(60, round(MEASUREMENT_SECONDS / seconds)))
            with calls[variant].context():
                times.append(mean_ms(getattr(calls[variant], part), repeats))
    found: dict[str, dict[str, Any]] = {variant: {} for variant in calls}
    for (variant, part), times in samples.items():
        ms = statistics.median(times)
        tflops = case.flops(part) / dist.get_world_size() / ms * 1e-9
        found[variant][part] = {"ms": ms, "tflops": tflops, "samples": times}
    return found


def measure(case: Case, names: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Calls] = {}
    for variant in names:
        shard = variants.random_shard(case, variants.ulysses_degree(variant))
        row = found[variant] = dict[str, Any]()
        if variants.communicates(variant):
            row["errors"] = check(case, variant)
            if not max(row["errors"].values()) <= GROUP_TOLERANCE:
                continue
        if timed := variants.make_calls(case, variant, shard):
            calls[variant] = timed
            with timed.context():
                row["peak_bytes"] = peak_bytes(timed.both)
    for variant, parts in time_in_rounds(case, calls, rounds).items():
        found[variant] |= parts
    group, device = gpus.world_group().group_name, torch.device("cuda", torch.cuda.current_device())
    rings = [variant for variant in found if variants.is_ring(variant)]
    interconnects = {variant: connect(group, device, variants.transport_of(variant)).interconnect for variant in rings}
    add_communication(case, found, dist.get_world_size(), interconnects)
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    cases = list(variants.CASES)[1:]
    parser.add_argument("--output", type=Path, default=command.RESULTS / "ring", help="default: outputs/benchmarks/ring")
    parser.add_argument("--cases", nargs="+", choices=variants.CASES, default=cases, help="default: all of at least 16k")
    parser.add_argument("--variants", nargs="+", choices=variants.VARIANTS, help="default: all that the ranks allow")
    parser.add_argument("--rounds", type=command.at_least(1), default=3, help="rounds of timing; default: 3")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    device = gpus.join_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = variants.choose_variants(args.variants, ranks)
    header = command.describe_run("scripts.bench.ring", argv, gpus=ranks, ranks=ranks) | {"ranks": ranks}
    rows: ring_report.Rows = {}
    for name in args.cases:
        case = variants.CASES[name]
        rows[name] = {"case": asdict(case), **measure(case, names, args.rounds)}
        torch.cuda.empty_cache()
        if rank == 0:
            ring_report.write(args.output, header, rows)
            print(ring_report.speed_table(header, {name: rows[name]}), flush=True)
    if ranks > 1 and any(name.startswith("nvlink") for name in names):
        transport = connect(gpus.world_group().group_name, device, "nvlink")
        assert isinstance(transport, NvlinkTransport)
        header["receive_buffer_bytes"] = receive_buffer_bytes(transport)
    if rank == 0:
        ring_report.write(args.output, header, rows)
    dist.destroy_process_group()
    wrong = [row for found in rows.values() for row in found.values() if "errors" in row and "both" not in row]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
