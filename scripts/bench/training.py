"""Time whole training steps of a GPT beside the same written with stock PyTorch alone.

    python -m scripts.bench.training --ranks 2 --lengths 32768 65536 131072
    python -m scripts.bench.training --ranks 2 --lengths 32768 --variants ringattn stock --model 124m

bf16, one sequence a step over all ranks, causal attention without documents, which stock PyTorch cannot spread over ranks.
`ringattn` is `train/run.py` with its defaults, `stock` is `train_stock.py`, and `stock-recompute` the same with activation
checkpointing. Every figure is of a job of its own, one after the other; rates are of the median step. What fails, as for want
of memory, is told with what it said. README.md, training.json and training.png go to --output.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from scripts.bench import gpus

ROOT = Path(__file__).resolve().parents[2]

VARIANTS = ("ringattn", "stock", "stock-recompute")
Row = dict[str, str | float]


def command(variant: str, model: str, length: int, ranks: int, steps: int, output: Path) -> list[str]:
    """The command line of a job that leaves a summary.json in `output`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    if variant == "ringattn":
        settings = (
            *(f"model={model}", f"data.seq_len={length}", "data.mask_documents=false", "data.eval_split=null", "logger=off"),
            *(f"trainer.steps={steps}", "trainer.batch_size=1", "trainer.checkpoint_every=0", "trainer.sample_tokens=0"),
            f"hydra.run.dir={output}",
        )
        return [*torchrun, str(ROOT / "train" / "run.py"), *settings]
    options = [f"--model={model}", f"--seq-len={length}", f"--steps={steps}", f"--output={output}"]
    if variant == "stock-recompute":
        options.append("--checkpointing")
    return [*torchrun, "-m", "scripts.bench.stock_training", *options]


def measure(variant: str, model: str, length: int, ranks: int, steps: int) -> Row:
    """One job's summary, or what it failed with."""
    row = {"variant": variant, "length": length}
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        line = command(variant, model, length, ranks, steps, Path(directory) / "run")
        done = subprocess.run(line, capture_output=True, text=True, cwd=directory, env=environment)
        summary = Path(directory) / "run" / "summary.json"
        if done.returncode or not summary.exists():
            return row | {"failed": reason(done.stderr)}
        return row | json.loads(summary.read_text())


def reason(text: str) -> str:
    """The line of a job's errors that says most: the first that names an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = (line for line in lines if "Error" in line or line.startswith("error:"))
    return next(named, lines[-1] if lines else "no message")[:200]


def table(rows: list[Row]) -> str:
    """In Markdown, a line a job; beside each of ours how much faster it is than the best of the others."""
    lines = [
        "| tokens | | tokens/s a GPU | TFLOP/s a GPU | MFU | peak, GiB | of the fastest stock |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        begin = f"| {row['length']:,} | {row['variant']} |"
        if "failed" in row:
            lines.append(f"{begin} failed: {row['failed'].replace('|', '/')} | | | | |")
            continue
        others = [other["tokens_per_s"] for other in rows if is_peer(other, row["length"])]
        ratio = f"{row['tokens_per_s'] / max(others):.2f}" if others else "-"
        mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "-"
        lines.append(
            f"{begin} {row['tokens_per_s'] / row['ranks']:,.0f} | {row['tflops_per_rank']:.0f} | {mfu} "
            f"| {row['peak_memory_gib']:.1f} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def is_peer(row: Row, length: int) -> bool:
    """Whether it is a figure of stock PyTorch at `length`."""
    return row["variant"] != "ringattn" and row["length"] == length and "failed" not in row


def plot(rows: list[Row], title: str) -> plt.Figure:
    """TFLOP/s a GPU over the length."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for index, variant in enumerate(VARIANTS):
        points = [(row["length"], row["tflops_per_rank"]) for row in rows if row["variant"] == variant and "failed" not in row]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, color=f"C{index}", label=variant)
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n >> 10}k" for n in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens of the sequence, over all GPUs", ylabel="model TFLOP/s a GPU", ylim=(0, None), title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False)
    return figure


def write(output: Path, head: dict[str, str], rows: list[Row]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "training.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    figure = plot(rows, f"Training a GPT ({head['model']}), causal, bf16")
    figure.savefig(output / "training.png", dpi=150)
    plt.close(figure)
    note = (
        "One sequence a step over all GPUs. FLOPs count causal attention once, and nothing that is recomputed. Each line is a\n"
        "job of its own, in this order; rates are of the median step. Peaks are of torch's allocator; the inbox of the\n"
        "transport of `ringattn` comes on top.\n"
    )
    title = f"# Training beside stock PyTorch, {head['date']}"
    parts = (title, f"{head['machine']}.", f"    {head['command']}", note + "\n" + table(rows))
    (output / "README.md").write_text("\n\n".join(parts) + "\n![TFLOP/s over lengths](training.png)\n")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.4b", help="of configs/model; default: 1.4b")
    parser.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 1), help="default: a rank a GPU")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536, 131072], help="tokens of a sequence")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--steps", type=int, default=8, help="of a job; the first is not timed; default: 8")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / f"{datetime.date.today()}-training-stock", help="a directory"
    )
    arguments = parser.parse_args(argv)
    if arguments.ranks < 1:
        parser.error(f"--ranks {arguments.ranks}: give 1 or more")
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: give 2 or more, the first is not timed")
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    gpus.require(arguments.ranks)
    head = {
        "date": str(datetime.date.today()),
        "machine": f"{arguments.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "command": shlex.join(["python", "-m", "scripts.bench.training", *argv]),
        "model": arguments.model,
    }
    rows = []
    for length in arguments.lengths:
        for variant in arguments.variants:
            rows.append(measure(variant, arguments.model, length, arguments.ranks, arguments.steps))
            write(arguments.output, head, rows)
            print(table(rows).splitlines()[-1], flush=True)
    # a peer may fail, as for want of memory; but not all that was asked for
    failed = [row for row in rows if "failed" in row]
    return int(len(failed) == len(rows) or any(row["variant"] == "ringattn" for row in failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
