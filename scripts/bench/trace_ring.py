"""Draw what every GPU of a ring does when: kernels beside copies, forward and backward, as the profiler saw them.

    torchrun --nproc-per-node 4 -m scripts.bench.trace_ring --case causal-64k --output benchmarks/2026-11-23-timeline
    python -m scripts.bench.trace_ring --draw benchmarks/2026-11-23-timeline/timeline.json

The case is one of `benchmark_ring.py`. One call is traced, forward and backward, after others to warm up; all ranks start it
together from idle, so its first kernels wait for the host, as they would not in a row of calls. All ranks are on one host and
share its clock. Rank 0 writes timeline.json and timeline.png to --output; --draw makes the picture anew and needs no GPU. White
lines part kernels that follow each other: they are no pauses.
"""

import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from scripts.bench import gpus
from scripts.bench.ring import CASES, VARIANTS, is_ring, ring_step

ROOT = Path(__file__).resolve().parents[2]

WARM_UP = 5  # calls
KERNELS = {  # what the launches of `kernels/` are called, the Hopper ones and the portable ones
    "_forward_kernel": "forward",
    "_prepare_kernel": "backward",
    "_row_delta_kernel": "backward",
    "_main_kernel": "backward",
    "_finish_kernel": "backward",
    "_key_gradient_kernel": "backward",
    "_query_gradient_kernel": "backward",
    "nccl": "nccl",
}
COPIES = ("Memcpy PtoP", "Memcpy DtoD")  # what copies to a peer are called, by how its memory is mapped
KINDS = {  # lane, colour, legend
    "forward": (0, "tab:blue", "forward attention"),
    "backward": (0, "tab:orange", "backward attention"),
    "other": (0, "darkgrey", "other kernels and copies"),
    "traveller": (1, "tab:green", "copies of travellers"),
    "nccl": (1, "tab:purple", "NCCL"),
    "result": (2, "tab:red", "copies of results"),
}


class Event(NamedTuple):
    """Something that a GPU did, in nanoseconds of the host's clock."""

    name: str
    stream: int
    start: int
    duration: int


def device_events(trace: dict) -> list[Event]:
    """The kernels and copies of a trace of torch's profiler, by their start."""
    base = trace["baseTimeNanoseconds"]
    events = [
        Event(x["name"], x["args"]["stream"], base + round(1e3 * x["ts"]), round(1e3 * x["dur"]))
        for x in trace["traceEvents"]
        if x.get("cat") in ("kernel", "gpu_memcpy")
    ]
    return sorted(events, key=lambda event: event.start)


def classify(events: list[Event]) -> list[str]:
    """The kind of each event of one rank, one of KINDS; the events in the order of their start.

    Travellers and results are copied on a stream each, beside that of the attention kernels. The trace does not say which is
    which, but a pass sends a traveller before it has any result.
    """
    kinds = [next((kind for name, kind in KERNELS.items() if event.name.startswith(name)), "other") for event in events]
    computing = {event.stream for event, kind in zip(events, kinds, strict=True) if kind in ("forward", "backward")}
    sending = [event.stream for event in events if event.name.startswith(COPIES) and event.stream not in computing]
    roles = dict(zip(dict.fromkeys(sending), ("traveller", "result"), strict=False))
    return [
        roles.get(event.stream, kind) if event.name.startswith(COPIES) else kind
        for event, kind in zip(events, kinds, strict=True)
    ]


def timeline(ranks: list[list[Event]]) -> list[dict]:
    """The events of all ranks in microseconds from the first one on."""
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


