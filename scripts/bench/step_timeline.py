"""Plot the work of a rank's host and GPU in one training step, from traces of `trainer.profile`.

    torchrun --nproc_per_node=2 train/run.py name=profiled trainer.steps=24 trainer.profile=20-22
    python -m scripts.bench.step_timeline outputs/profiled/profile/trace-*-rank0.json.gz --steps 21 --output timeline.png

Several traces are drawn below each other. Each title states the time of a step, and the fraction in which the GPU is busy. The
profiler slows down the host.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from scripts import command
from scripts.plots import plt, save_plot

# Operations on the host: (start of the name, colour, legend). The first match counts.
HOST = (
    ("FSDP::", "tab:green", "FSDP"),
    ("Attention", "tab:blue", "attention"),
    ("autograd::engine::evaluate_function: Attention", "tab:blue", "attention"),
    ("Torch-Compiled Region", "tab:orange", "compiled blocks"),
    ("Graphed", "tab:cyan", "CUDA graphs"),
    ("autograd::engine::evaluate_function: CompiledFunction", "tab:orange", "compiled blocks"),
    ("autograd::engine::evaluate_function: Graphed", "tab:cyan", "CUDA graphs"),
    ("_CrossEntropy", "tab:red", "loss"),
    ("autograd::engine::evaluate_function: _CrossEntropy", "tab:red", "loss"),
    ("Optimizer", "tab:purple", "optimizer"),
    ("", "lightgrey", "other operations"),
)
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
Interval = tuple[float, float]  # start and end in milliseconds from the start of the step


def read_step(path: Path, step: int) -> tuple[float, list[tuple[float, float, str]], list[Interval]]:
    """Return the milliseconds of a step, the outermost host operations, and the intervals in which the GPU is busy."""
    with gzip.open(path) as file:
        events = [x for x in json.load(file)["traceEvents"] if x.get("ph") == "X"]
    span = next((x for x in events if x["name"] == f"step {step}" and x.get("cat") == "user_annotation"), None)
    if span is None:
        raise SystemExit(f"error: {path} contains no step {step}: choose one of the steps of trainer.profile")

    def position(event: dict[str, Any]) -> Interval:
        start = (event["ts"] - span["ts"]) / 1e3
        return start, start + event["dur"] / 1e3

    length = span["dur"] / 1e3
    inside = [x for x in events if x is not span and 0 <= position(x)[0] < length]
    host: list[tuple[float, float, str]] = []
    end = 0.0
    on_thread = [x for x in inside if x["tid"] == span["tid"] and x.get("cat") in ("cpu_op", "user_annotation")]
    for event in sorted(on_thread, key=lambda x: (x["ts"], -x["dur"])):
        start, stop = position(event)
        if start >= end:  # an operation that is not inside another operation
            host.append((start, stop, event["name"]))
            end = stop
    return length, host, merge([position(x) for x in inside if x.get("cat") in GPU_CATEGORIES])


def merge(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def busy_share(length: float, gpu: list[Interval]) -> float:
    return sum(min(end, length) - start for start, end in gpu) / length


def plot(steps: list[tuple[str, float, list[tuple[float, float, str]], list[Interval]]]) -> plt.Figure:
    figure, rows = plt.subplots(
        len(steps), squeeze=False, sharex=True, figsize=(9, 1.7 * len(steps) + 0.8), layout="constrained"
    )
    seen: dict[str, str] = {}
    for (axes,), (label, length, host, gpu) in zip(rows, steps, strict=True):
        for start, stop, name in host:
            _, colour, legend = next(entry for entry in HOST if name.startswith(entry[0]))
            axes.broken_barh([(start, stop - start)], (1.1, 0.8), color=colour, label=None if legend in seen else legend)
            seen[legend] = colour
        axes.broken_barh([(start, end - start) for start, end in gpu], (0.1, 0.8), color="black")
        axes.set_yticks([0.5, 1.5], ["GPU", "host"])
        axes.set_title(f"{label}: {length:.0f} ms, GPU busy for {busy_share(length, gpu):.0%}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1][0].set_xlabel("milliseconds from the start of the step")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return figure


def main(argv: list[str]) -> int:
    parser = command.new_parser(__doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="traces that trainer.profile has written")
    parser.add_argument("--steps", type=command.at_least(1), nargs="+", required=True, help="one step, or one per trace")
    parser.add_argument("--labels", nargs="+", default=None, help="one label per trace; default: the names of the runs")
    parser.add_argument("--output", type=command.png_file, default=command.RESULTS / "step_timeline.png", help="the picture")
    args = parser.parse_args(argv)
    labels = args.labels or [path.parts[-3] if len(path.parts) > 2 else path.name for path in args.traces]
    numbers = args.steps * len(args.traces) if len(args.steps) == 1 else args.steps
    for name, values in (("labels", labels), ("steps", numbers)):
        if len(values) != len(args.traces):
            raise SystemExit(f"error: --{name} has {len(values)} values for {len(args.traces)} traces: give one per trace")
    steps = [(x, *read_step(path, step)) for x, path, step in zip(labels, args.traces, numbers, strict=True)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    save_plot(plot(steps), args.output)
    for label, length, _, gpu in steps:
        print(f"{label}: {length:.1f} ms, GPU busy for {busy_share(length, gpu):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
