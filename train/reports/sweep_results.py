"""Write a table and a picture of a sweep after every job.

After the last job, log the table and the picture to Weights & Biases.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringattn.train.files import write_atomically
from ringattn.train.reports.figures import clean_axes, new_figure, save_figure
from ringattn.train.reports.loss_results import draw_by_length, label_numbers
from ringattn.train.reports.wandb_run import chosen_mode, keep_tables_in, project_name, run_id, sync_command
from ringattn.train.settings.config import Config

log = logging.getLogger(__name__)

OUT_OF_MEMORY = "out of memory"

# Maps each column of the table to an entry of the summary and its format. The losses by length follow.
COLUMNS = {
    "final loss (mean of the last tenth)": ("final_loss", "{:.4f}"),
    "eval loss": ("eval_loss", "{:.4f}"),
    "tokens": ("total_tokens", "{:,}"),
    "tokens/step": ("tokens_per_step", "{:,}"),
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "TFLOP/s per rank": ("tflops_per_rank", "{:.3g}"),
    "MFU": ("mfu", "{:.1%}"),
    "peak GiB per rank": ("peak_memory_gib", "{:.2f}"),
    "estimated GiB per rank": ("estimated_memory_gib", "{:.2f}"),
}


@dataclass
class Outcome:
    """Holds a job of a sweep, and its result."""

    overrides: list[str]
    varied: dict[str, str] = field(default_factory=dict)  # the settings that the sweep varies, and their values in this job
    result: dict[str, Any] | str = "failed"  # the summary of the job, or "failed", "stopped" or "out of memory"
    config: Config | None = None  # the settings of the job; None if they are invalid

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.varied.items()) or "job"


@dataclass
class Jobs:
    """Collects the jobs that this launch has started.

    Attributes:
        outcomes: the jobs and their results.
        directory: the directory of the sweep; None if there is no sweep.
        rejected: the errors of jobs that cannot run, by their overrides; None before the jobs were checked.
        lengths: the values of `data.seq_len` of the other jobs, if the sweep varies it.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    directory: Path | None = None
    rejected: dict[tuple[str, ...], Exception] | None = None
    lengths: list[int] = field(default_factory=list)

    def write_results(self) -> None:
        """In a sweep, write the table sweep.md and the picture sweep.png of all jobs so far."""
        if self.directory is not None:
            write_atomically(self.directory / "sweep.md", f"{sweep_table(self.outcomes)}\n".encode())
            plot_sweep(self.outcomes, self.directory / "sweep.png")

    def has_errors(self) -> bool:
        """A stopped job has no error."""
        return any(isinstance(outcome.result, str) and outcome.result != "stopped" for outcome in self.outcomes)


def sweep_table(outcomes: list[Outcome]) -> str:
    """Return a Markdown table with one row per job. The lines above the table apply to all jobs."""
    names, *rows = table_rows(outcomes)
    common = _common_overrides(outcomes)
    lines = [f"Common to all: {' '.join(sorted(common)) or 'the defaults'}", "", *_describe_targets(outcomes)]
    lines += ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def table_rows(outcomes: list[Outcome]) -> list[list[str]]:
    """The first row contains the column names."""
    common, lengths = _common_overrides(outcomes), _lengths(outcomes)
    rows = [["overrides", *COLUMNS, *(f"eval loss at {length:,} tokens" for length in lengths)]]
    for outcome in outcomes:
        overrides = " ".join(override for override in outcome.overrides if override not in common)
        rows.append([overrides, *_cells(outcome, lengths)])
    return rows


def _common_overrides(outcomes: list[Outcome]) -> set[str]:
    return set.intersection(*(set(outcome.overrides) for outcome in outcomes))


