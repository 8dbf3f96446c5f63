"""Functions for plotting the results of scripts."""

import io
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The number of colours of a PNG file.
PALETTE = 64


def set_length_axis(axes: plt.Axes, lengths: Iterable[int], label: str) -> None:
    lengths = sorted(set(lengths))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short_length(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel(label)


def short_length(length: int) -> str:
    """Return a length as text, such as 1m for 1,048,576, 16k for 16,384, or 1000."""
    if length % 2**20 == 0:
        return f"{length >> 20}m"
    return f"{length >> 10}k" if length % 2**10 == 0 else str(length)


def plot_points(axes: plt.Axes, points: Iterable[tuple[float, float]], colour: int, label: str) -> None:
    if points := sorted(points):
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=f"C{colour}", label=label)


def save_plot(figure: plt.Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(PALETTE).save(path, optimize=True)
