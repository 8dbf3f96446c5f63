"""Lab 4: compare the predictions of docs/io.md with the bytes that kernels move.

    python -m scripts.labs.counted_bytes

On a GPU, the profiler ncu runs `scripts.tools.count_bytes` for the Triton kernels and for the Hopper kernels. Reading the
counters of the L2 cache and of DRAM requires a permission. On a CPU, the lab counts the bytes that the tiles of the blockwise
kernel load. All calls are causal self-attention, forward and backward.
"""

import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from ringattn import Mask, flash_attention
from ringattn.kernels.interval_mask import Intervals
from ringattn.train.reports.figures import clean_axes
from scripts import command
from scripts.labs import measure
from scripts.labs.blockwise_bytes import TileSize, counted_loads, predicted_loads, tile_size
from scripts.labs.naive_attention import Sizes, random_inputs
from scripts.plots import plt, short_length
from scripts.tables import markdown_table
from scripts.tools.count_bytes import PREDICTIONS, SECTOR_BYTES, Traffic

SIZES = {"cpu": Sizes([512, 1024, 2048], 2, 64, torch.float32), "cuda": Sizes([16384], 16, 128, torch.bfloat16)}
TILE = TileSize(128, 128)  # the tile size of the blockwise kernel
# The hardware counter for each field of `Traffic`, and its bytes per unit
COUNTERS = {
    "l2_read": ("lts__t_sectors_op_read.sum", SECTOR_BYTES),
    "l2_reduce": ("lts__t_sectors_op_red.sum", SECTOR_BYTES),
    "dram_read": ("dram__bytes_read.sum", 1),
    "dram_write": ("dram__bytes_write.sum", 1),
}
NAMES = {"l2_read": "L2 reads", "l2_reduce": "L2 reductions", "dram_read": "DRAM reads", "dram_write": "DRAM writes"}


class Row(NamedTuple):
    kernel: str
    counter: str
    predicted: int
    counted: int


def profiler_command(backend: str, length: int, sizes: Sizes, log: Path) -> list[str]:
    kernels = "|".join(PREDICTIONS[backend](128, 1, 64, Mask.causal()))
    metrics = ",".join(name for name, _ in COUNTERS.values())
    options = [f"--length={length}", f"--heads={sizes.heads}", f"--head-dim={sizes.head_dim}", f"--backend={backend}"]
    return [
        *("ncu", "--metrics", metrics, "--print-units", "base", "--clock-control", "none"),
        *("--kernel-name", f"regex:_({kernels})_kernel", "--csv", "--log-file", str(log)),
        *(sys.executable, "-m", "scripts.tools.count_bytes", *options),
    ]


def read_counters(text: str) -> dict[str, dict[str, int]]:
    """Parse the CSV output of ncu, and return the bytes of each counter for each kernel. Messages of ncu are skipped."""
    found: dict[str, dict[str, int]] = {}
    units = {metric: (field, unit) for field, (metric, unit) in COUNTERS.items()}
    for line in csv.DictReader(row for row in text.splitlines() if row.startswith('"')):
        kernel = line["Kernel Name"].removeprefix("_").removesuffix("_kernel")
        field, unit = units[line["Metric Name"]]
        found.setdefault(kernel, {})[field] = round(float(line["Metric Value"].replace(",", ""))) * unit
    return found


def count_on_gpu(length: int, sizes: Sizes) -> list[Row]:
    """Count the bytes of the Triton kernels and of the Hopper kernels with ncu.

    Raises:
        RuntimeError: ncu failed, for example because ncu may not read the counters.
    """
    rows: list[Row] = []
    for backend, predict in PREDICTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "bytes.csv"
            arguments = profiler_command(backend, length, sizes, log)
            done = subprocess.run(arguments, cwd=command.ROOT, capture_output=True, text=True)
            text = log.read_text() if log.exists() else ""
        counted = read_counters(text)
        if not counted:
            lines = (text + done.stdout + done.stderr).strip().splitlines()
            raise RuntimeError(f"ncu counted no bytes of the {backend} kernels: {lines[-1] if lines else 'no output'}")
        predictions = predict(length, sizes.heads, sizes.head_dim, Mask.causal())
        for kernel, predicted in predictions.items():
            rows += compare(f"{backend} {kernel}", predicted, counted.get(kernel, {}))
    return rows


