"""Draw the losses of several runs in one picture, and compare final losses and speeds with the first run.

    python -m scripts.tools.compare_losses losses.png outputs/bf16 outputs/float8

The runs must have the same number of steps. Losses in the picture are means of up to ten steps.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from ringattn.train.reports import metrics
from ringattn.train.reports.figures import clean_axes
from scripts import command
from scripts.plots import plt, save_plot
from scripts.tables import markdown_table

# Each point of a curve is a mean over WIDTH steps.
WIDTH = 10


def comparison_table(runs: dict[str, list[dict[str, Any]]], last: int) -> str:
    """Return a table with one row per run. The final loss is the mean of the last `last` steps."""
    columns = f"run | mean loss of the last {last} steps | relative to the first run | held-out loss | median tokens/s per rank"
    rows, finals = list[tuple[str, ...]](), dict[str, float]()
    for name, records in runs.items():
        finals[name] = statistics.fmean(record["loss"] for record in records[-last:])
        held_out = [record["eval_loss"] for record in records if "eval_loss" in record]
        # The first step compiles.
        speed = statistics.median(record["tokens_per_s_per_rank"] for record in records[1:])
        change = finals[name] / next(iter(finals.values())) - 1
        rows.append(
            (name, f"{finals[name]:.4f}", f"{change:+.2%}", f"{held_out[-1]:.4f}" if held_out else "-", f"{speed:,.0f}")
        )
    return markdown_table(columns, rows)


def plot(runs: dict[str, list[dict[str, Any]]]) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, records in runs.items():
        parts = [records[start : start + WIDTH] for start in range(0, len(records), WIDTH)]
        means = [statistics.fmean(record["loss"] for record in part) for part in parts]
        axes.plot([part[-1]["step"] for part in parts], means, label=name)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    clean_axes(axes)
    axes.legend(frameon=False)
    return figure


def main(argv: list[str]) -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("output", type=command.png_file, help="the PNG file to write")
    parser.add_argument("runs", type=Path, nargs="+", help="directories of runs")
    parser.add_argument("--last", type=command.at_least(1), default=20, help="steps of the final loss (default: 20)")
    args = parser.parse_args(argv)
    runs = {str(path): metrics.read(path / "metrics.jsonl") for path in args.runs}
    lengths = {name: len(records) for name, records in runs.items()}
    if min(lengths.values()) < 2 or len(set(lengths.values())) > 1:
        steps = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        parser.error(f"all runs must have the same number of steps, at least 2, but {steps}: choose other runs")
    print(comparison_table(runs, min(args.last, *lengths.values())))
    try:
        save_plot(plot(runs), args.output)
    except (OSError, ValueError) as error:
        parser.error(f"cannot write {args.output}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
