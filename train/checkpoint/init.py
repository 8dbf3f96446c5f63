"""Load the initial weights of a new run from a checkpoint or from a Hugging Face model (`trainer.init_from`)."""

from pathlib import Path
from typing import Any

from torch import nn

from ringattn.train.checkpoint import huggingface, state_dict, storage
from ringattn.train.checkpoint.resume import compare_model_settings, read_run_meta
from ringattn.train.data.tokenizer import Tokenizer, check_tokenizer, fingerprint
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.parallel.shard import local_shard
from ringattn.train.settings.config import Config, ConfigError, resolve_path


def initial_weights_path(config: Config) -> Path | None:
    path = config.trainer.init_from
    return None if path is None else resolve_path("trainer.init_from", path)


def compare_settings(path: Path, config: Config, tokenizer: Tokenizer) -> str:
    """Return the differences between the run's settings and the model at `path`, or "" if there are none.

    Args:
        path: a checkpoint, or a folder with a Hugging Face model.

    Raises:
        ConfigError: `path` is neither a checkpoint nor a model, or its weights do not fit the run.
    """
    if huggingface.is_model(path):
        if (source := path / "tokenizer.json").is_file():
            check_tokenizer(config.data.tokenizer, tokenizer, fingerprint(source), f"the model has its own tokenizer, {source}")
        return huggingface.compare_settings(path, config.model, tokenizer.vocab_size)
    if not (path / "meta.json").is_file() and not storage.CHECKPOINT_NAME.fullmatch(path.name):
        raise ConfigError(
            f"trainer.init_from={path} must be the path of a checkpoint (a step_... directory) or of a folder with a Hugging "
            "Face model (with a config.json)"
        )
    meta = read_run_meta(path)
    check_tokenizer_of(path, meta, config, tokenizer)
    return compare_model_settings(path, meta, config)


def check_tokenizer_of(path: Path, meta: dict[str, Any], config: Config, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if the checkpoint at `path` was trained with another tokenizer. `meta` is its meta.json."""
    reason = f"{path} was trained with the tokenizer {meta['config']['data'].get('tokenizer')}"
    check_tokenizer(config.data.tokenizer, tokenizer, meta.get("tokenizer"), reason)


def load(path: Path, model: nn.Module) -> None:
    """Load the weights at `path` into `model`. All ranks call this function. Call `compare_settings` first.

    Raises:
        ConfigError: on every rank, if a file is unreadable, or a weight is missing, not finite or of another shape.
    """
    if huggingface.is_model(path):
        with sync_errors():
            huggingface.load(path, model)
    else:
        storage.load(path, state_dict.model_state(model))
    with sync_errors():
        for name, weight in model.state_dict().items():
            if not local_shard(weight).isfinite().all():
                is_model = huggingface.is_model(path)
                shown = huggingface.hugging_face_name(name, huggingface.family_of(path)) if is_model else name
                raise ConfigError(f"{path}: {shown} contains NaN or infinity: download or export the model again")
