"""Functions that scripts use to plot their results."""

import io
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# A plot has few colours, so a palette of this size makes its PNG file several times smaller.
PALETTE = 64


def clean_axes(axes: plt.Axes) -> None:
    """Add a light grid and remove the upper and the right border."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def set_length_axis(axes: plt.Axes, lengths: Iterable[int], label: str) -> None:
    """Make the x axis logarithmic, with one tick per length, such as 16k or 1m."""
    lengths = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short_length(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel(label)


def short_length(length: int) -> str:
    """Write a number of tokens with the suffix k for 1,024 or m for 1,048,576 if the number is a multiple of either."""
    if length % 2**20 == 0:
        return f"{length >> 20}m"
    return f"{length >> 10}k" if length % 2**10 == 0 else str(length)


def plot_points(axes: plt.Axes, points: Iterable[tuple[float, float]], colour: int, label: str) -> None:
    """Draw a line with markers through the points in the order of x, unless there are no points."""
    if points := sorted(points):
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=f"C{colour}", label=label)


def save_plot(figure: plt.Figure, path: Path) -> None:
    """Write the figure as a small PNG file and close it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(PALETTE).save(path, optimize=True)
