"""Tokenise a text before training, so that runs on this text start at once.

    ringattn-prepare output=FOLDER data=jsonl data.path='corpus/*.jsonl' data.tokenizer=tokenizer.json
    ringattn-train data=prepared data.path=FOLDER ...

The settings of the text are those of the training: data, data.path, data.subset, data.split, data.format, data.column,
data.messages_column, data.join, data.max_document_mb, data.on_error, data.tokenizer, data.eos_token, data.special_tokens
and data.num_proc, the number of processes. docs/settings.md explains all settings.

If the command is killed, run it again to continue where it stopped.
"""

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ringattn.train.commands.arguments import apply_overrides, option, parse, run_program
from ringattn.train.commands.messages import exit_process
from ringattn.train.data.prepared import copy_tokenizer
from ringattn.train.data.shards import read_index
from ringattn.train.data.tokenisation import check_counts, tokenise
from ringattn.train.data.tokenizer import tokenizer_of
from ringattn.train.data.workers import start_server
from ringattn.train.settings.config import Config, ConfigError, check

log = logging.getLogger(__name__)

SETTINGS = (
    *("source", "path", "subset", "split", "format", "column", "messages_column", "join", "max_document_mb", "on_error"),
    *("tokenizer", "eos_token", "special_tokens", "num_proc"),
)


@dataclass
class Options:
    """The options of this command."""

    output: str = option("The folder for the shards: a new or empty folder, or the folder of a preparation that was killed.")


def main() -> NoReturn:
    exit_process(run_program(run_command_line, Options, __doc__))


def run_command_line(arguments: list[str]) -> None:
    """Tokenise the text that the arguments describe."""
    arguments = [f"data.source={each[5:]}" if each.startswith("data=") else each for each in arguments]
    options, overrides = parse(arguments, Options, settings=("data.",))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("ringattn-prepare starts its own processes: start it without torchrun, and set data.num_proc")
    config = apply_overrides(Config(), overrides)
    for name, value in overrides.items():
        if name.removeprefix("data.") not in SETTINGS:
            raise ConfigError(f"{name}={value} has no effect on a preparation: set it in the training")
    check(config, world_size=1)
    data, folder = config.data, Path(options.output).expanduser()
    if data.source in ("prepared", "recall"):
        raise ConfigError(f"data.source={data.source} needs no preparation: choose data=text, jsonl, parquet, hub or stdlib")
    with suppress(OSError):  # `tokenise` raises the same error with an explanation.
        start_server(tokenise.__module__)  # The server imports its modules while this process reads the tokenizer.
    try:
        tokenise(data, tokenizer_of(data), folder=folder)
        copy_tokenizer(data.tokenizer, folder)
    except OSError as error:
        raise ConfigError(f"output={options.output} cannot be written: {error}; choose another folder") from error
    index = read_index(folder)
    check_counts(data, index["documents"], index["counts"])
    amount = f"{index['documents']:,} documents, {index['tokens']:,} tokens in {len(index['shards']):,} shards"
    log.info(f"{'prepared':<12}{amount}; train on them with: data=prepared data.path={folder}")
