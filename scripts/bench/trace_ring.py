"""Plot the kernels and copies of every GPU of a ring in one forward and backward pass, from torch's profiler.

    torchrun --nproc_per_node=4 -m scripts.bench.trace_ring --case causal-64k --output outputs/timeline
    python -m scripts.bench.trace_ring --draw outputs/timeline/timeline.json

The script accepts the same cases as `scripts.bench.ring`. All ranks record one call, after several warm-up calls. All ranks
must be on one host, because they must share one clock. Rank 0 writes timeline.json and timeline.png to --output. The option
--draw draws the plot again from timeline.json and needs no GPU. White lines between consecutive kernels in the plot are not
pauses.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from scripts import command, gpus
from scripts.bench.ring_variants import CASES, VARIANTS, is_ring, random_shard, ring_calls
from scripts.plots import plt, save_plot

WARMUP_CALLS = 5
KERNELS = {  # maps the start of a kernel's name to the kind of the kernel
    "_forward_kernel": "forward",
    "_prepare_kernel": "backward",
    "_prepare_wide_kernel": "backward",
    "_row_delta_kernel": "backward",
    "_interleave_kernel": "backward",
    "_main_kernel": "backward",
    "_finish_kernel": "backward",
    "_key_gradient_kernel": "backward",
    "_query_gradient_kernel": "backward",
    "nccl": "nccl",
}
# names of copies between GPUs in the profiler
COPIES = ("Memcpy PtoP", "Memcpy DtoD")
KINDS = {  # maps each kind of event to its lane, its colour and its legend
    "forward": (0, "tab:blue", "attention, forward"),
    "backward": (0, "tab:orange", "attention, backward"),
    "other": (0, "darkgrey", "other kernels and copies"),
    "block": (1, "tab:green", "copies of circulating blocks"),
    "nccl": (1, "tab:purple", "NCCL"),
    "result": (2, "tab:red", "copies of partial results"),
}


class Event(NamedTuple):
    """A kernel or a copy. Times are in nanoseconds of the host's clock."""

    name: str
    stream: int
    start: int
    duration: int


def device_events(trace: dict[str, Any]) -> list[Event]:
    base = trace["baseTimeNanoseconds"]
    events = [
        Event(x["name"], x["args"]["stream"], base + round(1e3 * x["ts"]), round(1e3 * x["dur"]))
        for x in trace["traceEvents"]
        if x.get("cat") in ("kernel", "gpu_memcpy")
    ]
    return sorted(events, key=lambda event: event.start)


def classify(events: list[Event]) -> list[str]:
    """Classify one rank's events by the keys of KINDS. The events must be sorted by start time. The first stream with copies
    contains circulating blocks, and the second stream contains partial results.
    """
    kinds = [next((kind for name, kind in KERNELS.items() if event.name.startswith(name)), "other") for event in events]
    computing = {event.stream for event, kind in zip(events, kinds, strict=True) if kind in ("forward", "backward")}
    sending = [event.stream for event in events if event.name.startswith(COPIES) and event.stream not in computing]
    roles = dict(zip(dict.fromkeys(sending), ("block", "result"), strict=False))
    return [
        roles.get(event.stream, kind) if event.name.startswith(COPIES) else kind
        for event, kind in zip(events, kinds, strict=True)
    ]


def timeline(ranks: list[list[Event]]) -> list[dict[str, Any]]:
    first = min(event.start for events in ranks for event in events)
    return [
        {
            "rank": rank,
            "kind": kind,
            "stream": event.stream,
            "start_us": (event.start - first) / 1e3,
            "duration_us": event.duration / 1e3,
        }
        for rank, events in enumerate(ranks)
        for event, kind in zip(events, classify(events), strict=True)
    ]


