"""Decide the settings of a launch from the command line and the settings of a checkpoint or of a Hugging Face model.

A run that has a checkpoint keeps the settings of the checkpoint, and the command line overrides single settings. Therefore the
user can launch a run again by its name alone. A new run that starts from a Hugging Face model takes the settings of the model
and the tokenizer from the folder of the model.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from ringattn.train.settings.config import GROUPS, MAY_DIFFER, Config, DataConfig, ModelConfig, unused_settings
from ringattn.train.settings.token_budget import SOURCES


def reset_unused(config: Config, given: set[str]) -> Config:
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


def given_names(overrides: Iterable[str]) -> set[str]:
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


def settings_of_resumed_run(composed: Config, saved: Config, given: set[str], is_own: bool) -> Config:
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
    for group in GROUPS:
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
    if not sets_tokenizer(composed, given):
        config.data.tokenizer = saved.data.tokenizer
        kept += ["eos_token", "special_tokens"]
    for name in kept:
        if f"data.{name}" not in given:
            setattr(config.data, name, getattr(saved.data, name))
    return config


def settings_of_published_model(composed: Config, given: set[str], folder: Path, model: ModelConfig) -> Config:
    """Return the settings of a new run that starts from a model in Hugging Face's format.

    Args:
        composed: the settings that Hydra has composed.
        given: the names of the groups and settings that the command line sets.
        folder: the absolute path of the folder of the model.
        model: the settings of the model.
    """
    config = deepcopy(composed)
    config.trainer.init_from = str(folder)
    config.model = _override_model(model, composed.model, given)
    if not sets_tokenizer(composed, given):
        config.data.tokenizer = str(folder / "tokenizer.json")
    return config


def sets_tokenizer(composed: Config, given: set[str]) -> bool:
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
        is_size = value is not None and field.name not in MAY_DIFFER
        is_chosen = value != field.default and given & {"model", "experiment"} or is_size and "model" in given
        if is_chosen or f"model.{field.name}" in given:
            overrides[field.name] = value
    if overrides.get("rope_factor", model.rope_factor) is None:
        # These settings have no effect without a factor.
        unused = {"rope_trained_len": ModelConfig.rope_trained_len, "rope_scaling": ModelConfig.rope_scaling}
        overrides = unused | overrides
    return replace(model, **overrides)