def _describe_targets(outcomes: list[Outcome]) -> list[str]:
    evaluated = [each.result for each in outcomes if isinstance(each.result, dict) and each.result.get("eval_loss") is not None]
    checksums = {result.get("eval_targets") for result in evaluated}
    if not checksums:
        return []
    if len(checksums) > 1:
        if any(each.config is not None and each.config.data.source == "recall" for each in outcomes):
            return ["The jobs were evaluated on sequences that were generated for their lengths.", ""]
        return [
            "The jobs were evaluated on different tokens, so their eval losses cannot be compared. Set the same data.eval_path "
            "or data.eval_split and the same trainer.eval_tokens for all jobs, and choose a new name for the sweep.",
            "",
        ]
    bars = "; ± is the 95% interval of a bootstrap over documents" if evaluated[0].get("eval_loss_error") is not None else ""
    tokens = evaluated[0].get("eval_target_tokens")
    return [] if tokens is None else [f"All eval losses are means over the same {tokens:,} tokens{bars}.", ""]


def _losses_by_length(outcome: Outcome) -> dict[int, float]:
    losses = outcome.result.get("eval_loss_by_length", {}) if isinstance(outcome.result, dict) else {}
    return {int(length): loss for length, loss in losses.items()}


def _lengths(outcomes: list[Outcome]) -> list[int]:
    return sorted({length for outcome in outcomes for length in _losses_by_length(outcome)})


def _cells(outcome: Outcome, lengths: list[int]) -> list[str]:
    if isinstance(outcome.result, str):
        return [outcome.result] + ["-"] * (len(COLUMNS) - 1 + len(lengths))
    values = [(outcome.result.get(name), form) for name, form in COLUMNS.values()]
    losses = _losses_by_length(outcome)
    values += [(losses.get(length), "{:.4f}") for length in lengths]
    cells = ["-" if value is None else form.format(value) for value, form in values]
    if (error := outcome.result.get("eval_loss_error")) is not None:
        cells[list(COLUMNS).index("eval loss")] += f" ± {error:.4f}"
    return cells


def plot_sweep(outcomes: list[Outcome], output: Path) -> None:
    """Plot the speed, the memory and the losses of the jobs as a PNG file.

    If the sweep varies a single numeric setting, the first three panels show this setting on the x axis. For other sweeps, the
    x axis lists the jobs. A job without a summary is marked by a dotted line. The fourth panel shows one line per job, with its
    loss by sequence length.
    """
    figure = new_figure(11, 7.5)
    speed, flops, memory, losses = figure.subplots(2, 2).flat
    _plot_entries(speed, outcomes, {"tokens_per_s": ""}, "tokens/s, all ranks")
    has_mfu = any(isinstance(each.result, dict) and each.result.get("mfu") is not None for each in outcomes)
    _plot_entries(
        flops, outcomes, {"mfu": ""} if has_mfu else {"tflops_per_rank": ""}, "MFU" if has_mfu else "TFLOP/s per rank"
    )
    # On CPUs, the measured memory includes Python and its libraries, but the estimate does not.
    results = [each.result for each in outcomes if isinstance(each.result, dict)]
    estimate = {} if any(each.get("device") == "cpu" for each in results) else {"estimated_memory_gib": "estimated"}
    _plot_entries(memory, outcomes, {"peak_memory_gib": "measured"} | estimate, "peak GiB per rank")
    _plot_losses(losses, outcomes)
    for axes in (speed, flops, memory, losses):
        clean_axes(axes)
    save_figure(figure, output, _sweep_title(outcomes, results))


def _sweep_title(outcomes: list[Outcome], results: list[dict[str, Any]]) -> str:
    name = next((each.config.name for each in outcomes if each.config is not None), None) or "sweep"
    units = {"parameters": "parameters", "total_tokens": "tokens per job", "ranks": "ranks"}
    values = {entry: {each.get(entry) for each in results} - {None} for entry in units}
    common = [f"{each.pop():,} {units[entry]}" for entry, each in values.items() if len(each) == 1]
    return f"{name}: {', '.join(common)}".replace(" 1 ranks", " 1 rank") if common else name


