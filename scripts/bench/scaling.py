"""Time training steps on several GPUs with several kinds of parallelism, and compare them with one GPU.

    python -m scripts.bench.scaling
    python -m scripts.bench.scaling --ranks 2 4 --jobs ring ulysses --rounds 3

Every job trains on packed documents of the default corpus. The jobs `one GPU`, `ring`, `ulysses` and `data-parallel` train on
sequences of 32,768 tokens. Their tokens/s can therefore be compared. Jobs run one after the other, and rates are measured in
the second half of the steps. Every reported rate is the median over all rounds. The script writes README.md, scaling.json and
scaling.png to --output.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ringattn.train.reports.figures import clean_axes
from scripts import command, gpus
from scripts.bench.training import find_reason
from scripts.plots import plot_points, plt, save_plot
from scripts.tables import markdown_table

TOKENS = 32_768
Row = dict[str, Any]
# The settings of each job. In a setting, {ranks} is the number of ranks, and {long} is 32,768 tokens per rank.
SHARED = {
    "ring": (f"data.seq_len={TOKENS}",),
    "ulysses": (f"data.seq_len={TOKENS}", "parallel.ulysses={ranks}"),
    "data-parallel": (f"data.seq_len={TOKENS}", "parallel.ring=1"),
}
JOBS = SHARED | {
    "ring-long": ("data.seq_len={long}",),
    "ulysses-long": ("data.seq_len={long}", "parallel.ulysses={ranks}"),
    "124m-64k": ("model=124m", "data.seq_len=65536"),
}
FIXED = ("recipe=gpu", "trainer.batch_size=1", *command.ONLY_STEPS)


def measure(job: str, ranks: int, steps: int) -> Row:
    """Train one job in a subprocess. Return its rates, or {"failed": error message}."""
    row: Row = {"job": job, "ranks": ranks}
    with tempfile.TemporaryDirectory() as directory:
        settings = [text.format(ranks=ranks, long=TOKENS * ranks) for text in JOBS[job]]
        settings += [*FIXED, f"trainer.steps={steps}", f"hydra.run.dir={directory}/run"]
        arguments = command.torchrun(ranks, str(command.ROOT / "train" / "run.py"), *settings)
        done = subprocess.run(arguments, capture_output=True, text=True, cwd=directory, env=command.child_environment())
        metrics = Path(directory) / "run" / "metrics.jsonl"
        if done.returncode:
            return row | {"failed": find_reason(done.stderr)}
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return row | rates(records, ranks)


def rates(records: list[dict[str, Any]], ranks: int) -> Row:
    """Compute rates from the second half of metrics.jsonl (`records`)."""
    half = records[len(records) // 2 :]
    seconds = [record["seconds"] for record in half]
    tokens = sum(record["tokens_per_s_per_rank"] * ranks * record["seconds"] for record in half)
    flops = sum(record["tflops_per_rank"] * record["seconds"] for record in half)
    return {
        "seconds": statistics.mean(seconds),
        "tokens_per_s": tokens / sum(seconds),
        "tflops_per_rank": flops / sum(seconds),
        "mfu": statistics.mean(record["mfu"] / record["tflops_per_rank"] for record in half) * flops / sum(seconds),
        "peak_memory_gib": max(record["peak_memory_gib"] for record in half),
    }


def median_rows(rows: list[Row]) -> list[Row]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["job"], row["ranks"]), []).append(row)
    medians = []
    for (job, ranks), group in groups.items():
        failed = next((row for row in group if "failed" in row), None)
        names = [name for name in group[0] if name not in ("job", "ranks")]
        values = {name: statistics.median(row[name] for row in group) for name in names} if failed is None else {}
        medians.append(failed or {"job": job, "ranks": ranks} | values)
    return medians


def relative_speed(row: Row, rows: list[Row]) -> float | None:
    """Divide the tokens/s of a job by the tokens/s of one GPU. Return None for jobs with longer sequences than the job of one
    GPU.
    """
    one = next((other for other in rows if other["ranks"] == 1 and other["job"] == "ring" and "failed" not in other), None)
    return row["tokens_per_s"] / one["tokens_per_s"] if one and row["job"] in SHARED else None


def results_table(date: str, rows: list[Row]) -> str:
    columns = "job | GPUs | s per step | tokens/s, all GPUs | relative to one GPU | MFU | peak memory per GPU, GiB | date"
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append([row["job"], row["ranks"], f"failed: {row['failed']}", "", "", "", "", date])
            continue
        speed = relative_speed(row, rows)
        cells = [row["job"] if row["ranks"] > 1 else "one GPU", row["ranks"], f"{row['seconds']:.4f}"]
        cells += [f"{row['tokens_per_s']:,.0f}", f"{speed:.2f}" if speed else "-", f"{row['mfu']:.1%}"]
        lines.append([*cells, f"{row['peak_memory_gib']:.1f}", date])
    return markdown_table(columns, lines)


def plot(rows: list[Row]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    counts = sorted({row["ranks"] for row in rows})
    for index, job in enumerate(SHARED):
        succeeded = [row for row in rows if row["job"] in (job, "ring") and "failed" not in row]
        points = {row["ranks"]: relative_speed(row, rows) for row in succeeded if row["job"] == job or row["ranks"] == 1}
        plot_points(axes, [(ranks, speed) for ranks, speed in points.items() if speed], index, job)
    axes.plot(counts, counts, linestyle=":", color="grey", label="all GPUs at full speed")
    axes.set(xlabel="GPUs", ylabel="tokens/s relative to one GPU", xticks=counts, ylim=(0, None))
    axes.set_title("Default model, 32,768 tokens per sequence")
    clean_axes(axes)
    axes.legend(frameon=False)
    return figure


def write(output: Path, header: dict[str, str], rows: list[Row]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "scaling.json").write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    medians = median_rows(rows)
    save_plot(plot(medians), output / "scaling.png")
    parts = (f"# Training on several GPUs, {header['date']}", f"{header['machine']}.", f"    {header['command']}")
    (output / "README.md").write_text(
        "\n\n".join((*parts, results_table(header["date"], medians))) + "\n![speed](scaling.png)\n"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    parser.add_argument("--ranks", type=command.at_least(1), nargs="+", default=None, help="default: all GPUs of the machine")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="default: all")
    parser.add_argument("--steps", type=command.at_least(4), default=60, help="steps per job; default: 60")
    parser.add_argument("--rounds", type=command.at_least(1), default=1, help="default: 1")
    parser.add_argument("--output", type=Path, default=command.RESULTS / "scaling", help="default: outputs/benchmarks/scaling")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    ranks = args.ranks or [max(torch.cuda.device_count(), 1)]
    gpus.require_gpus(max(ranks))
    header = command.describe_run("scripts.bench.scaling", argv, gpus=max(ranks))
    jobs = [("ring", 1), *((job, count) for count in ranks if count > 1 for job in args.jobs)]
    rows: list[Row] = []
    for _ in range(args.rounds):
        for job, count in jobs:
            rows.append(measure(job, count, args.steps))
            write(args.output, header, rows)
            print(results_table(header["date"], [*rows[:1], rows[-1]]).splitlines()[-1], flush=True)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
