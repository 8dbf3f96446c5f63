"""Time complete training steps of a GPT, and compare ringattn with a training script that uses only stock PyTorch.

    python -m scripts.bench.training --ranks 2 --lengths 32768 65536 131072
    python -m scripts.bench.training --ranks 2 --lengths 32768 --variants ringattn stock --model 124m
    python -m scripts.bench.training --ranks 1 --lengths 65536 --variants ringattn transformers --model gpt-oss-4b

All jobs use bf16. In every step, all ranks together train on one sequence. Attention is causal and ignores documents, because
stock PyTorch cannot distribute document masks. The variant `ringattn` is `train/run.py` with its default settings, and
`ringattn-float8` adds `trainer.float8=true`. The variant `stock` is `scripts/bench/stock_training.py`, and `stock-recompute` is
the same script with activation checkpointing. The variant `transformers` is `scripts/bench/transformers_training.py`, which
uses one GPU. The variants `ringattn-float8` and `transformers` run only if --variants names them. The jobs run one after the
other. The rates of a job are computed from the median time of its steps. If a job fails, for example because it runs out of
memory, the table contains its error message. The script writes README.md, training.json and training.png to --output.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ringattn.train.reports.figures import clean_axes
from scripts import command, gpus
from scripts.plots import plot_points, plt, save_plot, set_length_axis
from scripts.tables import markdown_table

DEFAULT_VARIANTS = ("ringattn", "stock", "stock-recompute")
VARIANTS = (*DEFAULT_VARIANTS, "transformers", "ringattn-float8")
Row = dict[str, Any]
NOTE = """\
All GPUs together train on one sequence per step. FLOPs count causal attention once, and recomputation is not counted. Each row
comes from a separate job, and the jobs ran in this order. Rates are computed from the median step. Peaks are measured by
torch's allocator, which does not count the receive buffer of the NVLink transport of `ringattn`.
"""


def job_command(variant: str, model: str, length: int, ranks: int, steps: int, output: Path) -> list[str]:
    if variant in ("ringattn", "ringattn-float8"):
        settings = (
            f"trainer.float8={variant == 'ringattn-float8'}",
            f"model={model}",
            f"data.seq_len={length}",
            "data.mask_documents=false",
            *command.ONLY_STEPS,
            f"trainer.steps={steps}",
            "trainer.batch_size=1",
            f"hydra.run.dir={output}",
        )
        return command.torchrun(ranks, str(command.ROOT / "train" / "run.py"), *settings)
    options = [f"--model={model}", f"--seq-len={length}", f"--steps={steps}", f"--output={output}"]
    if variant == "transformers":
        return command.torchrun(ranks, "-m", "scripts.bench.transformers_training", *options)
    if variant == "stock-recompute":
        options.append("--checkpointing")
    return command.torchrun(ranks, "-m", "scripts.bench.stock_training", *options)


def measure(variant: str, model: str, length: int, ranks: int, steps: int) -> Row:
    """Train one job in a subprocess. Return the contents of summary.json, or {"failed": error message}."""
    summary, _ = run_job(partial(job_command, variant, model, length, ranks, steps))
    return {"variant": variant, "length": length} | summary


def run_job(create_command: Callable[[Path], list[str]]) -> tuple[Row, str]:
    """Run a training job in a subprocess.

    Args:
        create_command: returns the command line of a job that writes summary.json to the given folder.

    Returns:
        The contents of summary.json, or {"failed": error message}, and the standard output of the job.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = command.child_environment(PYTHONUNBUFFERED="1")
        arguments = create_command(Path(directory) / "run")
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=directory, env=environment)
        summary = Path(directory) / "run" / "summary.json"
        if done.returncode or not summary.exists():
            return {"failed": find_reason(done.stderr)}, done.stdout
        return json.loads(summary.read_text()), done.stdout


