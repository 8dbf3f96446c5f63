"""Write the loss plot and the summary of a run."""

import json
import logging
import resource
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.train.data.recall import CHANCE
from ringattn.train.files import write_atomically
from ringattn.train.model import flops
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.ranks import broadcast_object, sync_errors
from ringattn.train.reports import metrics, startup
from ringattn.train.reports.loss_results import from_metrics as losses_from_metrics
from ringattn.train.reports.recall_results import from_metrics, plot_accuracies
from ringattn.train.reports.wandb_run import WandbRun
from ringattn.train.settings.config import ConfigError
from ringattn.train.setup import Run

log = logging.getLogger(__name__)


def peak_memory_gib(device: torch.device, uncounted: int = 0) -> float:
    """Return the peak memory of this job in GiB.

    On a GPU, return the memory that torch counts as allocated, plus `uncounted` bytes. On a CPU, return the memory of the whole
    process, including Python.
    """
    if device.type == "cuda":
        return (torch.cuda.max_memory_allocated() + uncounted) / estimate.GIB
    return peak_host_memory_gib()


def peak_host_memory_gib() -> float:
    """Return the peak memory of this process in GiB, including Python, its libraries and pinned memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / estimate.GIB


def write_results(run: Run, directory: Path, done: int, wandb_run: WandbRun) -> dict[str, Any]:
    """Write the loss plot and the summary of a run. Every rank returns the summary.

    Args:
        run: has taken all its steps.
        done: the steps of earlier launches.
        wandb_run: also receives the plot and the summary.
    """
    summary = None
    if dist.get_rank() == 0:
        records = metrics.read(directory / "metrics.jsonl", until=run.config.trainer.steps)
        summary = summarise(run, records, done)
        log.info(f"{'done':<12}" + ", ".join(_describe(name, summary) for name, v in summary.items() if isinstance(v, float)))
        title = plot_loss(run, directory)
        metrics.plot_data_wait(directory / "metrics.jsonl", directory / "data_wait.png", title)
        write_atomically(directory / "summary.json", f"{json.dumps(summary, indent=2)}\n".encode())
        wandb_run.log_picture("loss_curve", run.config.trainer.steps, directory / "loss.png")
        if accuracies := from_metrics(records[-1]):
            plot_accuracies(accuracies, CHANCE, directory / "recall.png", title)
            wandb_run.log_picture("recall_heat_map", run.config.trainer.steps, directory / "recall.png")
        wandb_run.update_summary(summary)
    return broadcast_object(summary)


def plot_loss(run: Run, directory: Path) -> str:
    """Write loss.png, and return its title."""
    records = metrics.read(directory / "metrics.jsonl")
    tokens = records[-1].get("total_tokens") if records else None
    title = run.plot_title(directory.name, f"{len(records):,} steps" if tokens is None else f"{tokens:,} tokens")
    metrics.plot_loss(directory / "metrics.jsonl", directory / "loss.png", title)
    return title


def summarise(run: Run, records: list[dict[str, float]], done: int) -> dict[str, Any]:
    """Return the summary of a run.

    The loss of a step depends on its text. Therefore `final_loss` is the mean over the last tenth of all steps
    (`final_loss_steps` steps). Lengths are strings, as in JSON. The docstrings of `loss_results.to_metrics`,
    `recall_results.to_metrics` and `startup.seconds` describe further entries. Rates are computed from the median of the steps
    after step `done` + 1. Step `done` + 1 includes the warm-up.
    """
    steps = run.config.trainer.steps
    recent = [record for record in records if record["step"] > done]
    steady = recent[1:] or recent
    seconds = statistics.median(record["seconds"] for record in steady)
    last = records[-max(steps // 10, 1) :]
    flops_per_s = statistics.median(record["tflops_per_rank"] for record in steady) * 1e12
    recall = {name: value for name, value in records[-1].items() if name == "recall_accuracy"}
    return recall | {
        "seq_len": run.config.data.seq_len,
        "ranks": dist.get_world_size(),
        "device": run.device.type,
        "parameters": run.num_parameters,
        "ring": run.mesh.sequence.size(),
        "steps": steps,
        "final_loss": statistics.fmean(record["loss"] for record in last),
        "final_loss_steps": len(last),
        "eval_loss": records[-1].get("eval_loss"),
        "eval_loss_error": records[-1].get("eval_loss_error"),
        "eval_loss_by_length": {str(length): loss for length, loss in losses_from_metrics(records[-1]).items()},
        "eval_target_tokens": records[-1].get("eval_target_tokens"),
        "eval_targets": records[-1].get("eval_targets"),
        "total_tokens": records[-1].get("total_tokens"),
        "tokens_per_step": run.tokens_per_step,
        "seconds_per_step": seconds,
        "tokens_per_s": run.tokens_per_step / seconds,
        **flops.utilisation(flops_per_s, run.peak_flops),
        "peak_memory_gib": peak_memory_gib(run.device, run.uncounted_bytes),
        "estimated_memory_gib": run.memory_needed.allocated / estimate.GIB,
        "peak_host_memory_gib": peak_host_memory_gib(),
        "estimated_offloaded_gib": run.memory_needed.offloaded / estimate.GIB,
        "start_up_s": startup.seconds(),
    }


def _describe(name: str, summary: dict[str, Any]) -> str:
    steps = f" (mean of the last {summary['final_loss_steps']} steps)" if name == "final_loss" else ""
    return f"{name} {summary[name]:.6g}{steps}"


def complete_summary(run: Run, directory: Path) -> dict[str, Any] | None:
    """Return the summary of a run that has no steps left, or None if no launch has written a summary.

    Raises:
        ConfigError: on every rank, if summary.json is damaged, or metrics.jsonl does not contain the last step.
    """
    path, steps = directory / "summary.json", run.config.trainer.steps
    log.info(f"{'done':<12}all {steps} steps were completed by an earlier launch: raise trainer.steps to train longer")
    with sync_errors():
        summary = read_summary(path) if dist.get_rank() == 0 else None
    summary = broadcast_object(summary)
    # The summary of a shorter run is obsolete after `trainer.steps` was raised.
    if summary is not None and summary["steps"] == steps:
        return summary
    if not broadcast_object(any(record["step"] == steps for record in metrics.read(directory / "metrics.jsonl"))):
        raise ConfigError(f"no steps are left to train, and metrics.jsonl has no record of step {steps}: raise trainer.steps")
    return None


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary in a file, or None if there is no such file.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        summary = json.loads(path.read_text())
        if not isinstance(summary["steps"], int):
            raise ValueError("steps must be an integer")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it, and the next launch writes it again") from None
    return summary
