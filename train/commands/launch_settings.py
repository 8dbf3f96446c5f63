"""Read the files that determine the settings of a launch: the checkpoint of the run, or the folder of a Hugging Face model."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ringattn.train.checkpoint import huggingface, resume, storage
from ringattn.train.checkpoint.init import initial_weights_path
from ringattn.train.settings.config import Config, ConfigError
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
    given = given_names(overrides)
    check_sources(composed, given)
    if lengths and composed.trainer.tokens_per_step is None:
        tokens = common_tokens_per_step(composed, lengths, world_size)
        composed = replace(composed, trainer=replace(composed.trainer, tokens_per_step=tokens))
        given = given - {"trainer.accumulate"} | {"trainer.tokens_per_step"}
    checkpoint, _ = resume.choose_checkpoint(directory / "checkpoints", composed.trainer)
    if checkpoint is None:
        return reset_unused(_settings_of_new_run(composed, given), given)
    saved = resume.saved_config(storage.read_meta(checkpoint))
    log.info(f"{'settings':<12}of {checkpoint}, and of the command line")
    is_own = checkpoint.parent.resolve() == (directory / "checkpoints").resolve()
    return reset_unused(settings_of_resumed_run(composed, saved, given, is_own), given)


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
