"""The initial weights of a run: random, or those of a checkpoint or of a Hugging Face folder (`trainer.init_from`)."""

from pathlib import Path

from torch import nn

from ringattn.train.checkpoint import huggingface, state_dict, storage
from ringattn.train.checkpoint import resume as resume_rules
from ringattn.train.config import Config, ConfigError
from ringattn.train.data.tokenizer import Tokenizer, check_tokenizer, fingerprint
from ringattn.train.parallel.ranks import sync_errors


def initial_weights_path(config: Config) -> Path | None:
    """Return the checkpoint or folder that `trainer.init_from` names; None for random weights."""
    path = config.trainer.init_from
    return None if path is None else Path(path).expanduser().resolve()


def compare(path: Path, config: Config, tokenizer: Tokenizer) -> str:
    """Describe the settings that differ from those the weights at `path` were trained with, among those that may differ.

    Args:
        path: of a checkpoint, or of a folder in Hugging Face's format.
        config: the settings of the run.
        tokenizer: of the run.

    Returns:
        A description; "" if no setting differs.

    Raises:
        ConfigError: `path` is neither a checkpoint nor a model folder, or the weights belong to a different tokenizer or to a
            model with different shapes or heads.
    """
    ours = config.data.tokenizer, tokenizer
    if huggingface.is_model(path):
        changed = huggingface.differences(path, config.model, tokenizer.vocab_size)
        if (own := path / huggingface.TOKENIZER).is_file():
            check_tokenizer(*ours, fingerprint(own), f"{path} contains its own tokenizer, {own}")
        return changed
    if not (path / "meta.json").is_file() and not storage.CHECKPOINT_NAME.fullmatch(path.name):
        raise ConfigError(
            f"trainer.init_from={path} must be the path of a checkpoint (a step_... directory) or of a folder with a model in "
            "Hugging Face's format (with a config.json)"
        )
    meta = storage.read_meta(path)
    before = meta["config"]["data"]["tokenizer"]
    check_tokenizer(*ours, meta.get("tokenizer"), f"{path} was trained with the tokenizer {before}")
    return resume_rules.model_differences(path, meta, config)


def load(path: Path, model: nn.Module) -> None:
    """Load the weights at `path`, which `compare` has accepted, into `model`.

    Raises:
        ConfigError: on every rank, if a weight has a different shape.
    """
    if huggingface.is_model(path):
        with sync_errors():
            huggingface.load(path, model)
    else:
        storage.load(path, state_dict.model_state(model))
