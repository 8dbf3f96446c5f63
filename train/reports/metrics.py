"""Record the metrics of every step on the console, in metrics.jsonl and in W&B, and plot them."""

import json
import logging
import math
import os
import statistics
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.train.files import write_atomically
from ringattn.train.model.flops import utilisation
from ringattn.train.reports.figures import clean_axes, new_figure, save_figure
from ringattn.train.reports.loss_results import draw_by_length, from_metrics, label_numbers
from ringattn.train.reports.wandb_run import WandbRun
from ringattn.train.settings.config import Config

log = logging.getLogger(__name__)

# The text that the console shows for each metric of a step
CONSOLE_FORMATS = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "recall_accuracy": "recall {:.1%}",
    "expert_imbalance": "busiest expert {:.2f}x",
    "grad_norm": "grad norm {:.3g}",
    "lr": "lr {:.2e}",
    "tokens_per_s_per_rank": "{:,.0f} tokens/s per rank",
    "tflops_per_rank": "{:.3g} TFLOP/s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "{:.2f} GiB",
}

# By default, the console shows the first steps of a launch, and then at most one step per interval.
FIRST_STEPS = 3
CONSOLE_INTERVAL_S = 5.0


class Recorder:
    """Records the steps of a run on the console, in metrics.jsonl and in W&B. Only rank 0 records anything."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        done: float = 0,
        peak_flops: float | None = None,
        wandb_run: WandbRun | None = None,
    ) -> None:
        """Open metrics.jsonl, and remove the records of steps after `done`.

        Args:
            done: the completed steps, or math.inf.
            peak_flops: the peak FLOP/s of one device, or None to omit the MFU.
            wandb_run: the W&B run, which also receives all records. The caller closes the W&B run.
        """
        self._is_active = not dist.is_initialized() or dist.get_rank() == 0
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._done, self._steps, self._every = done, config.trainer.steps, config.trainer.log_every
        self._last_shown = -math.inf  # the time of the latest line on the console
        self._latest: dict[str, float] = {}  # the record of the latest step of this launch
        self._peak_flops = peak_flops
        self._seconds: deque[float] = deque(maxlen=20)
        self._wandb = wandb_run
        self._path = directory / "metrics.jsonl"
        if self._is_active:
            directory.mkdir(parents=True, exist_ok=True)
            self._rewrite(read(self._path, until=done))

    def log(
        self, step: int, *, tokens: int, seconds: float, flops: float | None = None, show: bool = True, **values: float | None
    ) -> None:
        """Record one step, counted from 1.

        Args:
            tokens: the tokens of all ranks.
            flops: the model FLOPs of all ranks.
            show: whether the console may show the step now, before `extend` is called.
            values: all other metrics. The plot shows the losses over `total_tokens`, the number of consumed tokens.
        """
        if not self._is_active:
            return
        values |= {"seconds": seconds, "tokens_per_s_per_rank": tokens / seconds / self._ranks}
        if flops is not None:
            values |= utilisation(flops / seconds / self._ranks, self._peak_flops)
        self._latest = {"step": step} | {name: value for name, value in values.items() if value is not None}
        self._file.write(_to_json(self._latest))
        self._file.flush()
        self._seconds.append(seconds)
        if show and (step == self._steps or self._is_due(step)):
            self._show_latest()
        self._log_to_wandb(self._latest)

    def extend(self, step: int, **values: float) -> None:
        """Add metrics to the record of `step`, which must be the latest step."""
        if not self._is_active:
            return
        # Use a single write, so that a kill never leaves an incomplete line.
        self._file.seek(self._file.tell() - len("}\n"))
        self._file.write(", " + _to_json(values).removeprefix("{"))
        self._file.flush()
        os.fsync(self._file.fileno())  # as for checkpoints, so that a power failure does not lose the records of saved steps
        self._latest |= values
        if "eval_loss" in values:
            self._show_latest()
        self._log_to_wandb({"step": step, **values})

    def lacks_evaluation(self, step: int) -> bool:
        """On ranks other than 0, the result is always False."""
        return self._is_active and any(each["step"] == step and "eval_loss" not in each for each in read(self._path))

    def amend(self, step: int, **values: float) -> None:
        """Add metrics to the record of any step in metrics.jsonl."""
        if not self._is_active:
            return
        self._file.close()
        records = read(self._path)
        record = next(record for record in records if record["step"] == step)
        record |= values
        self._rewrite(records)
        log.info(self._format(record))
        self._log_to_wandb({"step": step, **values})

    def _rewrite(self, records: list[dict[str, float]]) -> None:
        write_atomically(self._path, "".join(map(_to_json, records)).encode())
        self._file = self._path.open("r+")
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        if self._is_active:
            self._file.close()

    def _show_latest(self) -> None:
        log.info(self._format(self._latest))
        self._last_shown = time.monotonic()

    def _is_due(self, step: int) -> bool:
        if self._every is not None:
            return step % self._every == 0
        return step <= self._done + FIRST_STEPS or time.monotonic() - self._last_shown >= CONSOLE_INTERVAL_S

    def _format(self, record: dict[str, float]) -> str:
        known = [form.format(record[name]) for name, form in CONSOLE_FORMATS.items() if name in record]
        for name in (name.partition("/")[2] for name in record if name.startswith("epochs/")):
            known.append(f"{name} {record[f'tokens/{name}']:,} tokens ({record[f'epochs/{name}']:.2f} epochs)")
        step = f"step {record['step']:>{len(str(self._steps))}}/{self._steps}"
        if self._seconds:  # This launch has taken a step.
            # Use the median, because the first step is slow.
            remaining = (self._steps - record["step"]) * statistics.median(self._seconds)
            known.append(f"ETA {timedelta(seconds=round(remaining))}")
        return "  ".join([step, *known])

    def _log_to_wandb(self, record: dict[str, float]) -> None:
        if self._wandb is not None:
            self._wandb.log(int(record["step"]), {name: value for name, value in record.items() if name != "step"})


def read(path: Path, until: float = math.inf) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl up to step `until`. Invalid lines are skipped, because a kill may cut a line."""
    records = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            record = json.loads(text)
            if record["step"] <= until:
                records.append(record)
    return records


