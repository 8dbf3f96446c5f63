"""Lab 2: vary the tile size (Br queries and Bc keys), and compare traffic, on-chip memory and time.

    python -m scripts.labs.tile_sizes

The lab runs the forward pass of causal attention. On a GPU, the lab compiles the Triton kernel for every tile size. The table
contains the kernel's shared memory and registers. On a CPU, the lab runs the blockwise kernel, and counts the bytes that its
tiles load. The formulas of docs/io.md predict the traffic. Without caches, all predicted traffic would come from HBM.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from ringattn import Mask, flash_attention
from ringattn.kernels.interval_mask import Intervals
from scripts import command
from scripts.accuracy import output_of
from scripts.labs import measure
from scripts.labs.blockwise_bytes import TileSize, counted_loads, tile_size
from scripts.labs.measure import MIB
from scripts.labs.naive_attention import Sizes, random_inputs
from scripts.plots import plt
from scripts.tables import markdown_table
from scripts.tools.count_bytes import FP32_BYTES, forward_loads

KIB = 2**10
# By device: (sizes of the call, queries per tile, keys per tile)
DEFAULTS = {
    "cpu": (Sizes([1024], 2, 64, torch.float32), (64, 256, 1024), (64, 256, 1024)),
    "cuda": (Sizes([16384], 16, 128, torch.bfloat16), (64, 128, 256), (32, 64, 128)),
}
NUM_WARPS, NUM_STAGES = 8, 2  # the launch options of all tile sizes on a GPU


class Point(NamedTuple):
    """The results of one tile size. Traffic and memory are in bytes."""

    tile: TileSize
    traffic: int  # predicted bytes that all tiles load
    on_chip: int  # the memory of a tile; on a GPU, the shared memory
    ms: float
    remark: str  # on a CPU, the counted bytes; on a GPU, the registers and spills of a thread


def measure_blockwise(tile: TileSize, traffic: int, inputs: list[Tensor]) -> Point:
    """Measure the blockwise kernel. A tile keeps q, o, k, v, the scores and the probabilities in fp32."""
    head_dim = inputs[0].shape[-1]
    numbers = 2 * (tile.queries + tile.keys) * head_dim + 2 * tile.queries * tile.keys

    def call() -> Tensor:
        return output_of(flash_attention(*inputs, is_causal=True, backend="blockwise"))

    with tile_size(tile):
        with counted_loads() as loads:
            call()
        ms = measure.milliseconds(call, inputs[0].device)
    return Point(tile, traffic, numbers * FP32_BYTES, ms, f"{loads.bytes / MIB:,.1f} MiB counted")


@contextmanager
def compiled_kernels(tile: TileSize) -> Generator[list[Any]]:
    """Return a context manager that sets the tile size of the Triton kernels. The context manager yields a list. Each launch
    adds its compiled forward kernel to the list.
    """
    from ringattn.kernels.triton import common as triton_common
    from ringattn.kernels.triton import forward as triton_forward

    kernel = triton_forward._forward_kernel
    launched: list[Any] = []
    run: Callable[..., Any] = kernel.run

    def record(*arguments: object, **options: object) -> Any:
        launched.append(run(*arguments, **options))
        return launched[-1]

    fixed = triton_common.Tile(*tile, NUM_WARPS, NUM_STAGES)
    with patch.object(triton_common, "choose_tile", return_value=fixed), patch.object(kernel, "run", record):
        yield launched


def measure_triton(tile: TileSize, traffic: int, inputs: list[Tensor]) -> Point:
    def call() -> Tensor:
        return output_of(flash_attention(*inputs, is_causal=True, backend="triton"))

    with compiled_kernels(tile) as launched:
        call()
        compiled = launched[0]
        launched.clear()
        ms = measure.milliseconds(call, inputs[0].device)
    remark = f"{compiled.n_regs} registers, {compiled.n_spills} spills"
    return Point(tile, traffic, compiled.metadata.shared, ms, remark)


def sweep(sizes: Sizes, queries: Sequence[int], keys: Sequence[int], device: torch.device) -> list[Point]:
    (length,) = sizes.lengths
    intervals = Intervals.of(*Mask.causal().intervals(length), length)
    inputs = random_inputs(length, sizes, device, 3)
    measure_tile = measure_triton if device.type == "cuda" else measure_blockwise
    points = []
    for tile in (TileSize(br, bc) for br in queries for bc in keys):
        traffic = forward_loads(intervals, sizes.heads, sizes.head_dim, *tile, sizes.dtype.itemsize)
        points.append(measure_tile(tile, traffic, inputs))
    return points


def results_table(points: list[Point]) -> str:
    rows = [
        [*p.tile, f"{p.traffic / MIB:,.1f}", f"{p.on_chip / KIB:,.0f}", f"{p.ms:,.2f}", p.remark]
        for p in sorted(points, key=lambda p: p.tile)
    ]
    return markdown_table("Br | Bc | predicted traffic, MiB | on the chip, KiB | ms | remark", rows)


def draw_map(axes: plt.Axes, points: list[Point], values: list[float], title: str) -> None:
    """Draw a heat map with logarithmic colours, one number per tile size. Small numbers have light colours."""
    queries, keys = (sorted({p.tile[i] for p in points}) for i in (0, 1))
    numbers = np.zeros((len(queries), len(keys)))
    for point, value in zip(points, values, strict=True):
        numbers[queries.index(point.tile.queries), keys.index(point.tile.keys)] = value
    colours = np.log(numbers)
    axes.imshow(colours, cmap="Blues", aspect="auto")
    for i, j in np.ndindex(*numbers.shape):
        dark = colours[i, j] > (colours.min() + colours.max()) / 2
        text = f"{numbers[i, j]:,.0f}" if numbers[i, j] >= 100 else f"{numbers[i, j]:.3g}"
        axes.text(j, i, text, ha="center", va="center", color="white" if dark else "black", fontsize=9)
    axes.set_xticks(range(len(keys)), map(str, keys))
    axes.set_yticks(range(len(queries)), map(str, queries))
    axes.set(xlabel="Bc, keys of a tile", ylabel="Br, queries of a tile", title=title)


def plot(points: list[Point], on_gpu: bool, title: str) -> plt.Figure:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    draw_map(axes[0], points, [p.traffic / MIB for p in points], "predicted traffic, MiB")
    memory = "shared memory, KiB" if on_gpu else "memory of a tile, KiB"
    draw_map(axes[1], points, [p.on_chip / KIB for p in points], memory)
    draw_map(axes[2], points, [p.ms for p in points], "time, ms")
    figure.suptitle(title)
    return figure


@command.exit_without_memory()
def main(argv: list[str]) -> None:
    parser = measure.new_parser(__doc__, "tile_sizes")
    parser.add_argument("--length", type=command.at_least(1), help="tokens; the default depends on the device")
    parser.add_argument("--queries", type=command.at_least(1), nargs="+", help="values of Br; powers of two on a GPU")
    parser.add_argument("--keys", type=command.at_least(1), nargs="+", help="values of Bc; powers of two on a GPU")
    args = measure.parse(parser, argv)
    sizes, queries, keys = DEFAULTS[args.device.type]
    sizes = sizes._replace(lengths=[args.length or sizes.lengths[0]])
    points = sweep(sizes, args.queries or queries, args.keys or keys, args.device)
    print(results_table(points), end="")
    shape = f"{sizes.lengths[0]:,} tokens, {sizes.heads} heads of dim {sizes.head_dim}, causal"
    title = f"{shape}, {measure.describe_machine(args.device)}"
    measure.write_picture(plot(points, args.device.type == "cuda", title), args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
