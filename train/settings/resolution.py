"""Combine the command line with the settings of a checkpoint or a Hugging Face model.

Settings of the command line override those of the checkpoint. A run can therefore be launched again by its name alone.
"""

from collections.abc import Iterable
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from ringattn.train.settings.config import (
    GROUPS,
    MAY_DIFFER,
    SETTINGS,
    Config,
    DataConfig,
    ModelConfig,
    unused_settings,
    with_settings,
)
from ringattn.train.settings.token_budget import SOURCES


def reset_unused(config: Config, given: set[str]) -> Config:
    """Reset unused settings to their defaults, except settings on the command line.

    If a setting of the command line has no effect, `config.check` raises an error.
    """
    return with_settings(config, _values_of(Config(), (name for name, _, _ in unused_settings(config) if name not in given)))


def _values_of(config: Config, names: Iterable[str]) -> dict[str, Any]:
    return {name: attrgetter(name)(config) for name in names}


def given_names(overrides: Iterable[str]) -> set[str]:
    """Return the groups and settings on the command line, such as "optim" and "trainer.steps"."""
    names = set()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        value = override.value() if override.value_type else None
        if isinstance(value, dict):  # An override such as `trainer={steps:5}` sets several settings of a group.
            names |= {f"{override.key_or_group}.{name}" for name in value}
        elif override.key_or_group != "experiment" or value is not None:
            # The command line may set a single element of a setting that is a list.
            names.add(".".join(override.key_or_group.split(".")[:2]))
    return names


def settings_of_resumed_run(composed: Config, saved: Config, given: set[str], is_own: bool) -> Config:
    """Return the settings of a run that resumes from a checkpoint.

    Args:
        composed: the settings from Hydra.
        given: the names of groups and settings on the command line.
        is_own: False if this run branches from another run.
    """
    base = composed if given & {"experiment", "recipe"} else saved
    config = replace(base, **{group: getattr(composed, group) for group in GROUPS if group in given})
    # A checkpoint may come from somebody else, so it must not enable uploads to W&B.
    if not is_own:
        config = replace(config, logger=composed.logger)
    elif config.logger.wandb == "online":
        config = with_settings(config, _values_of(composed, ["logger.wandb"]))
    config = with_settings(config, _values_of(composed, {"name", "trainer.resume"} | given.intersection(SETTINGS)))
    kept = ["trainer.steps", "trainer.total_tokens"] if not given & {"trainer.steps", "trainer.total_tokens"} else []
    if not given & {"data.seq_len", "experiment"}:
        # A recipe's sequence length depends on the number of ranks, which may have changed.
        kept.append("data.seq_len")
    # The saved position in the data is valid only for the same order of the data.
    kept += {"data.group_size", "data.eval_fraction"} - given
    if not sets_tokenizer(composed, given):
        kept += ["data.tokenizer", *({"data.eos_token", "data.special_tokens"} - given)]
    values = _values_of(saved, kept)
    for derived, source in SOURCES.items():
        if f"trainer.{derived}" in given and f"trainer.{source}" not in given:
            values[f"trainer.{source}"] = None
    if config.parallel.mesh == "fastest" and given & {"parallel.ring", "parallel.ulysses"}:
        values |= _values_of(composed, ["parallel.mesh", "parallel.ring", "parallel.ulysses"])
    # A run that branches from another run loads a checkpoint, so it ignores the other run's initial weights.
    values["trainer.init_from"] = composed.trainer.init_from or (saved.trainer.init_from if is_own else None)
    return replace(with_settings(config, values), model=_override_model(saved.model, composed.model, given))


def settings_of_published_model(composed: Config, given: set[str], folder: Path, model: ModelConfig) -> Config:
    """Return the settings of a new run that starts from the Hugging Face model in `folder`.

    Other arguments as in `settings_of_resumed_run`.
    """
    values = {"trainer.init_from": str(folder), "model": _override_model(model, composed.model, given)}
    if not sets_tokenizer(composed, given):
        values["data.tokenizer"] = str(folder / "tokenizer.json")
    return with_settings(composed, values)


def sets_tokenizer(composed: Config, given: set[str]) -> bool:
    return "data.tokenizer" in given or composed.data.tokenizer != DataConfig.tokenizer


def _override_model(model: ModelConfig, composed: ModelConfig, given: set[str]) -> ModelConfig:
    """Return the settings of an existing model, overridden by the command line."""
    overrides = dict[str, Any]()
    for field in fields(ModelConfig):
        value = getattr(composed, field.name)
        # With model=8b, all sizes come from configs/model/8b.yaml or have their defaults. Other settings that
        # configs/model/8b.yaml leaves out stay as in the existing model.
        is_size = value is not None and field.name not in MAY_DIFFER
        is_chosen = (value != field.default and given & {"model", "experiment"}) or (is_size and "model" in given)
        if is_chosen or f"model.{field.name}" in given:
            overrides[field.name] = value
    if overrides.get("rope_factor", model.rope_factor) is None:
        # Without `rope_factor`, `rope_trained_len` and `rope_scaling` have no effect.
        for name in ("rope_trained_len", "rope_scaling"):
            overrides.setdefault(name, getattr(ModelConfig, name))
    if overrides.get("rope_scaling", model.rope_scaling) != "longrope":
        overrides.setdefault("rope_factors", None)
    return replace(model, **overrides)
