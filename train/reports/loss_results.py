"""Show the losses of the same target tokens at several sequence lengths as metrics, a table and a plot.

The error of a loss is half the width of a 95% interval, from a bootstrap over documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringattn.train.reports.figures import clean_axes, new_figure, save_figure

# The number of bootstrap samples.
NUM_DRAWS = 1000


@dataclass(frozen=True)
class Losses:
    """Holds the losses of the target tokens at each length."""

    lengths: list[int]  # the L lengths in tokens, ascending
    tokens: np.ndarray  # (D,), the number of target tokens of each document
    sums: np.ndarray  # (L, D) float64, the summed loss of each document in nats
    checksum: int  # a checksum of the target tokens

    @property
    def means(self) -> np.ndarray:
        """The loss at each length, in nats per token."""
        return self.sums.sum(1) / self.tokens.sum()

    def errors(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the errors of `means` and of `means - means[0]`. Return None if there is only one document."""
        count = len(self.tokens)
        if count == 1:
            return None
        random, draws = np.random.default_rng(0), list[np.ndarray]()
        for _ in range(NUM_DRAWS):
            times = np.bincount(random.integers(count, size=count), minlength=count)
            draws.append(self.sums @ times / (self.tokens @ times))
        means = np.stack(draws)
        return 1.96 * means.std(0), 1.96 * (means - means[:, :1]).std(0)


def to_metrics(losses: Losses) -> dict[str, float]:
    """Return the losses as metrics.

    Returns:
        The entry `eval_loss` is the loss at the longest length, and `eval_loss_error` is the error of this loss. The entry
        `eval_loss_at/LENGTH` is the loss at a length. The entry `eval_difference_error/LENGTH` is the error of the difference
        between the losses at LENGTH and at the shortest length. The entry `eval_target_tokens` is the number of target tokens,
        and `eval_targets` is their checksum. Unknown errors are left out.
    """
    means, errors = losses.means.tolist(), losses.errors()
    metrics: dict[str, float] = {"eval_loss": means[-1]}
    metrics |= {f"eval_loss_at/{length}": mean for length, mean in zip(losses.lengths, means, strict=True)}
    if errors is not None:
        own, differences = (each.tolist() for each in errors)
        metrics["eval_loss_error"] = own[-1]
        names = [f"eval_difference_error/{length}" for length in losses.lengths]
        metrics |= dict(zip(names[1:], differences[1:], strict=True))
    return metrics | {"eval_target_tokens": int(losses.tokens.sum()), "eval_targets": losses.checksum}


def from_metrics(values: Mapping[str, Any], name: str = "eval_loss_at") -> dict[int, float]:
    """Return the values of the metrics `name`/LENGTH by length."""
    return {int(key.removeprefix(f"{name}/")): value for key, value in values.items() if key.startswith(f"{name}/")}


def loss_table(losses: Losses) -> str:
    """Return a Markdown table of the losses by length, followed by an explanation."""
    lengths, means, errors, count = losses.lengths, losses.means, losses.errors(), len(losses.tokens)
    own, differences = errors or (None, None)
    rows = [["sequence length", "target tokens", "loss", f"difference to {lengths[0]:,} tokens"], ["---"] * 4]
    for index, length in enumerate(lengths):
        difference = _with_error("{:+.4f}", means[index] - means[0], differences, index) if index else "-"
        tokens = f"{int(losses.tokens.sum()):,}"
        rows.append([f"{length:,}", tokens, _with_error("{:.4f}", means[index], own, index), difference])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    bars = "No errors are known, because the target tokens belong to one document."
    if errors is not None:
        bars = f"± is the 95% interval of a bootstrap over the {count:,} documents of the target tokens."
    return (
        f"{table}\n\nAll rows contain the same target tokens. A target token can attend to all earlier tokens of its document, "
        f"or at least to half of the sequence length. {bars} A longer context helps if the loss falls by more than the error "
        "of the difference."
    )


def _with_error(form: str, value: float, errors: np.ndarray | None, index: int) -> str:
    return form.format(value) + ("" if errors is None else f" ± {errors[index]:.4f}")


def plot_losses(losses: Losses, output: Path, title: str = "") -> None:
    """Plot losses by length, and differences from the loss at the shortest length, as a PNG file with error bars."""
    figure = new_figure(11, 4)
    left, right = figure.subplots(1, 2)
    own, differences = losses.errors() or (None, None)
    draw_by_length(left, losses.lengths, losses.means, own)
    draw_by_length(right, losses.lengths, losses.means - losses.means[0], differences)
    right.axhline(0, color="0.5", linewidth=0.8)
    left.set_ylabel("loss (nats per token)")
    right.set_ylabel(f"difference to {losses.lengths[0]:,} tokens (nats per token)")
    left.set_title(f"the same {int(losses.tokens.sum()):,} target tokens at every length", fontsize="medium")
    right.set_title("below zero: a longer context helps", fontsize="medium")
    for axes in (left, right):
        axes.set_xlabel("sequence length in tokens")
        clean_axes(axes)
    save_figure(figure, output, title)


def label_numbers(axis: Any) -> None:
    """Label the ticks of an axis with numbers such as 10,000,000, instead of 1 and a factor 1e7."""
    axis.set_major_formatter("{x:,.10g}")


def draw_by_length(axes: Any, lengths: list[int], values: Any, errors: Any = None, **style: Any) -> None:
    """Plot values over the length, on a logarithmic x axis. The argument `errors` may be None."""
    axes.errorbar(lengths, values, errors, marker="o", capsize=3, **style)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45)
