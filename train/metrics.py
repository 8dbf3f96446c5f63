"""What every step did: a line on the console, one in metrics.jsonl, a point in W&B; all on rank 0 alone."""

import json
import logging
import math
import os
import secrets
import statistics
from collections import deque
from dataclasses import asdict
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.train.config import Config, ConfigError
from ringattn.train.model.flops import utilisation

log = logging.getLogger(__name__)

# The console line, in order; what a step does not know is left out.
COLUMNS = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "grad_norm": "grad norm {:.3g}",
    "lr": "lr {:.2e}",
    "tokens_per_s_per_rank": "{:,.0f} tokens/s a rank",
    "tflops_per_rank": "{:.3g} TFLOP/s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "{:.2f} GiB",
}


WANDB_MODES = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}  # the environment's, as ours


class Recorder:
    """Records steps 1, 2, ... `trainer.steps` of a run, `done` of which were taken before.

    On ranks other than 0 it does nothing.
    """

    def __init__(self, config: Config, directory: Path, done: int = 0, peak_flops: float | None = None):
        """
        directory: gets metrics.jsonl, of which lines of steps after `done` are dropped, and W&B's files.
        peak_flops: FLOP/s of one device; None: MFU is left out.
        Raises ConfigError, on rank 0, when W&B shall be online and is not logged in.
        """
        self._active = not dist.is_initialized() or dist.get_rank() == 0
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._steps, self._every = config.trainer.steps, config.trainer.log_every
        self._peak_flops = peak_flops
        self._seconds: deque[float] = deque(maxlen=20)
        if self._active:
            directory.mkdir(parents=True, exist_ok=True)
            self._wandb = _start_wandb(config, directory, done)
            self._file = _reopen(directory / "metrics.jsonl", done)

    def log(self, step: int, *, tokens: int, seconds: float, flops: float | None = None, **values: float | None) -> None:
        """Record a step.

        step: from 1, how many are done.
        tokens: of this step, on all ranks together.
        seconds: this step took.
        flops: model FLOPs of this step, on all ranks together.
        values: what else is known, as `loss`, `grad_norm`, `lr`, `total_tokens` (up to here, what the loss is plotted
            over) and `peak_memory_gib`; None is left out.
        """
        if not self._active:
            return
        rates = {"seconds": seconds, "tokens_per_s_per_rank": tokens / seconds / self._ranks}
        if flops is not None:
            rates |= utilisation(flops / seconds / self._ranks, self._peak_flops)
        row = {"step": step} | {name: value for name, value in (values | rates).items() if value is not None}
        self._file.write(_json_line(row))
        self._file.flush()
        self._seconds.append(seconds)
        if step % self._every == 0 or step == self._steps or "eval_loss" in row:
            log.info(self._line(row))
        self._send(row)

    def close(self) -> None:
        """Finish the file and the W&B run."""
        if not self._active:
            return
        self._file.close()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:  # whatever it is, the run itself is done
                log.warning("W&B: %s", error)

    def _line(self, row: dict[str, float]) -> str:
        width = len(str(self._steps))
        remaining = (self._steps - row["step"]) * statistics.median(self._seconds)  # the first step, slow, counts little
        known = [form.format(row[name]) for name, form in COLUMNS.items() if name in row]
        return "  ".join([f"step {row['step']:>{width}}/{self._steps}", *known, f"ETA {timedelta(seconds=round(remaining))}"])

    def _send(self, row: dict[str, float]) -> None:
        if self._wandb is None:
            return
        try:
            self._wandb.log(row)
        except Exception as error:  # a lost curve is no reason to lose a run
            log.warning("W&B: %s; training goes on without it", error)
            self._wandb = None


def read(path: Path, until: float = math.inf) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl up to step `until`; what is no row is left out, such as the half line of a killed run."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            if row["step"] <= until:
                rows.append(row)
        except (ValueError, LookupError, TypeError):
            continue
    return rows