def draw(found: dict) -> plt.Figure:
    """A band a rank, with a lane for kernels and one for each kind of copies that there is; of what timeline.json holds."""
    events = found["events"]
    present = [kind for kind in KINDS if any(event["kind"] == kind for event in events)]
    used = sorted({KINDS[kind][0] for kind in present})
    ranks, band = 1 + max(event["rank"] for event in events), len(used) + 0.6  # lanes are 1 high
    figure, axes = plt.subplots(figsize=(13, 1.6 + 0.3 * band * ranks), layout="constrained")
    for kind in present:
        lane, colour, label = KINDS[kind]
        # white edges part kernels that follow each other; short bars are seen by an edge of their own colour
        edge = "white" if kind in ("forward", "backward") else colour
        for rank in range(ranks):
            mine = [event for event in events if event["rank"] == rank and event["kind"] == kind]
            spans = [(event["start_us"] / 1e3, event["duration_us"] / 1e3) for event in mine]
            place = rank * band + used.index(lane) + 0.1, 0.8
            axes.broken_barh(spans, place, facecolor=colour, edgecolor=edge, linewidth=0.5, label="" if rank else label)
    for rank in range(1, ranks):
        axes.axhline(rank * band - 0.3, color="lightgrey", linewidth=0.8)
    axes.set_yticks([rank * band + len(used) / 2 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="ms", xlim=(0, None), ylim=(ranks * band - 0.3, -0.3))
    axes.set_title(f"{found['case']}, {found['variant']}: forward and backward on {found['machine']}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(present), frameon=False)
    return figure


def save_picture(found: dict, path: Path) -> None:
    figure = draw(found)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def record(step: Callable[[], object], meet: Callable[[], object]) -> list[Event]:
    """What this rank's GPU does in one call; `meet` returns when all ranks have called it.

    Raises:
        RuntimeError: the profiler saw no kernel.
    """
    for _ in range(WARM_UP):
        step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        # the profiler's first call, in which it sets itself up, is left out
        plan = schedule(wait=0, warmup=1, active=1, repeat=1)
        options = {"schedule": plan, "on_trace_ready": lambda profiler: profiler.export_chrome_trace(str(path))}
        with profile(activities=[ProfilerActivity.CUDA], **options) as profiler:
            for _ in range(2):
                torch.cuda.synchronize()
                meet()
                step()
                torch.cuda.synchronize()
                profiler.step()
        events = device_events(json.loads(path.read_text()))
    if not events:
        raise RuntimeError("the profiler saw no kernel: torch needs CUPTI, and the right to use it")
    return events


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = ROOT / "benchmarks" / f"{datetime.date.today()}-timeline"
    # a replayed graph copies on whatever stream, which says nothing then
    rings = [variant for variant in VARIANTS if is_ring(variant) and not variant.endswith("-graph")]
    parser.add_argument("--case", choices=CASES, default="causal-64k", help="default: causal-64k")
    parser.add_argument("--variant", choices=rings, default="nvlink-auto", help="default: nvlink-auto")
    parser.add_argument("--output", type=Path, default=output, help="a directory")
    parser.add_argument("--draw", type=Path, metavar="TIMELINE.JSON", help="trace nothing, draw the picture beside this file")
    arguments = parser.parse_args(argv)
    if not arguments.draw and os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        parser.error("the clocks of several hosts cannot be compared: trace a ring of one host")
    if not arguments.draw and "RANK" not in os.environ:
        parser.error("run it with torchrun, or give --draw")
    if arguments.draw and not arguments.draw.is_file():
        parser.error(f"--draw {arguments.draw}: no such file")
    return arguments


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    if arguments.draw:
        save_picture(json.loads(arguments.draw.read_text()), arguments.draw.with_suffix(".png"))
        return
    gpus.join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hosts = dist.new_group(backend="gloo")  # for hosts to meet without a kernel
    case = CASES[arguments.case]
    step = ring_step(case, arguments.variant, case.shard()).both
    events = record(step, lambda: dist.barrier(hosts))
    gathered = [None] * ranks if rank == 0 else None
    dist.gather_object(events, gathered, group=hosts)
    if rank == 0:
        found = {
            "date": str(datetime.date.today()),
            "case": arguments.case,
            "variant": arguments.variant,
            "machine": f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}",
            "command": shlex.join(["torchrun", "--nproc-per-node", str(ranks), "-m", "scripts.bench.trace_ring", *argv]),
            "events": timeline(gathered),
        }
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "timeline.json").write_text(json.dumps(found) + "\n")
        save_picture(found, arguments.output / "timeline.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
