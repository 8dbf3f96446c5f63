"""Lab 1: compare time and peak memory of naive and tiled attention, until naive attention runs out of memory.

    python -m scripts.labs.naive_attention

Naive attention stores the N x N scores of every head. Tiled attention is `ringattn.flash_attention`. Both implementations
compute a causal forward and backward pass. The length of the sequence doubles from row to row of the table. Naive attention
stops after the first length that does not fit into memory. On a CPU, --limit-mib limits the memory. The default lengths are
small on a CPU. On a GPU, naive attention runs out of memory at the longest default lengths.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from ringattn import flash_attention
from ringattn.train.commands.errors import is_out_of_memory
from ringattn.train.reports.figures import clean_axes
from scripts import command
from scripts.accuracy import output_of
from scripts.labs import measure
from scripts.labs.measure import MIB
from scripts.plots import plot_points, plt, set_length_axis, short_length
from scripts.tables import markdown_table

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# the steps of naive attention, as the profiler names them
STEPS = ("S = Q K^T", "scale", "mask", "softmax", "O = P V")


class Sizes(NamedTuple):
    lengths: list[int]
    heads: int
    head_dim: int
    dtype: torch.dtype


SIZES = {
    "cpu": Sizes([256 << i for i in range(5)], 2, 64, torch.float32),
    "cuda": Sizes([1024 << i for i in range(8)], 16, 128, torch.bfloat16),
}


class Cost(NamedTuple):
    ms: float
    bytes: int


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention step by step, as in a textbook. Every step stores its whole result.

    Args:
        q, k, v: (B, N, H, D).

    Returns:
        out (B, N, H, D).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    with record_function(STEPS[0]):
        scores = q @ k.mT
    with record_function(STEPS[1]):
        scores = scores * q.shape[-1] ** -0.5
    with record_function(STEPS[2]):
        scores = scores.masked_fill(later, float("-inf"))
    with record_function(STEPS[3]):
        p = scores.softmax(-1)
    with record_function(STEPS[4]):
        out = p @ v
    return out.transpose(1, 2)


def tiled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return output_of(flash_attention(q, k, v, is_causal=True))


IMPLEMENTATIONS: dict[str, Attend] = {"naive": naive_attention, "tiled": tiled_attention}


def random_inputs(length: int, sizes: Sizes, device: torch.device, count: int = 4) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape, options = (1, length, sizes.heads, sizes.head_dim), dict(device=device, dtype=sizes.dtype)
    return [torch.randn(shape, generator=generator, **options) for _ in range(count)]


def cost(attend: Attend, length: int, sizes: Sizes, device: torch.device, limit: int) -> Cost | None:
    """Measure a forward and a backward pass together. Return None if memory runs out.

    Args:
        limit: the memory in bytes that the call may use on a CPU.
    """
    try:
        with measure.limited_memory(limit, device):
            *inputs, dout = random_inputs(length, sizes, device)
            for x in inputs:
                x.requires_grad_()

            def call() -> tuple[Tensor, ...]:
                return torch.autograd.grad(attend(*inputs), inputs, dout)

            call()
        # Measure without the memory limit, because the profiler needs additional memory.
        return Cost(measure.milliseconds(call, device), measure.peak_bytes(call, device))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # During the `except` clause, the exception keeps the tensors of the failed call alive. Now they can be freed.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def compare(sizes: Sizes, device: torch.device, limit: int) -> dict[str, dict[int, Cost | None]]:
    found: dict[str, dict[int, Cost | None]] = {}
    for name, attend in IMPLEMENTATIONS.items():
        found[name] = {}
        for length in sizes.lengths:
            found[name][length] = cost(attend, length, sizes, device, limit)
            if found[name][length] is None:
                break
    return found


def results_table(found: dict[str, dict[int, Cost | None]], lengths: list[int]) -> str:
    rows = []
    for length in lengths:
        cells: list[str] = []
        for costs in found.values():
            entry = costs.get(length)
            stopped = "out of memory" if length in costs else "-"
            cells += [f"{entry.ms:,.2f}", f"{entry.bytes / MIB:,.1f}"] if entry else [stopped, stopped]
        rows.append([f"{length:,}", *cells])
    return markdown_table("tokens | naive, ms | naive, MiB | tiled, ms | tiled, MiB", rows)


def plot(found: dict[str, dict[int, Cost | None]], lengths: list[int], capacity: int, title: str) -> plt.Figure:
    """Plot time and peak memory against the length. A horizontal line at `capacity` bytes shows the available memory."""
    figure, (times, peaks) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for number, (name, costs) in enumerate(found.items()):
        measured = {length: entry for length, entry in costs.items() if entry}
        plot_points(times, [(length, entry.ms) for length, entry in measured.items()], number, name)
        plot_points(peaks, [(length, entry.bytes / MIB) for length, entry in measured.items()], number, name)
        for length in costs.keys() - measured.keys():
            label = f"{name}: out of memory at {short_length(length)}"
            peaks.plot([length], [capacity / MIB], "x", color=f"C{number}", markersize=9, label=label)
    peaks.axhline(capacity / MIB, color="grey", linestyle=":")
    times.set(ylabel="ms, forward and backward", yscale="log", title="time")
    peaks.set(ylabel="MiB", yscale="log", title="peak memory (dotted: all memory)")
    for axes in (times, peaks):
        set_length_axis(axes, lengths, "tokens")
        clean_axes(axes)
        axes.legend(frameon=False)
    figure.suptitle(title)
    return figure


def main(argv: list[str]) -> None:
    parser = measure.new_parser(__doc__, "naive_attention")
    parser.add_argument("--lengths", type=command.at_least(2), nargs="+", help="tokens; the default depends on the device")
    parser.add_argument("--limit-mib", type=command.at_least(1), default=256, help="memory on a CPU; default: 256")
    args = measure.parse(parser, argv)
    sizes = SIZES[args.device.type]
    sizes = sizes._replace(lengths=sorted(args.lengths or sizes.lengths))
    limit = args.limit_mib * MIB
    found = compare(sizes, args.device, limit)
    capacity = torch.cuda.mem_get_info(args.device)[1] if args.device.type == "cuda" else limit
    print(results_table(found, sizes.lengths), end="")
    title = f"{sizes.heads} heads of dim {sizes.head_dim}, causal, {measure.describe_machine(args.device)}"
    measure.write_picture(plot(found, sizes.lengths, capacity, title), args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