def plot_loss(path: Path, image: Path) -> None:
    """Draw the losses in the metrics.jsonl `path` as PNG `image`.

    Over tokens, or over steps where tokens are unknown; and, where held-out text was evaluated, its loss at last over how many
    tokens a token sees.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no display; here, as it is slow to import

    rows = [row for row in read(path) if row.get("loss") is not None]
    evaluated = [row for row in rows if row.get("eval_loss") is not None]
    figure = Figure(figsize=(11 if evaluated else 7, 4), layout="constrained")
    panels = figure.subplots(1, 2 if evaluated else 1, squeeze=False)[0]
    x = "total_tokens" if rows and all("total_tokens" in row for row in rows) else "step"
    panels[0].plot([row[x] for row in rows], [row["loss"] for row in rows], linewidth=1.2, label="training")
    panels[0].set_xlabel("tokens" if x == "total_tokens" else "step")
    if evaluated:
        panels[0].plot([row[x] for row in evaluated], [row["eval_loss"] for row in evaluated], "o-", label="held-out text")
        panels[0].legend(frameon=False)
        _plot_by_context(panels[1], evaluated[-1])
    for axes in panels:
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(image, dpi=150)


def _plot_by_context(axes, row: dict[str, float]) -> None:
    """The groups of `evaluate`, at equal distances."""
    groups = {int(name.removeprefix("eval_loss/")): loss for name, loss in row.items() if name.startswith("eval_loss/")}
    axes.plot(range(len(groups)), list(groups.values()), "o-", color="C1")
    axes.set_xticks(range(len(groups)), [f"{start:,}" for start in groups])
    axes.set_xlabel(f"tokens that a token sees before it, at least (held-out text, step {row['step']})")
    axes.tick_params("x", rotation=45)


def _json_line(row: dict[str, float]) -> str:
    """JSON knows no NaN: null stands for it."""
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
    return json.dumps(finite) + "\n"


def _reopen(path: Path, done: int):
    """The file, open for appending, with the steps up to `done` alone."""
    write_whole(path, "".join(map(_json_line, read(path, until=done))))
    return open(path, "a")


def write_whole(path: Path, text: str) -> None:
    """Replace the file by one of this text, which is never there in part."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _start_wandb(config: Config, directory: Path, done: int):
    """The W&B run, or None. A resumed run goes on with the one it began."""
    choice = config.logger.wandb
    if choice == "auto":
        choice = WANDB_MODES.get(os.environ.get("WANDB_MODE"), "auto")
    if choice == "off":
        return None
    import wandb  # here, as it is slow to import

    wandb.setup(settings=wandb.Settings(silent=True))
    if choice != "offline" and not _logged_in(wandb):
        if choice == "online":
            raise ConfigError("logger.wandb=online: W&B is not logged in; run `wandb login`, or use offline or auto")
        choice = "offline"
    file = directory / "wandb_id"
    if not (done and file.exists()):
        file.write_text(secrets.token_hex(4))
    project = config.logger.project or os.environ.get("WANDB_PROJECT", "ringattn")
    name, group = _names(config.name, directory)
    settings = dict(project=project, name=name, group=group, id=file.read_text(), config=asdict(config))
    for mode in ("offline",) if choice == "offline" else ("online", "offline"):
        try:
            quiet = wandb.Settings(silent=True, console="off", init_timeout=30)
            run = wandb.init(dir=directory, mode=mode, resume="allow", settings=quiet, **settings)
            # after resuming, steps come again, which W&B's own step counter would drop
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:  # no network, a wrong key, a full disk: training does not need it
            log.warning("W&B cannot start %s: %s", mode, next(iter(str(error).splitlines()), type(error).__name__))
            wandb.teardown()  # or the next try finds the run's id in use
    return None


def _names(name: str | None, directory: Path) -> tuple[str | None, str | None]:
    """(a run's name in W&B, its group): the jobs of a sweep, whose directories are numbers, share a name."""
    if name and directory.name.isdecimal() and directory.parent.name == Path(name).name:
        return f"{name}/{directory.name}", name
    return name, None


def _logged_in(wandb) -> bool:
    if "prompt" in signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None  # before `prompt`, login would ask
