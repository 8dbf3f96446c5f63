"""Lab 3: profile naive attention, and compare each step's share of the time with its share of the FLOPs.

    python -m scripts.labs.softmax_share

PyTorch's profiler measures five steps of naive attention. The steps are the scores, the scale, the mask, the softmax, and the
product with the values. On a GPU, the time of a step is the time of its kernels. The last line of the table is the time of
`ringattn.flash_attention` for the same inputs.
"""

import sys
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ringattn.train.reports.figures import clean_axes
from scripts import command
from scripts.labs import measure
from scripts.labs.naive_attention import IMPLEMENTATIONS, STEPS, Sizes, naive_attention, random_inputs
from scripts.plots import plt
from scripts.tables import markdown_table

SIZES = {"cpu": Sizes([1024], 4, 64, torch.float32), "cuda": Sizes([8192], 16, 128, torch.bfloat16)}
REPEATS = 5
# The softmax computes a maximum, a difference, an exp, a sum and a quotient.
FLOPS_PER_SCORE = {"scale": 1, "mask": 1, "softmax": 5}


def step_flops(length: int, sizes: Sizes) -> dict[str, int]:
    """Return the FLOPs of each step. Naive attention also computes the scores that the mask removes."""
    scores = sizes.heads * length**2
    return {step: scores * FLOPS_PER_SCORE.get(step, 2 * sizes.head_dim) for step in STEPS}


def step_times(inputs: list[Tensor]) -> dict[str, float]:
    """Return the time of each step in milliseconds. Each time is the shortest of REPEATS repetitions."""
    on_gpu = inputs[0].is_cuda
    naive_attention(*inputs)  # the first call allocates memory and selects the kernels
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    with torch.no_grad(), profile(activities=activities) as profiler:
        for _ in range(REPEATS):
            naive_attention(*inputs)
        if on_gpu:
            torch.cuda.synchronize()
    microseconds = {step: [] for step in STEPS}
    for event in profiler.events() or []:
        # `device_time_total` of a CPU event includes all kernels that the event launched.
        if event.name in microseconds and event.device_type == DeviceType.CPU:
            microseconds[event.name].append(event.device_time_total if on_gpu else event.cpu_time_total)
    return {step: min(repetitions) / 1e3 for step, repetitions in microseconds.items()}


def shares(numbers: Mapping[str, float]) -> dict[str, float]:
    total = sum(numbers.values())
    return {name: number / total for name, number in numbers.items()}


def results_table(times: dict[str, float], flops: dict[str, int], tiled_ms: float) -> str:
    rows = []
    for step, ms in times.items():
        rows.append(
            [step, f"{ms:.3f}", f"{shares(times)[step]:.0%}", f"{flops[step] / 1e9:,.1f}", f"{shares(flops)[step]:.1%}"]
        )
    rows.append(["naive attention", f"{sum(times.values()):.3f}", "100%", f"{sum(flops.values()) / 1e9:,.1f}", "100%"])
    rows.append(["tiled attention", f"{tiled_ms:.3f}", f"{tiled_ms / sum(times.values()):.0%}", "", ""])
    return markdown_table("step | ms | share of time | GFLOP | share of FLOPs", rows)


def plot(times: dict[str, float], flops: dict[str, int], title: str) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for shift, label, numbers in ((-0.2, "time", times), (0.2, "FLOPs", flops)):
        heights = [100 * share for share in shares(numbers).values()]
        bars = axes.bar([i + shift for i in range(len(STEPS))], heights, width=0.38, label=f"share of the {label}")
        axes.bar_label(bars, fmt="%.0f%%", fontsize=9)
    axes.set_xticks(range(len(STEPS)), STEPS)
    axes.set(ylabel="%", title=title)
    clean_axes(axes)
    axes.legend(frameon=False)
    return figure


@command.exit_without_memory()
def main(argv: list[str]) -> None:
    parser = measure.new_parser(__doc__, "softmax_share")
    parser.add_argument("--length", type=command.at_least(2), help="tokens; the default depends on the device")
    args = measure.parse(parser, argv)
    sizes = SIZES[args.device.type]
    length = args.length or sizes.lengths[0]
    inputs = random_inputs(length, sizes, args.device, 3)
    times, flops = step_times(inputs), step_flops(length, sizes)
    tiled_ms = measure.milliseconds(partial(IMPLEMENTATIONS["tiled"], *inputs), args.device)
    print(results_table(times, flops, tiled_ms), end="")
    shape = f"{length:,} tokens, {sizes.heads} heads of dim {sizes.head_dim}"
    title = f"naive attention, {shape}\n{measure.describe_machine(args.device)}"
    measure.write_picture(plot(times, flops, title), args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
