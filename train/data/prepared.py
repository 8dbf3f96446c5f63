"""Open documents that `ringattn-prepare` has tokenised. docs/prepared-data.md describes the files."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ringattn.train.data import sources
from ringattn.train.data.shards import Documents, Shards, read_index
from ringattn.train.data.tokenisation import describe_tokenizer
from ringattn.train.data.tokenizer import Tokenizer
from ringattn.train.settings.config import ConfigError, DataConfig

# The files of a tokenizer that training, generation and export need
TOKENIZER_FILES = ("tokenizer_config.json", "config.json", "special_tokens_map.json", "chat_template.jinja")


def open_prepared(config: DataConfig, tokenizer: Tokenizer) -> Documents:
    """Open the documents in the folder `data.path`, and select the part `data.split`. No tokens are read.

    Raises:
        ConfigError: the folder is incomplete or damaged, or was prepared with another tokenizer or other settings.
    """
    folder = folder_of(config)
    store = Shards(folder)
    own = describe_tokenizer(tokenizer)
    known = store.index["tokenizer"]
    if changed := [f"{name} {known.get(name)} (now {value})" for name, value in own.items() if known.get(name) != value]:
        raise ConfigError(
            f"data.path={config.path} was not prepared with data.tokenizer={config.tokenizer}: {', '.join(changed)}; set "
            f"data.tokenizer={tokenizer_path(folder)}, or prepare the text with the other tokenizer"
        )
    for name in ("format", "special_tokens"):
        if (prepared := store.index["settings"][name]) != getattr(config, name):
            raise ConfigError(
                f"data.path={config.path} was prepared with data.{name}={prepared}, but data.{name}={getattr(config, name)}: "
                f"set data.{name}={prepared}"
            )
    documents = Documents.of(store, {"train": len(store.lengths)})
    if config.split in ("train", "all"):
        return documents
    try:
        parts = sources.absolute_parts(config.split, documents.splits)
    except Exception as error:  # The type depends on `datasets`.
        raise sources.cannot_read(config, error) from error
    return documents.select(np.concatenate([np.arange(part.from_, part.to) for part in parts]))


def folder_of(config: DataConfig) -> Path:
    if not config.path:
        raise ConfigError("data.source=prepared requires data.path: a folder that ringattn-prepare has written")
    return Path(config.path).expanduser().resolve()


def tokenizer_path(folder: Path) -> str:
    path = folder / "tokenizer" / "tokenizer.json"
    return str(path) if path.exists() else "bytes"


def settings_of(config: DataConfig) -> dict[str, Any]:
    """Return the settings with which the folder `data.path` was prepared, by name, such as "data.tokenizer"."""
    folder = folder_of(config)
    settings = read_index(folder)["settings"] | {"tokenizer": tokenizer_path(folder)}
    return {f"data.{name}": value for name, value in settings.items()}


def copy_tokenizer(name: str, folder: Path) -> None:
    """Copy the files of the tokenizer `data.tokenizer` to a prepared folder, so that the folder is complete."""
    if name == "bytes":
        return
    source, target = Path(name).expanduser(), folder / "tokenizer"
    target.mkdir(parents=True, exist_ok=True)
    names = {source: "tokenizer.json"} | {source.with_name(each): each for each in TOKENIZER_FILES}
    for path, new_name in names.items():
        if path.is_file():
            partial = target / f"{new_name}.partial"
            shutil.copyfile(path, partial)
            partial.replace(target / new_name)