def _to_json(record: dict[str, float]) -> str:
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
    return json.dumps(finite) + "\n"


def plot_loss(path: Path, output: Path, title: str = "") -> None:
    """Plot the losses in the metrics.jsonl at `path` as a PNG file.

    The left panel shows the losses over tokens, or over steps if the numbers of tokens are unknown. After an evaluation, the
    right panel shows the latest losses on held-out tokens by sequence length.
    """
    records = [record for record in read(path) if record.get("loss") is not None]
    evaluated = [record for record in records if record.get("eval_loss") is not None]
    # Runs of earlier versions lack losses by length.
    by_length = bool(evaluated) and bool(from_metrics(evaluated[-1]))
    figure = new_figure(11 if by_length else 7, 4)
    panels = figure.subplots(1, 2 if by_length else 1, squeeze=False)[0]
    x = "total_tokens" if records and all("total_tokens" in record for record in records) else "step"
    positions, losses = [record[x] for record in records], [record["loss"] for record in records]
    panels[0].plot(positions, losses, linewidth=0.6, alpha=0.3, color="C0")
    panels[0].plot(positions, _smooth(losses), linewidth=1.5, color="C0", label="training, smoothed")
    panels[0].set_xlabel("tokens" if x == "total_tokens" else "step")
    panels[0].locator_params(axis="x", nbins=5)
    label_numbers(panels[0].xaxis)
    if evaluated:
        losses = [record["eval_loss"] for record in evaluated]
        panels[0].plot([record[x] for record in evaluated], losses, "o-", color="C1", label="held-out text")
        panels[0].legend(frameon=False)
    if by_length:
        _plot_by_length(panels[1], evaluated[-1])
    for axes in panels:
        axes.set_ylabel("loss (nats per token)")
        clean_axes(axes)
    save_figure(figure, output, title)


def plot_data_wait(path: Path, output: Path, title: str = "") -> None:
    """Plot the time of every step and the time spent waiting for data as a PNG file."""
    records = [record for record in read(path) if "data_wait_s" in record]
    steady = records[1:] or records  # The first step includes the warm-up.
    share = sum(record["data_wait_s"] for record in steady) / max(sum(record["seconds"] for record in steady), 1e-9)
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for name, label in (("seconds", "step"), ("data_wait_s", f"waiting for data ({share:.2%} without the first step)")):
        axes.plot([record["step"] for record in records], [record[name] for record in records], "o-", markersize=2, label=label)
    axes.set(xlabel="step", ylabel="seconds", yscale="log")
    axes.legend(frameon=False)
    clean_axes(axes)
    save_figure(figure, output, title)


def _smooth(losses: list[float]) -> list[float]:
    width = max(len(losses) // 50, 1)
    # Cumulative sums give each moving average in constant time.
    sums = [0.0, *accumulate(losses)]
    return [(sums[end] - sums[max(end - width, 0)]) / min(end, width) for end in range(1, len(sums))]


def _plot_by_length(axes: Any, record: dict[str, float]) -> None:
    losses, errors = from_metrics(record), from_metrics(record, "eval_difference_error")
    draw_by_length(axes, list(losses), list(losses.values()), [errors.get(length, 0) for length in losses], color="C1")
    axes.set_xlabel(f"sequence length in tokens (step {record['step']})")
    axes.set_title("the same held-out tokens at every length", fontsize="medium")
