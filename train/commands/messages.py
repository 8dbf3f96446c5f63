"""Show messages and errors of the user in one line. This module does not import torch."""

import json
import logging
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from ringattn.train.settings.config import SETTINGS, ConfigError

SETTING_ERRORS = (ConfigError, OmegaConfBaseException)  # errors in the settings that a user gives

# Maps the names of settings in other programs to our names.
OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optim.lr"),
    **dict.fromkeys(("max_steps", "total_steps", "train_steps", "num_train_steps"), "trainer.steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "trainer.accumulate"),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), "trainer.batch_size"),
    **dict.fromkeys(("block_size", "context_length", "max_seq_length", "max_length", "sequence_length"), "data.seq_len"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val"), "optim.clip"),
    **dict.fromkeys(("save_steps", "save_every"), "trainer.checkpoint_every"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), "memory.activations"),
    **{"eval_steps": "trainer.eval_every", "logging_steps": "trainer.log_every"},
}


def show_messages(is_shown: bool = True) -> None:
    logging.raiseExceptions = False  # Do not print a traceback for every line that cannot be written.
    if is_shown:
        logging.basicConfig(format="%(message)s")  # Messages are written to stderr.
        logging.getLogger("ringattn.train").setLevel(logging.INFO)


def exit_process(status: int) -> NoReturn:
    """Exit after the ranks have disconnected. Skip Python's cleanup, in which threads of gloo sometimes abort."""
    logging.shutdown()
    with suppress(BrokenPipeError):  # The program that reads the output may have exited.
        print(end="", flush=True)  # sys.stdout is None if it was closed before the start.
        print(end="", file=sys.stderr, flush=True)
    os._exit(status)


def report_error(error: Exception) -> None:
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in describe_error(error))
    print("error:", text, file=sys.stderr, flush=True)
    write_error_file(text)


def write_error_file(text: str) -> None:
    """Write the reason for a failure to the error file that torchrun reads, if there is one."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(content))


def describe_error(error: Exception) -> str:
    """Describe a user error in one line. Hydra's messages have several lines, or are hidden in `__cause__`."""
    from hydra.errors import OverrideParseException  # This import is slow.

    origin: BaseException | None = error
    while isinstance(origin, InterpolationResolutionError):  # Hydra raises the error of a resolver several times.
        origin = origin.__cause__ or origin.__context__
    if origin is not error and isinstance(origin, ConfigError):
        return str(origin)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and is_dataclass(cause.object_type):
        if nearest := nearest_setting(cause.full_key):
            return f"unknown option {cause.full_key}: did you mean {nearest}?"
        known = ", ".join(field.name for field in fields(cause.object_type))
        return f"unknown option {cause.full_key}: choose one of {known}"
    if isinstance(error, OverrideParseException):
        parts = [part for part in error.message.splitlines() if part.strip(" ^") and not part.startswith("See https")]
        reason = "Hydra cannot read the value" if parts[-1].startswith("Lexer") else parts[-1]
        return f"{error.override}: {reason}; quote a value with brackets, ~ or the like for Hydra as well: 'key=\"value\"'"
    if isinstance(cause, OmegaConfBaseException):
        prefix = f"{cause.full_key}: " if cause.full_key else ""
        return prefix + str(cause).splitlines()[0]
    text = " ".join(re.split("Config search path|See https", str(error))[0].split())
    return text + ("; start the file with # @package _global_" if text.startswith("In 'experiment/") else "")


def nearest_setting(name: str | None) -> str | None:
    """Return the setting that a user probably meant by an unknown name, if any."""
    group, _, option = (name or "").rpartition(".")
    if other := get_close_matches(option, OTHER_NAMES, 1, cutoff=0.85):
        return OTHER_NAMES[other[0]]
    exact = [each for each in SETTINGS if each.endswith(f".{option}")]
    own = [each for each in SETTINGS if each.startswith(f"{group}.")]
    return next(iter(exact or get_close_matches(name or "", own, 1, cutoff=0.8)), None)
