"""The parameters that a run begins with, and nothing else of where they come from: `trainer.init_from`."""

from pathlib import Path

from torch import nn

from ringattn.train.checkpoint import huggingface, state_dict, storage
from ringattn.train.checkpoint import resume as resume_rules
from ringattn.train.config import Config, ConfigError
from ringattn.train.data.tokenizer import Tokenizer, check_tokenizer, fingerprint
from ringattn.train.parallel.ranks import sync_errors


def choose(config: Config) -> Path | None:
    """Where the parameters that the settings name are; None: they name none."""
    path = config.trainer.init_from
    return None if path is None else Path(path).expanduser().resolve()


def compare(path: Path, config: Config, tokenizer: Tokenizer) -> str:
    """Of the model whose parameters are at `path`, what may be otherwise in the settings and is; "" if all is the same.

    Args:
        path: of a checkpoint, or of a folder in Hugging Face's format.
        tokenizer: of the run.

    Raises:
        ConfigError: neither, or one of another tokenizer, or of a folder of a model of another shape, or of other heads.
    """
    ours = config.data.tokenizer, tokenizer
    if huggingface.is_model(path):
        changed = huggingface.differences(path, config.model, tokenizer.vocab_size)
        if (own := path / huggingface.TOKENIZER).is_file():
            check_tokenizer(*ours, fingerprint(own), f"{path} has one of its own, {own}")
        return changed
    if not (path / "meta.json").is_file() and not storage.CHECKPOINT_NAME.fullmatch(path.name):
        raise ConfigError(
            f"trainer.init_from={path} is neither a checkpoint, a step_... directory, nor a downloaded folder of a "
            "model in Hugging Face's format, with its config.json: give the path of one"
        )
    meta = storage.read_meta(path)
    before = meta["config"]["data"]["tokenizer"]
    check_tokenizer(*ours, meta.get("tokenizer"), f"{path} was trained with another, then {before}")
    return resume_rules.model_differences(path, meta, config)


def load(path: Path, model: nn.Module) -> None:
    """Fill the parameters of `model` with those at `path`, which `compare` has let pass.

    Raises:
        ConfigError: on every rank: parameters of another shape.
    """
    if huggingface.is_model(path):
        with sync_errors():
            huggingface.load(path, model)
    else:
        storage.load(path, state_dict.model_state(model))