def compare(kernel: str, predicted: Traffic, counted: dict[str, int]) -> list[Row]:
    rows = [Row(kernel, NAMES[x], getattr(predicted, x), counted[x]) for x in COUNTERS if x in counted]
    return [row for row in rows if row.predicted or row.counted]


def count_on_cpu(sizes: Sizes) -> list[Row]:
    rows = []
    for length in sizes.lengths:
        *inputs, dout = random_inputs(length, sizes, torch.device("cpu"))
        for x in inputs:
            x.requires_grad_()
        with tile_size(TILE):
            with counted_loads() as forward:
                out = flash_attention(*inputs, is_causal=True, backend="blockwise")
            with counted_loads() as backward:
                torch.autograd.grad(out, inputs, dout)
        intervals = Intervals.of(*Mask.causal().intervals(length), length)
        counted = {"forward": forward.bytes, "backward": backward.bytes}
        for direction, predicted in predicted_loads(intervals, sizes.heads, sizes.head_dim, TILE).items():
            rows.append(Row(f"{direction} {short_length(length)}", "loads of the tiles", predicted, counted[direction]))
    return rows


def results_table(rows: list[Row]) -> str:
    lines = [
        [
            row.kernel,
            row.counter,
            f"{row.predicted / 1e6:,.1f}",
            f"{row.counted / 1e6:,.1f}",
            f"{row.counted / row.predicted:.2f}" if row.predicted else "-",
        ]
        for row in rows
    ]
    return markdown_table("kernel | counter | predicted, MB | counted, MB | counted / predicted", lines)


def plot(rows: list[Row], title: str) -> plt.Figure:
    counters = list(dict.fromkeys(row.counter for row in rows))
    columns = min(len(counters), 2)
    shape = -(-len(counters) // columns), columns
    figure, grid = plt.subplots(*shape, figsize=(1 + 5.5 * columns, 0.6 + 3 * shape[0]), squeeze=False, layout="constrained")
    for axes, counter in zip(grid.flat, counters, strict=False):
        chosen = [row for row in rows if row.counter == counter]
        for shift, name in ((-0.2, "predicted"), (0.2, "counted")):
            places = [i + shift for i in range(len(chosen))]
            axes.bar(places, [getattr(row, name) / 1e6 for row in chosen], width=0.38, label=name)
        names = [row.kernel.replace("_", " ").replace(" ", "\n") for row in chosen]
        axes.set_xticks(range(len(chosen)), names, fontsize=8)
        axes.set(title=counter, ylabel="MB")
        clean_axes(axes)
    for axes in grid.flat[len(counters) :]:
        axes.set_visible(False)
    grid[0, 0].legend(frameon=False)
    figure.suptitle(title)
    return figure


def main(argv: list[str]) -> None:
    parser = measure.new_parser(__doc__, "counted_bytes")
    parser.add_argument("--lengths", type=command.at_least(1), nargs="+", help="tokens; a GPU counts the first length only")
    args = measure.parse(parser, argv)
    on_gpu = args.device.type == "cuda"
    if on_gpu and shutil.which("ncu") is None:
        parser.error("ncu is not on the PATH: install Nsight Compute, or use --device cpu")
    sizes = SIZES[args.device.type]
    sizes = sizes._replace(lengths=args.lengths or sizes.lengths)
    try:
        rows = count_on_gpu(sizes.lengths[0], sizes) if on_gpu else count_on_cpu(sizes)
    except RuntimeError as error:
        parser.error(str(error))
    print(results_table(rows), end="")
    shape = f"{sizes.heads} heads of dim {sizes.head_dim}, causal"
    title = f"{f'{sizes.lengths[0]:,} tokens, ' if on_gpu else ''}{shape}, {measure.describe_machine(args.device)}"
    measure.write_picture(plot(rows, title), args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