def draw(found: dict[str, Any]) -> plt.Figure:
    """Draw the kernels and copies of each rank below each other.

    Args:
        found: the content of timeline.json.
    """
    events = found["events"]
    present = [kind for kind in KINDS if any(event["kind"] == kind for event in events)]
    lanes = sorted({KINDS[kind][0] for kind in present})
    ranks, band = 1 + max(event["rank"] for event in events), len(lanes) + 0.6  # a lane is 1 high
    figure, axes = plt.subplots(figsize=(13, 1.6 + 0.3 * band * ranks), layout="constrained")
    for kind in present:
        lane, colour, label = KINDS[kind]
        # White edges would hide short copies.
        edge = "white" if kind in ("forward", "backward") else colour
        for rank in range(ranks):
            own = [event for event in events if event["rank"] == rank and event["kind"] == kind]
            spans = [(event["start_us"] / 1e3, event["duration_us"] / 1e3) for event in own]
            bottom = rank * band + lanes.index(lane) + 0.1
            options = dict(facecolor=colour, edgecolor=edge, linewidth=0.5, label="" if rank else label)
            axes.broken_barh(spans, (bottom, 0.8), **options)
    for rank in range(1, ranks):
        axes.axhline(rank * band - 0.3, color="lightgrey", linewidth=0.8)
    axes.set_yticks([rank * band + len(lanes) / 2 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="ms", xlim=(0, None), ylim=(ranks * band - 0.3, -0.3))
    axes.set_title(f"{found['case']}, {found['variant']}: forward and backward on {found['machine']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(present), frameon=False)
    return figure


def record(call: Callable[[], object], barrier: Callable[[], object]) -> list[Event]:
    """Record the kernels and copies of this rank's GPU during one call.

    Args:
        call: the call to record.
        barrier: returns when all ranks have called `barrier`.

    Raises:
        RuntimeError: the profiler recorded no kernel.
    """
    for _ in range(WARMUP_CALLS):
        call()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        # The first call initialises the profiler, and the second call is recorded.
        steps = schedule(wait=0, warmup=1, active=1, repeat=1)

        def save(profiler: profile) -> None:
            profiler.export_chrome_trace(str(path))

        with profile(activities=[ProfilerActivity.CUDA], schedule=steps, on_trace_ready=save) as profiler:
            for _ in range(2):
                torch.cuda.synchronize()
                barrier()
                call()
                torch.cuda.synchronize()
                profiler.step()
        events = device_events(json.loads(path.read_text()))
    if not events:
        raise RuntimeError("the profiler recorded no kernel: torch requires CUPTI and the permission to use it")
    return events


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    # CUDA graphs may replay copies on any stream, so `classify` does not support them.
    rings = [variant for variant in VARIANTS if is_ring(variant) and not variant.endswith("-graph")]
    parser.add_argument("--case", choices=CASES, default="causal-64k", help="default: causal-64k")
    parser.add_argument("--variant", choices=rings, default="nvlink-auto", help="default: nvlink-auto")
    default = command.RESULTS / "timeline"
    parser.add_argument("--output", type=Path, default=default, help="default: outputs/benchmarks/timeline")
    parser.add_argument("--draw", type=Path, metavar="TIMELINE.JSON", help="only draw the plot, next to this file")
    args = parser.parse_args(argv)
    if not args.draw and os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        parser.error("all ranks must be on one host, because the clocks of several hosts cannot be compared")
    if not args.draw and "RANK" not in os.environ:
        parser.error("start this script with torchrun, or pass --draw")
    if args.draw and not args.draw.is_file():
        parser.error(f"--draw {args.draw}: no such file")
    return args


def main(argv: list[str]) -> None:
    args = parse(argv)
    if args.draw:
        save_plot(draw(json.loads(args.draw.read_text())), args.draw.with_suffix(".png"))
        return
    gpus.join_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hosts = gpus.new_group(backend="gloo")  # a group for a barrier that runs no kernel
    case = CASES[args.case]
    call = ring_calls(case, args.variant, random_shard(case)).both
    events = record(call, lambda: dist.barrier(hosts))
    gathered: list[list[Event]] = [[]] * ranks
    dist.gather_object(events, gathered if rank == 0 else None, group=hosts)
    if rank == 0:
        header = command.describe_run("scripts.bench.trace_ring", argv, gpus=ranks, ranks=ranks)
        header["machine"] = f"{ranks} x {torch.cuda.get_device_name()}"  # short enough for a title
        found = {**header, "case": args.case, "variant": args.variant, "events": timeline(gathered)}
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "timeline.json").write_text(json.dumps(found) + "\n")
        save_plot(draw(found), args.output / "timeline.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
