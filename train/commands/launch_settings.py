"""Read the settings of a launch from a checkpoint or from the folder of a Hugging Face model."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ringattn.train.checkpoint import huggingface, resume, storage
from ringattn.train.checkpoint.init import initial_weights_path
from ringattn.train.data import prepared
from ringattn.train.settings.config import Config, ConfigError, with_settings
from ringattn.train.settings.resolution import (
    given_names,
    reset_unused,
    sets_tokenizer,
    settings_of_published_model,
    settings_of_resumed_run,
)
from ringattn.train.settings.token_budget import check_sources, common_tokens_per_step

log = logging.getLogger(__name__)


def resolve_settings(
    composed: Config, overrides: Iterable[str], directory: Path, lengths: Sequence[int] = (), world_size: int = 1
) -> Config:
    """Return the settings of a launch.

    A run that resumes has the settings of its checkpoint. A new run has the settings that Hydra has composed. A new run that
    starts from a Hugging Face model has the `model` settings of the Hugging Face model. The command line has precedence:
    `optim.lr=1e-4` sets one setting, and `optim=wsd` sets the whole group. `experiment=NAME` replaces all settings except the
    number of steps. `recipe=NAME` also keeps the sequence length.

    Args:
        composed: the settings that Hydra has composed from the YAML files and the command line.
        overrides: the arguments of the command line.
        directory: the directory of the run.
        lengths: the sequence lengths of a sweep's jobs, which all have the same number of tokens per step.
        world_size: the number of ranks, used only with `lengths`.

    Raises:
        ConfigError: a file cannot be read, the checkpoints contradict the settings, or the user sets a derived value.
    """
    given = given_names(overrides)
    check_sources(composed, given)
    if lengths and composed.trainer.tokens_per_step is None:
        tokens = common_tokens_per_step(composed, lengths, world_size)
        composed = replace(composed, trainer=replace(composed.trainer, tokens_per_step=tokens))
        given = given - {"trainer.accumulate"} | {"trainer.tokens_per_step"}
    checkpoint, _ = resume.choose_checkpoint(directory / "checkpoints", composed.trainer)
    if checkpoint is None:
        config = _settings_of_new_run(composed, given)
    else:
        saved = resume.saved_config(storage.read_meta(checkpoint))
        log.info(f"{'settings':<12}of {checkpoint}, and of the command line")
        is_own = checkpoint.parent.resolve() == (directory / "checkpoints").resolve()
        config = settings_of_resumed_run(composed, saved, given, is_own)
    return reset_unused(settings_of_prepared_text(config, given), given)


def settings_of_prepared_text(config: Config, given: set[str]) -> Config:
    """Return settings in which a prepared text determines its tokenizer and format, unless the user has set them.

    Raises:
        ConfigError: the folder of the text cannot be read.
    """
    if config.data.source != "prepared":
        return config
    values = prepared.settings_of(config.data)
    if sets_tokenizer(config, given):
        del values["data.tokenizer"]
    return with_settings(config, {name: value for name, value in values.items() if name not in given})


def _settings_of_new_run(composed: Config, given: set[str]) -> Config:
    path = initial_weights_path(composed)
    if path is None or not huggingface.is_model(path):
        return composed
    model = huggingface.model_config(path)
    if not sets_tokenizer(composed, given) and not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"trainer.init_from={path} has no tokenizer.json: download it, or set data.tokenizer to the tokenizer.json of the "
            "model; data.tokenizer=bytes trains the model on bytes instead"
        )
    return settings_of_published_model(composed, given, path, model)
