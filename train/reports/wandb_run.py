"""Record a run in Weights & Biases (W&B): its settings, metrics, tables, images and summary.

Each training run has a single W&B run. The file wandb_id contains the id of the W&B run. A launch without a network connection
writes a folder wandb/offline-run-*. The function `sync_command` returns the command that uploads the folder.
"""

import logging
import os
import secrets
import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.train.files import write_atomically
from ringattn.train.preemption import TrainingStopped
from ringattn.train.reports.loss_results import from_metrics as losses_from_metrics
from ringattn.train.reports.recall_results import from_metrics
from ringattn.train.settings.config import Config, ConfigError
from ringattn.train.settings.sweep import is_job_of_sweep

log = logging.getLogger(__name__)

# Translates WANDB_MODE to a value of `logger.wandb`.
WANDB_MODES = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "off"}

# The user's folder for table contents that W&B has not uploaded yet.
USER_DATA_DIRECTORY = os.environ.get("WANDB_DATA_DIR")


class WandbRun:
    """Records a training run in W&B.

    The methods do nothing if W&B is off, after an error of W&B, or on ranks other than 0.
    """

    def __init__(self, config: Config, directory: Path, facts: dict[str, Any] | None = None) -> None:
        """Start the W&B run, or continue it if an earlier launch has started it.

        Args:
            config: becomes the config of the W&B run.
            facts: further properties, which the config contains under the key "run".

        Raises:
            ConfigError: on rank 0, if `logger.wandb` is "online" but the user is not logged in.
        """
        self._directory, self._facts = directory, dict(facts or {})
        self._run, self._is_offline = None, False
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._run, self._is_offline = _start(config, directory, self._facts)

    def add_facts(self, facts: dict[str, Any]) -> None:
        """Add properties of the run that were unknown when the run started."""
        self._facts |= facts
        self._call(lambda run: run.config.update({"run": self._facts}, allow_val_change=True))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the metrics of a step. The losses by length and the accuracies are also recorded as tables."""
        self._call(lambda run: run.log({"step": step, **values}))
        if losses := losses_from_metrics(values):
            self.log_table("loss_by_length", step, ["length", "loss"], losses.items())
        if accuracies := from_metrics(values):
            rows = [[length, position, accuracy] for (length, position), accuracy in accuracies.items()]
            self.log_table("recall_by_position", step, ["length", "position_percent", "accuracy"], rows)

    def log_table(self, name: str, step: int, columns: list[str], rows: Iterable[Iterable[Any]]) -> None:
        self._log_media(name, step, "Table", columns=columns, data=[list(row) for row in rows])

    def log_picture(self, name: str, step: int, path: Path) -> None:
        self._log_media(name, step, "Image", str(path))

    def update_summary(self, summary: dict[str, Any]) -> None:
        self._call(lambda run: run.summary.update(summary))

    def __enter__(self) -> "WandbRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(exit_code=0 if kind is None or issubclass(kind, TrainingStopped) else 1)

    def close(self, exit_code: int = 0) -> None:
        """Finish the W&B run. If the run was recorded offline, log the command that uploads it.

        Args:
            exit_code: 0 if the launch ended as intended. W&B shows a run as failed if its exit code is not 0.
        """
        self._call(lambda run: run.finish(exit_code=exit_code))
        # In offline mode, `finish` returns before W&B's process has written the last records, so wait until it exits.
        self._call(lambda _: import_module("wandb").teardown())
        if self._run is not None and self._is_offline:
            log.info(f"{'W&B':<12}upload this run with: {sync_command(self._directory)}")
        self._run = None

    def _log_media(self, name: str, step: int, kind: str, *arguments: Any, **options: Any) -> None:
        # Import wandb only if W&B is on, because the import is slow.
        self._call(lambda run: run.log({"step": step, name: getattr(import_module("wandb"), kind)(*arguments, **options)}))

    def _call(self, method: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            method(self._run)
        except Exception as error:  # Training must continue without W&B.
            log.warning("W&B failed: %s; the run continues without W&B", error)
            self._run = None


def sync_command(directory: Path, is_sweep: bool = False) -> str:
    """Return the command that uploads the offline parts of a run or a sweep."""
    folder = shlex.quote(str(directory))
    return f"wandb sync {folder}/wandb" + f" {folder}/*/wandb" * is_sweep


def keep_tables_in(directory: Path) -> None:
    """By default, let W&B store the contents of tables in the directory of the run.

    The user may choose another folder. W&B's default folder is in the home directory. The command `wandb sync` silently skips a
    table if its contents are missing.
    """
    if USER_DATA_DIRECTORY is None:
        os.environ["WANDB_DATA_DIR"] = str(directory / "wandb" / "data")


def _start(config: Config, directory: Path, facts: dict[str, Any]) -> tuple[Any, bool]:
    choice = chosen_mode(config)
    if choice == "off":
        log.info(f"{'W&B':<12}off")
        return None, False
    import wandb  # Importing wandb is slow.

    wandb.setup(settings=wandb.Settings(silent=True))
    if choice != "offline" and not wandb.login(prompt=False, verify=False):
        if choice == "online":
            raise ConfigError("logger.wandb=online requires a login to W&B: run `wandb login`, or use offline or auto")
        choice = "offline"
    settings = wandb.Settings(silent=True, console="off", init_timeout=30)
    keep_tables_in(directory)
    for mode in ("offline",) if choice == "offline" else ("online", "offline"):
        try:
            # Offline runs also store `resume`, so `wandb sync` appends the rows of this launch to earlier rows.
            run = wandb.init(dir=directory, mode=mode, resume="allow", settings=settings, **_options(config, directory, facts))
            # W&B's own step counter would drop steps that a resumed run records again.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            log.info(f"{'W&B':<12}{mode}, " + str(run.url if mode == "online" else directory / "wandb"))
            return run, mode == "offline"
        except Exception as error:  # Training must not fail because of a missing network, a wrong key or a full disk.
            log.warning("W&B cannot start %s: %s", mode, next(iter(str(error).splitlines()), type(error).__name__))
            wandb.teardown()  # Free the id of the W&B run for the next attempt.
    return None, False


def _options(config: Config, directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    name, group = config.name, None
    if is_job_of_sweep(directory):  # All jobs of a sweep have the same name and form a group.
        name, group = f"{config.name}/{directory.name}", config.name
    project = project_name(config)
    return dict(project=project, name=name, group=group, id=run_id(directory), config=asdict(config) | {"run": facts})


def chosen_mode(config: Config) -> str:
    choice = config.logger.wandb
    return WANDB_MODES.get(os.environ.get("WANDB_MODE", ""), "auto") if choice == "auto" else choice


def project_name(config: Config) -> str:
    return config.logger.project or os.environ.get("WANDB_PROJECT", "ringattn")


def run_id(directory: Path) -> str:
    """Return the id of the W&B run from the file wandb_id. The first launch creates this file."""
    path = directory / "wandb_id"
    if not (path.exists() and path.read_text().strip()):
        write_atomically(path, secrets.token_hex(4).encode())
    return path.read_text().strip()
