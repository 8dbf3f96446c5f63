"""What a run leaves behind at its end: a sample, a picture of its losses, and a summary."""

import json
import logging
import resource
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.train import metrics
from ringattn.train.config import ConfigError
from ringattn.train.generate import generate
from ringattn.train.model import flops
from ringattn.train.parallel import memory
from ringattn.train.parallel import mesh as parallel
from ringattn.train.setup import Run

log = logging.getLogger(__name__)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory used so far: of the GPU by this job, or of the machine by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / memory.GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / memory.GIB


def finish(run: Run, directory: Path, rows: list[dict[str, float]], done: int) -> dict[str, Any]:
    """Sample from the model after `done` steps, plot the loss, and write and return the summary."""
    write_sample(run, directory)
    losses = parallel.broadcast_object(_losses(directory, done) if dist.get_rank() == 0 else None)
    summary = summarise(run, rows, done, losses)
    log.info("done        " + ", ".join(f"{k} {v:.6g}" for k, v in summary.items() if isinstance(v, float)))
    if dist.get_rank() == 0:
        metrics.plot_loss(directory / "metrics.jsonl", directory / "loss.png")
        metrics.write_whole(directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _losses(directory: Path, done: int) -> dict[str, float | None]:
    """final_loss: the mean over the last tenth of all steps, since the loss of one depends on its text; and eval_loss."""
    rows = metrics.read(directory / "metrics.jsonl", until=done)
    final_loss = statistics.fmean(row["loss"] for row in rows[-max(done // 10, 1) :])
    return {"final_loss": final_loss, "eval_loss": rows[-1].get("eval_loss")}


def summarise(run: Run, rows: list[dict[str, float]], done: int, losses: dict[str, float | None]) -> dict[str, Any]:
    """What a job comes down to.

    Rates are of the median step of `rows`, those since the job was started or resumed; the first, which warms up, counts only
    when alone.
    """
    world_size = dist.get_world_size()
    steady = rows[1:] or rows
    seconds = statistics.median(row["seconds"] for row in steady)
    flops_per_s = statistics.median(row["flops"] / row["seconds"] for row in steady) / world_size
    return {
        "seq_len": run.config.data.seq_len,
        "ranks": world_size,
        "ring": run.mesh.sequence.size(),
        "steps": done,
        **losses,
        "seconds_per_step": seconds,
        "tokens_per_s": run.tokens_per_step / seconds,
        **flops.utilisation(flops_per_s, run.peak_flops),
        "peak_memory_gib": peak_memory_gib(run.device),
    }


def read_summary(run: Run, directory: Path, done: int) -> dict[str, Any]:
    """The summary of a job that has nothing left to train, but for a sample; made now if it was ended before it had one."""
    path = directory / "summary.json"
    log.info(f"{'done':<12}all {done} steps, in an earlier run: raise trainer.steps to train on")
    summary = parallel.broadcast_object(json.loads(path.read_text()) if path.exists() else None)
    if summary is not None and summary["steps"] == done:  # else of a run that went on
        write_sample(run, directory)
        return summary
    rows = parallel.broadcast_object(metrics.read(directory / "metrics.jsonl", until=done))
    with parallel.sync_errors():
        if not rows:
            raise ConfigError(f"all {done} steps are done already, so nothing is left to train: raise trainer.steps")
    ranks = dist.get_world_size()
    rows = [row | {"flops": row["tflops_per_rank"] * 1e12 * row["seconds"] * ranks} for row in rows]
    return finish(run, directory, rows, done)


def write_sample(run: Run, directory: Path) -> None:
    """Let the model write on, unless `trainer.sample_tokens` is 0."""
    if not run.config.trainer.sample_tokens:
        return
    text = sample(run)
    if dist.get_rank() == 0:
        log.info(f"sample      {text!r}")
        (directory / "sample.txt").write_text(text, encoding="utf-8")


def sample(run: Run) -> str:
    """What the model writes after the prompt, and the prompt."""
    trainer, tokenizer = run.config.trainer, run.tokenizer
    tokens = generate(
        run.model,
        tokenizer.encode(trainer.sample_prompt).tolist(),
        trainer.sample_tokens,
        group=run.mesh.sequence.get_group(),
        device=run.device,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
        backend=run.config.parallel.kernel,
    )
    return tokenizer.decode(tokens)