def find_reason(stderr: str) -> str:
    lines = [cells.strip() for cells in stderr.splitlines() if cells.strip()]
    errors = (cells for cells in lines if "Error" in cells or cells.startswith("error:"))
    return next(errors, lines[-1] if lines else "no message")[:200]


def results_table(date: str, rows: list[Row]) -> str:
    columns = (
        "tokens per sequence | variant | tokens/s per GPU | TFLOP/s per GPU | MFU | "
        "peak memory per GPU, GiB | relative to the fastest stock job | date"
    )
    lines = []
    for row in rows:
        cells = [f"{row['length']:,}", row["variant"]]
        if "failed" in row:
            lines.append([*cells, f"failed: {row['failed']}", "", "", "", "", date])
            continue
        stock = [other["tokens_per_s"] for other in rows if is_stock(other, row["length"])]
        cells += [f"{row['tokens_per_s'] / row['ranks']:,.0f}", f"{row['tflops_per_rank']:.0f}"]
        cells.append(f"{row['mfu']:.1%}" if row["mfu"] is not None else "-")
        cells.append(f"{row['peak_memory_gib']:.1f}")
        cells.append(f"{row['tokens_per_s'] / max(stock):.2f}" if stock else "-")
        lines.append([*cells, date])
    return markdown_table(columns, lines)


def is_stock(row: Row, length: int) -> bool:
    return not row["variant"].startswith("ringattn") and row["length"] == length and "failed" not in row


def plot(rows: list[Row], title: str) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, variant in enumerate(VARIANTS):
        succeeded = [row for row in rows if row["variant"] == variant and "failed" not in row]
        plot_points(axes, [(row["length"], row["tflops_per_rank"]) for row in succeeded], index, variant)
    set_length_axis(axes, (row["length"] for row in rows), "tokens of the sequence, over all GPUs")
    axes.set(ylabel="model TFLOP/s per GPU", ylim=(0, None), title=title)
    clean_axes(axes)
    if axes.lines:
        axes.legend(frameon=False)
    return figure


def write(output: Path, header: dict[str, str], rows: list[Row]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "training.json").write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    save_plot(plot(rows, f"Training a GPT ({header['model']}), causal, bf16"), output / "training.png")
    title = f"# Training next to stock PyTorch, {header['date']}"
    parts = (title, f"{header['machine']}.", f"    {header['command']}", NOTE + "\n" + results_table(header["date"], rows))
    (output / "README.md").write_text("\n\n".join(parts) + "\n![TFLOP/s over lengths](training.png)\n")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    parser.add_argument("--model", default="1.4b", help="a file in configs/model; default: 1.4b")
    default_ranks = max(torch.cuda.device_count(), 1)
    parser.add_argument("--ranks", type=command.at_least(1), default=default_ranks, help="default: one rank per GPU")
    parser.add_argument(
        "--lengths", type=command.at_least(1), nargs="+", default=[32768, 65536, 131072], help="tokens per sequence"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(DEFAULT_VARIANTS), help=f"default: {' '.join(DEFAULT_VARIANTS)}"
    )
    parser.add_argument(
        "--steps", type=command.at_least(2), default=8, help="steps per job; the first is not timed; default: 8"
    )
    output = command.RESULTS / "training"
    parser.add_argument("--output", type=Path, default=output, help="default: outputs/benchmarks/training")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    gpus.require_gpus(args.ranks)
    header = command.describe_run("scripts.bench.training", argv, gpus=args.ranks) | {"model": args.model}
    rows = []
    for length in args.lengths:
        for variant in args.variants:
            rows.append(measure(variant, args.model, length, args.ranks, args.steps))
            write(args.output, header, rows)
            print(results_table(header["date"], rows).splitlines()[-1], flush=True)
    # The benchmark fails if every job fails, or if a job of `ringattn` fails.
    failures = [row for row in rows if "failed" in row]
    return int(len(failures) == len(rows) or any(row["variant"] == "ringattn" for row in failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
