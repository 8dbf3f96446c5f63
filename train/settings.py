"""Decide the settings of a launch from the command line, the checkpoint of the run, and the folder of a Hugging Face model.

A run that has a checkpoint keeps the settings of the checkpoint, and the command line overrides single settings. Therefore the
user can launch a run again by its name alone. A new run that starts from a Hugging Face model takes the settings of the model
and the tokenizer from the folder of the model.
"""

import logging
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from ringattn.train.checkpoint import huggingface, resume, storage
from ringattn.train.checkpoint.init import initial_weights_path
from ringattn.train.config import Config, ConfigError, DataConfig, ModelConfig, unused_settings
from ringattn.train.token_budget import SOURCES, check_sources, common_tokens_per_step

log = logging.getLogger(__name__)


def resolve_settings(
    composed: Config, overrides: Iterable[str], directory: Path, lengths: Sequence[int] = (), world_size: int = 1
) -> Config:
    """Return the settings of a launch.

    A run that resumes from a checkpoint has the settings of the checkpoint. A new run has the settings that Hydra has composed.
    If `trainer.init_from` of a new run names the folder of a Hugging Face model, the settings of the model and the tokenizer
    come from this folder. In both cases, the command line has precedence. An override such as `optim.lr=1e-4` sets one setting,
    and the choice of a file such as `optim=wsd` sets all settings of the group. If the command line chooses an experiment or a
    recipe, the settings that Hydra has composed replace all others. Only the number of steps and, without an experiment, the
    sequence length are kept, unless the command line sets them. On the command line, `trainer.steps` replaces an earlier
    `trainer.total_tokens`, `trainer.accumulate` replaces an earlier `trainer.tokens_per_step`, and `parallel.ring` or
    `parallel.ulysses` replaces an earlier `parallel.mesh=fastest`.

    Args:
        composed: the settings that Hydra has composed from the YAML files and the command line.
        overrides: the arguments of the command line. An argument that the program has added is not an override.
        directory: the directory of the run.
        lengths: the sequence lengths of all jobs of a sweep that varies the length. All these jobs receive the same number of
            tokens per step, unless the user has set this number. Empty for any other run.
        world_size: the number of ranks that were launched. It is used only together with `lengths`.

    Raises:
        ConfigError: a checkpoint or the folder of the model cannot be read, the folder has no tokenizer, the checkpoints of the
            run contradict `trainer.resume` or `trainer.init_from`, or the command line sets a value that is derived.
    """
    given = _names(overrides)
    check_sources(composed, given)
    if lengths and composed.trainer.tokens_per_step is None:
        composed = deepcopy(composed)
        composed.trainer.tokens_per_step = common_tokens_per_step(composed, lengths, world_size)
        given = given - {"trainer.accumulate"} | {"trainer.tokens_per_step"}
    checkpoint, _ = resume.choose_checkpoint(directory / "checkpoints", composed.trainer)
    if checkpoint is None:
        return _reset_unused(_settings_of_new_run(composed, given), given)
    saved = resume.saved_config(storage.read_meta(checkpoint))
    log.info(f"{'settings':<12}of {checkpoint}, and of the command line")
    is_own = checkpoint.parent.resolve() == (directory / "checkpoints").resolve()
    return _reset_unused(_settings_of_resumed_run(composed, saved, given, is_own), given)


def _reset_unused(config: Config, given: set[str]) -> Config:
    """Return a copy in which settings without an effect have their default values, unless the command line sets them.

    A recipe or an experiment may set such a setting. For example, `trainer.eval_tokens` has no effect if the command line sets
    `data.eval_fraction=0`. If the command line itself sets a setting without an effect, `config.check` raises an error.
    """
    config = deepcopy(config)
    for name, _, _ in list(unused_settings(config)):
        if name not in given:
            group, option = name.split(".")
            setattr(getattr(config, group), option, getattr(getattr(Config(), group), option))
    return config


def _names(overrides: Iterable[str]) -> set[str]:
    """Return the names of the groups and settings that the command line sets, such as "optim" and "trainer.steps"."""
    names = set()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = override.value() if override.value_type else None
        if isinstance(value, dict):  # An override such as `trainer={steps:5}` sets several settings of a group.
            names |= {f"{override.key_or_group}.{name}" for name in value}
        elif override.key_or_group != "experiment" or value is not None:
            # If a setting is a list, the command line may set a single element of it.
            names.add(".".join(override.key_or_group.split(".")[:2]))
    return names


