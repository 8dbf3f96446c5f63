"""Which checkpoint a run goes on from, and what that was trained with beside the settings of the run."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ringattn.train.checkpoint import storage
from ringattn.train.config import Config, ConfigError, TrainerConfig

COMPARED = ("model", "data", "parallel", "optim", "trainer")  # groups of settings
FIXED = ("model.", "data.mask_documents")  # of these, what parameters mean
FREE = (
    *("data.path", "parallel.timeout_s"),  # the first is compared as the corpus
    *("trainer.device", "trainer.compile", "trainer.resume", "trainer.init_from", "trainer.peak_tflops"),
    *("trainer.time_limit_s", "trainer.eval_every"),
    *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.log_every"),
    *("trainer.sample_tokens", "trainer.sample_prompt"),
)

SCALING = ("model.rope_trained_len", "model.rope_scaling")  # without a rope_factor they mean nothing

Changes = dict[str, tuple[Any, Any]]  # settings that are not as they were, by name: (then, now)


def choose(own: Path, trainer: TrainerConfig) -> tuple[Path | None, str | None]:
    """The checkpoint to go on from, if any, and its run's origin: the checkpoint of another run that it began from, if any.

    A path in `own` goes back to that checkpoint, at every launch. Another path is where a run begins: as soon as it has a
    checkpoint of its own it goes on from there, so that the same command resumes it.

    Args:
        own: the run's directory of checkpoints.
        trainer: `resume` and `init_from`.

    Raises:
        ConfigError: the run has checkpoints already, and was not begun as these say; or one cannot be read.
    """
    newest, choice = storage.latest(own), trainer.resume
    if newest is not None and trainer.init_from is not None:
        begun = _init_from(storage.read_meta(newest))
        if begun is None or Path(begun).expanduser().resolve() != Path(trainer.init_from).expanduser().resolve():
            raise ConfigError(
                f"trainer.init_from={trainer.init_from}, but {newest} is of a run that began with "
                f"{begun or 'parameters of its own'}: give the run another name, or leave trainer.init_from out"
            )
    if choice == "never" and newest is not None:
        raise ConfigError(f"trainer.resume=never, but {newest} would be overwritten: give the run another name")
    if choice in ("auto", "never"):
        return newest, _origin(newest) if newest else None
    path = Path(choice).expanduser().resolve()
    if path.parent == own.resolve():
        return path, _origin(path)
    if newest is None:
        return path, str(path)
    if _origin(newest) != str(path):
        raise ConfigError(
            f"trainer.resume={choice}, but {newest} is of a run that did not begin from it and would be lost: give the run "
            "another name, or leave trainer.resume out"
        )
    return newest, str(path)


def inherit(path: Path, own: Path, meta: dict[str, Any], config: Config) -> None:
    """Set what a launch that goes on from the checkpoint at `path`, with this `meta`, need not say again.

    That is the warmup, or a raised `trainer.steps` would begin another one, and, of a checkpoint in `own`, how the run began.

    Raises:
        ConfigError: steps that end within that warmup.
    """
    if config.optim.warmup_steps is None:
        config.optim.warmup_steps = kept = meta["config"]["optim"]["warmup_steps"]
        if kept > config.trainer.steps:
            raise ConfigError(
                f"trainer.steps={config.trainer.steps} would end in the warmup of {kept} steps that {path} began: train "
                "longer, or set optim.warmup_steps"
            )
    if path.parent.resolve() == own.resolve():
        config.trainer.init_from = _init_from(meta)


def _init_from(meta: dict[str, Any]) -> str | None:
    return meta["config"]["trainer"].get("init_from")


def _origin(path: Path) -> str | None:
    return storage.read_meta(path).get("origin")


def differences(path: Path, meta: dict[str, Any], config: Config, tokens_per_step: int) -> str:
    """What the checkpoint at `path`, with this `meta`, was trained with and is not to be trained with; "" if all is the same.

    Raises:
        ConfigError: another model; or steps that are all done already, with other settings.
    """
    changed = _changes(meta, config, COMPARED)
    if (before := meta.get("tokens_per_step", tokens_per_step)) != tokens_per_step:
        changed = {"tokens_per_step": (before, tokens_per_step)} | changed
    if fixed := [name for name in changed if name.startswith(FIXED)]:
        raise ConfigError(
            f"{path} was trained with {_listed(changed, fixed)}: resume with the same, or give the run another name"
        )
    # who shares the work means nothing where none is left: a run that has ended samples again on any ranks
    asked = [name for name in changed if not name.startswith(("parallel.", "tokens_per_step"))]
    if asked and meta["step"] >= config.trainer.steps:
        raise ConfigError(
            f"{path} has done all {meta['step']} steps, with {_listed(changed, asked)}: give the run another name, or raise "
            "trainer.steps"
        )
    return _listed(changed, changed)


def model_differences(path: Path, meta: dict[str, Any], config: Config) -> str:
    """Of the model that the checkpoint at `path`, with this `meta`, holds, what may be otherwise in the settings and is.

    "" if all is the same.

    Raises:
        ConfigError: another number of heads, of which shapes need not tell; other shapes are refused where they are read.
    """
    changed = _changes(meta, config, ("model",))
    if fixed := [name for name in changed if name in ("model.heads", "model.kv_heads")]:
        raise ConfigError(f"{path} is a model of {_listed(changed, fixed)}: set the same")
    return _listed(changed, changed)


def _changes(meta: dict[str, Any], config: Config, groups: Iterable[str]) -> Changes:
    now, unset = (json.loads(json.dumps(asdict(each))) for each in (config, Config()))
    unscaled = now["model"]["rope_factor"] is None and meta["config"]["model"].get("rope_factor") is None
    pairs = {  # a setting that the checkpoint does not know was as it is where nothing is set
        f"{group}.{name}": (meta["config"][group].get(name, unset[group][name]), value)
        for group in groups
        for name, value in now[group].items()
    }
    free = (*FREE, *SCALING) if unscaled else FREE
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in free}


def _listed(changed: Changes, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={changed[name][0]} (now {changed[name][1]})" for name in names)
