"""The style of the pictures of runs and scripts."""

import io
from pathlib import Path
from typing import Any

from ringattn.train.files import write_atomically


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure. The sizes are inches."""
    # The import is slow. Unlike pyplot, Figure needs no display and has no global state.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def clean_axes(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, output: Path, title: str = "") -> None:
    figure.suptitle(title, fontsize="medium")
    figure.savefig(content := io.BytesIO(), dpi=150)
    write_atomically(output, content.getvalue())
