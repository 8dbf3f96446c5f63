"""Show the accuracy on the recall task by sequence length and answer position, as a table and a picture.

At position 0%, the facts are at the beginning of the sequence. At position 100%, the facts are directly before the queries.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringattn.train.reports.figures import new_figure, save_figure

# Maps a pair (sequence length in tokens, position of the answer in percent) to an accuracy.
Accuracies = dict[tuple[int, int], float]


def to_metrics(accuracies: Accuracies) -> dict[str, float]:
    """Return the accuracies as `recall/LENGTH/POSITION`. The entry `recall_accuracy` is for the largest length and position
    0%.
    """
    hardest = accuracies[max(length for length, _ in accuracies), 0]
    cells = {f"recall/{length}/{position}": value for (length, position), value in accuracies.items()}
    return {"recall_accuracy": hardest} | cells


def from_metrics(values: Mapping[str, Any]) -> Accuracies:
    names = [name.split("/") for name in values if name.startswith("recall/")]
    return {(int(length), int(position)): values[f"recall/{length}/{position}"] for _, length, position in names}


def accuracy_table(accuracies: Accuracies) -> str:
    lengths, positions = _axes(accuracies)
    rows = [["position of the answer", *(f"{length:,} tokens" for length in lengths)], ["---"] * (len(lengths) + 1)]
    for position in positions:
        rows.append([f"{position}%", *(f"{accuracies[length, position]:.1%}" for length in lengths)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot_accuracies(accuracies: Accuracies, chance: float, output: Path, title: str = "") -> None:
    """Draw a heat map as a PNG file. The argument `chance` is the accuracy of a model that guesses."""
    lengths, positions = _axes(accuracies)
    figure = new_figure(2.5 + 0.9 * len(lengths), 1.5 + 0.35 * len(positions))
    axes = figure.subplots()
    grid = [[accuracies[length, position] for length in lengths] for position in positions]
    colours = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            colour = "black" if value > 0.6 else "white"
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize="small")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(positions)), [f"{position}%" for position in positions])
    axes.set_xlabel("length of the sequence in tokens")
    axes.set_ylabel("position of the answer")
    axes.set_title(f"accuracy in percent (chance: {100 * chance:.1f})", fontsize="medium")
    figure.colorbar(colours, label="accuracy")
    save_figure(figure, output, title.replace(": ", ":\n"))  # The picture is narrow.


def _axes(accuracies: Accuracies) -> tuple[list[int], list[int]]:
    return sorted({length for length, _ in accuracies}), sorted({position for _, position in accuracies})