def _positions(outcomes: list[Outcome]) -> tuple[list[float], list[str], str | None]:
    try:
        ((name, _),) = outcomes[0].varied.items()
        values = [float(outcome.varied[name]) for outcome in outcomes]
    except (ValueError, LookupError):
        return list(range(len(outcomes))), [outcome.name for outcome in outcomes], None
    return values, [f"{value:,g}" if value < 1e6 else f"{value:,.0f}" for value in values], name


def _plot_entries(axes: Any, outcomes: list[Outcome], entries: dict[str, str], title: str) -> None:
    positions, labels, name = _positions(outcomes)
    heights = list[float]()
    for style, (entry, label) in zip(("o-", "s--"), entries.items(), strict=False):
        points = []
        for position, outcome in zip(positions, outcomes, strict=True):
            if isinstance(outcome.result, dict) and outcome.result.get(entry) is not None:
                points.append((position, outcome.result[entry]))
        points.sort()
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label)
        heights += [y for _, y in points]
    for position, outcome in zip(positions, outcomes, strict=True):
        if isinstance(outcome.result, str):
            axes.axvline(position, color="C3", linestyle=":")
            anchor = dict(rotation=90, ha="right", va="center", transform=axes.get_xaxis_transform())
            axes.text(position, 0.5, outcome.result, color="C3", **anchor)
    if name is not None and min(positions) > 0 and max(positions) >= 4 * min(positions):
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(positions, labels, rotation=0 if name else 30)
    axes.set_xlabel(name or "")
    axes.set_ylim(0, max(heights, default=1) * (1.1 if len(entries) == 1 else 1.25))
    label_numbers(axes.yaxis)
    axes.set_title(title, fontsize="medium")
    if len(entries) > 1:
        axes.legend(loc="upper center", ncols=len(entries), frameon=False)  # in the space above all points


def _plot_losses(axes: Any, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if isinstance(outcome.result, dict) and (losses := _losses_by_length(outcome)):
            errors = [0.0] * (len(losses) - 1) + [outcome.result.get("eval_loss_error") or 0.0]
            draw_by_length(axes, list(losses), list(losses.values()), errors, label=outcome.name)
    if lengths := _lengths(outcomes):
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30)
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside right lower", frameon=False)
    axes.set_xlabel("sequence length of the evaluation in tokens")
    axes.set_title("loss of the same held-out tokens (nats per token)", fontsize="medium")


def log_to_wandb(outcomes: list[Outcome], directory: Path) -> None:
    """Log the table and the picture of a sweep to a W&B run. The runs of the jobs have the same W&B group.

    A sweep that is launched again continues the W&B run. If W&B is offline, log the command that uploads all runs. If W&B is
    off, do nothing.
    """
    configs = [outcome.config for outcome in outcomes if outcome.config is not None]
    choice = chosen_mode(configs[-1]) if configs else "off"
    if choice == "off":
        return
    import wandb  # Importing wandb is slow.

    table: list[Any] = table_rows(outcomes)
    config = configs[-1]
    options: dict[str, Any] = {"project": project_name(config), "name": config.name, "group": config.name, "job_type": "sweep"}
    try:
        settings = wandb.Settings(silent=True, console="off", init_timeout=30)
        is_online = choice != "offline" and wandb.login(prompt=False, verify=False)
        mode = "online" if is_online else "offline"
        keep_tables_in(directory)
        with wandb.init(dir=directory, id=run_id(directory), mode=mode, resume="allow", settings=settings, **options) as run:
            run.log({"sweep": wandb.Table(table[0], table[1:]), "sweep_chart": wandb.Image(str(directory / "sweep.png"))})
        wandb.teardown()  # Offline, W&B's process writes the last records after the `with` block. Wait for its end.
        log.info(f"{'W&B':<12}{mode}, the table and the picture of the sweep")
        if not is_online:
            log.info(f"{'W&B':<12}upload all runs of the sweep with: {sync_command(directory, is_sweep=True)}")
    except Exception as error:  # The results are already on disk, so W&B errors must not end the sweep.
        log.warning("W&B failed: %s; sweep.md and sweep.png contain the results", error)
