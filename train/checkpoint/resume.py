"""Choose the checkpoint that a run resumes from, and compare the settings it was trained with to the settings of the run."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringattn.train.checkpoint import storage
from ringattn.train.config import Config, ConfigError, TrainerConfig

COMPARED = ("model", "data", "parallel", "optim", "trainer")  # the groups of settings that are compared
FIXED = ("model.", "data.mask_documents")  # settings that must not change, because the weights depend on their meaning
# Settings that may change without notice. Instead of data.path, the corpus itself is compared.
FREE = (
    *("data.path", "parallel.timeout_s"),
    *("trainer.device", "trainer.compile", "trainer.resume", "trainer.init_from", "trainer.peak_tflops"),
    *("trainer.time_limit_s", "trainer.eval_every"),
    *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.log_every"),
    *("trainer.sample_tokens", "trainer.sample_prompt"),
)

SCALING = ("model.rope_trained_len", "model.rope_scaling")  # unused without a rope_factor

Changes = dict[str, tuple[Any, Any]]  # settings that differ, by name: (value of the checkpoint, value of this run)


def choose_checkpoint(own: Path, trainer: TrainerConfig) -> tuple[Path | None, str | None]:
    """Return the checkpoint to resume from, and the checkpoint of a different run that this run branched from; None if none.

    With the path of a checkpoint of this run, every launch goes back to that checkpoint. With the path of a checkpoint of a
    different run, this run branches from it. When the run has a checkpoint of its own, it resumes from that one, so the same
    command can be repeated.

    Args:
        own: the directory of the run's checkpoints.
        trainer: its settings `resume` and `init_from` are used.

    Raises:
        ConfigError: the run already has checkpoints but did not start as these settings say, or a checkpoint cannot be read.
    """
    newest, choice = storage.latest(own), trainer.resume
    if newest is not None and trainer.init_from is not None:
        begun = _init_from(storage.read_meta(newest))
        if begun is None or Path(begun).expanduser().resolve() != Path(trainer.init_from).expanduser().resolve():
            raise ConfigError(
                f"trainer.init_from={trainer.init_from}, but {newest} belongs to a run that started from "
                f"{begun or 'random weights'}: choose another name for this run, or remove trainer.init_from"
            )
    if choice == "never" and newest is not None:
        raise ConfigError(f"trainer.resume=never, but {newest} would be overwritten: choose another name for this run")
    if choice in ("auto", "never"):
        return newest, _origin(newest) if newest else None
    path = Path(choice).expanduser().resolve()
    if path.parent == own.resolve():
        return path, _origin(path)
    if newest is None:
        return path, str(path)
    if _origin(newest) != str(path):
        raise ConfigError(
            f"trainer.resume={choice}, but {newest} belongs to a run that did not branch from it and would be lost: choose "
            "another name for this run, or remove trainer.resume"
        )
    return newest, str(path)


def inherit(path: Path, own: Path, meta: dict[str, Any], config: Config) -> None:
    """Take settings that the user does not have to repeat from the checkpoint at `path` with this `meta`, into `config`.

    The warmup is taken over, because a larger `trainer.steps` would otherwise imply a longer warmup. If the checkpoint is in
    `own`, `trainer.init_from` is taken over as well.

    Raises:
        ConfigError: the run would end within the warmup.
    """
    if config.optim.warmup_steps is None:
        config.optim.warmup_steps = kept = meta["config"]["optim"]["warmup_steps"]
        if kept > config.trainer.steps:
            raise ConfigError(
                f"trainer.steps={config.trainer.steps} would end within the warmup of {kept} steps of {path}: use more steps, "
                "or set optim.warmup_steps"
            )
    if path.parent.resolve() == own.resolve():
        config.trainer.init_from = _init_from(meta)


def _init_from(meta: dict[str, Any]) -> str | None:
    return meta["config"]["trainer"].get("init_from")


def _origin(path: Path) -> str | None:
    return storage.read_meta(path).get("origin")


def differences(path: Path, meta: dict[str, Any], config: Config, tokens_per_step: int) -> str:
    """Describe the settings that differ from those the checkpoint at `path` was trained with; "" if none differs.

    Args:
        path: of the checkpoint.
        meta: of the checkpoint.
        config: the settings of this run.
        tokens_per_step: of this run.

    Raises:
        ConfigError: the model differs, or all steps are completed already and a setting differs.
    """
    changed = _changes(meta, config, COMPARED)
    if (before := meta.get("tokens_per_step", tokens_per_step)) != tokens_per_step:
        changed = {"tokens_per_step": (before, tokens_per_step)} | changed
    if fixed := [name for name in changed if name.startswith(FIXED)]:
        raise ConfigError(
            f"{path} was trained with {_listed(changed, fixed)}: resume with the same settings, or choose another name"
        )
    # A completed run may be sampled again on any number of ranks, so these settings do not matter.
    asked = [name for name in changed if not name.startswith(("parallel.", "tokens_per_step"))]
    if asked and meta["step"] >= config.trainer.steps:
        raise ConfigError(
            f"{path} has completed all {meta['step']} steps, with {_listed(changed, asked)}: choose another name for this run, "
            "or raise trainer.steps"
        )
    return _listed(changed, changed)


def model_differences(path: Path, meta: dict[str, Any], config: Config) -> str:
    """Describe the model settings that differ from those of the checkpoint at `path`, among those that may differ; "" if none.

    Raises:
        ConfigError: the number of heads differs, which shapes may not reveal. Different shapes raise an error when they are
            read.
    """
    changed = _changes(meta, config, ("model",))
    if fixed := [name for name in changed if name in ("model.heads", "model.kv_heads")]:
        raise ConfigError(f"{path} contains a model with {_listed(changed, fixed)}: use the same settings")
    return _listed(changed, changed)


def _changes(meta: dict[str, Any], config: Config, groups: Iterable[str]) -> Changes:
    now, unset = (json.loads(json.dumps(asdict(each))) for each in (config, Config()))
    unscaled = now["model"]["rope_factor"] is None and meta["config"]["model"].get("rope_factor") is None
    # A setting that the checkpoint does not contain did not exist yet, so it had its default value.
    pairs = {
        f"{group}.{name}": (meta["config"][group].get(name, unset[group][name]), value)
        for group in groups
        for name, value in now[group].items()
    }
    free = (*FREE, *SCALING) if unscaled else FREE
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in free}


def _listed(changed: Changes, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={changed[name][0]} (now {changed[name][1]})" for name in names)