def _settings_of_resumed_run(composed: Config, saved: Config, given: set[str], is_own: bool) -> Config:
    """Return the settings of a run that resumes from a checkpoint with the settings `saved`.

    Args:
        composed: the settings that Hydra has composed.
        saved: the settings of the checkpoint.
        given: the names of the groups and settings that the command line sets.
        is_own: whether the checkpoint belongs to this run and not to a run from which this run branches.
    """
    config = deepcopy(composed if given & {"experiment", "recipe"} else saved)
    # The checkpoint may come from somebody else. Therefore it may keep data on this machine, but it may not send data to W&B.
    if not is_own:
        config.logger = deepcopy(composed.logger)
    elif config.logger.wandb == "online":
        config.logger.wandb = composed.logger.wandb
    for group in resume.GROUPS:
        if group in given:
            setattr(config, group, deepcopy(getattr(composed, group)))
        for name in vars(getattr(config, group)):
            if f"{group}.{name}" in given:
                setattr(getattr(config, group), name, getattr(getattr(composed, group), name))
    config.name, config.trainer.resume = composed.name, composed.trainer.resume
    if not given & {"trainer.steps", "trainer.total_tokens"}:
        config.trainer.steps, config.trainer.total_tokens = saved.trainer.steps, saved.trainer.total_tokens
    if not given & {"data.seq_len", "experiment"}:
        # The length that a recipe sets depends on the number of ranks, which may have changed.
        config.data.seq_len = saved.data.seq_len
    for derived, source in SOURCES.items():
        if f"trainer.{derived}" in given and f"trainer.{source}" not in given:
            setattr(config.trainer, source, None)
    if config.parallel.mesh == "fastest" and given & {"parallel.ring", "parallel.ulysses"}:
        for name in ("mesh", "ring", "ulysses"):
            setattr(config.parallel, name, getattr(composed.parallel, name))
    # A run that branches does not start from the initial weights of the other run, but from the checkpoint.
    config.trainer.init_from = composed.trainer.init_from or (saved.trainer.init_from if is_own else None)
    config.model = _override_model(saved.model, composed.model, given)
    kept = ["group_size", "eval_fraction"]  # The position in the data is valid only in the same order.
    if not _sets_tokenizer(composed, given):
        config.data.tokenizer = saved.data.tokenizer
        kept += ["eos_token", "special_tokens"]
    for name in kept:
        if f"data.{name}" not in given:
            setattr(config.data, name, getattr(saved.data, name))
    return config


def _settings_of_new_run(composed: Config, given: set[str]) -> Config:
    """Return the settings of a run without a checkpoint.

    Args:
        composed: the settings that Hydra has composed.
        given: the names of the groups and settings that the command line sets.

    Raises:
        ConfigError: `trainer.init_from` names a folder that cannot be read or that has no tokenizer.
    """
    path = initial_weights_path(composed)
    if path is None or not huggingface.is_model(path):
        return composed
    config = deepcopy(composed)
    config.trainer.init_from = str(path)
    config.model = _override_model(huggingface.model_config(path), composed.model, given)
    if not _sets_tokenizer(composed, given):
        config.data.tokenizer = str(path / "tokenizer.json")
        if not (path / "tokenizer.json").is_file():
            raise ConfigError(
                f"trainer.init_from={path} has no tokenizer.json: download it, or set data.tokenizer to the tokenizer.json "
                "of the model; data.tokenizer=bytes trains the model on bytes instead"
            )
    return config


def _sets_tokenizer(composed: Config, given: set[str]) -> bool:
    """Return whether the tokenizer is set on the command line, or in a file that is selected on the command line."""
    return "data.tokenizer" in given or composed.data.tokenizer != DataConfig.tokenizer


def _override_model(model: ModelConfig, composed: ModelConfig, given: set[str]) -> ModelConfig:
    """Return the settings of an existing model, with the settings of the command line in place of the existing ones.

    Some settings of the command line may contradict the existing weights. Such settings are rejected later, when the run
    compares its settings with the weights.

    Args:
        model: the settings of the existing model.
        composed: the settings of the model that Hydra has composed.
        given: the names of the groups and settings that the command line sets.
    """
    overrides = {}
    for field in fields(ModelConfig):
        value = getattr(composed, field.name)
        # A file such as configs/model/8b.yaml leaves out settings that have their default values. If the setting is a size, the
        # default value replaces the size of the existing model. All other settings that are left out keep the values of the
        # existing model.
        is_size = value is not None and field.name not in huggingface.MAY_DIFFER
        is_chosen = value != field.default and given & {"model", "experiment"} or is_size and "model" in given
        if is_chosen or f"model.{field.name}" in given:
            overrides[field.name] = value
    if overrides.get("rope_factor", model.rope_factor) is None:
        # These settings have no effect without a factor.
        unused = {"rope_trained_len": ModelConfig.rope_trained_len, "rope_scaling": ModelConfig.rope_scaling}
        overrides = unused | overrides
    return replace(model, **overrides)
